"""How much each server has to do and how fast it does it: where the next request goes, and which ones leave a slow
server.

Owns the measure of speed and both choices, as functions of what was measured; it moves nothing itself. A response never
races another for the same place in a group: the one that ends first would be the shorter one. It is moved, with its
tokens.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Collection, Mapping, Sequence

from gspo_mega.rollout.client.flight import Flight

SLOW_RATIO = 3.0
"""A server is slow where its requests get their tokens so many times slower than the fastest server's do."""
DWELL_SECONDS = 2.0
"""A request stays where it is for so long at least: what it has must be read again elsewhere."""

_REPORT_SECONDS = 10.0
_UNKNOWN_REPORT_TOKENS = 32
_MOST_REPORT_TOKENS = 512
_MEMORY = 63 / 64  # what is left of a measurement when the next one is added


class Load:
    """What one server has open.

    `num_tokens`: tokens in flight, the prompts and the tokens so far of all its open requests. `speed`: tokens per
    second of one of its requests, by the last `measure`; None until something is known. `is_measured`: not a mere upper
    bound.
    """

    def __init__(self) -> None:
        self.flights: set[Flight] = set()
        self.num_tokens = 0
        self.speed: float | None = None
        self._tokens = self._seconds = 0.0

    @property
    def is_measured(self) -> bool:
        return self._seconds > 0

    def note(self, num_tokens: int, seconds: float, first: bool) -> None:
        """One of its requests got so many tokens, after so long. The first report waits for the prompt to be read,
        too.
        """
        self.num_tokens += num_tokens
        if not first or num_tokens > 1:
            self._tokens = self._tokens * _MEMORY + num_tokens
            self._seconds = self._seconds * _MEMORY + max(seconds, 1e-6)

    def measure(self, now: float, progress_deadline_seconds: float) -> None:
        """Bring `speed` up to date. Silence counts: a request that still has not reported cannot be faster than its
        next report would be, coming now.
        """
        known = self._tokens / self._seconds if self.is_measured else None
        silent = [now - flight.last_report for flight in self.flights]
        bound = self.report_tokens(progress_deadline_seconds) / max(statistics.median(silent), 1e-6) if silent else None
        self.speed = min((value for value in (known, bound) if value is not None), default=None)

    def report_tokens(self, progress_deadline_seconds: float) -> int:
        """After how many tokens a request reports: seldom, for a report has its cost, and often enough before the
        deadline.
        """
        if not self.is_measured:
            return _UNKNOWN_REPORT_TOKENS
        seconds = min(_REPORT_SECONDS, progress_deadline_seconds / 8)
        return min(_MOST_REPORT_TOKENS, max(1, int(self._tokens / self._seconds * seconds)))


def least_loaded(servers: Mapping[str, Load], avoid: Collection[str]) -> str:
    """Of these servers, rather none of `avoid`: where the tokens in flight are the fewest for the speed at which they
    move. A server whose speed is not known yet counts as a fast one.
    """
    fastest = max((load.speed for load in servers.values() if load.speed), default=1.0)

    def cost(server_id: str) -> tuple:
        load = servers[server_id]
        return server_id in avoid, (load.num_tokens + 1) / (load.speed or fastest), random.random()

    return min(servers, key=cost)


def to_move(servers: Sequence[Load], room: Mapping[int, int], now: float) -> list[Flight]:
    """Requests that a slow server has beyond its share by speed, as many as others have room for.

    `room`: of those servers that may take requests, by place in `servers`, how many more.
    """
    fastest = max((load.speed for load in servers if load.is_measured and load.speed), default=0.0)
    slow = {i for i, load in enumerate(servers) if load.speed is not None and load.speed * SLOW_RATIO <= fastest}
    left = sum(free for i, free in room.items() if i not in slow)
    if not slow or left <= 0:
        return []
    total = sum(len(load.flights) for load in servers)
    weights = [fastest if load.speed is None else load.speed for load in servers]
    weight = sum(weights[i] for i in range(len(servers)) if i in slow or i in room)
    moves: list[Flight] = []
    for i in sorted(slow, key=lambda i: weights[i]):
        excess = len(servers[i].flights) - int(total * weights[i] / weight)
        able = [
            flight for flight in servers[i].flights if flight.cause is None and now - flight.started >= DWELL_SECONDS
        ]
        able.sort(
            key=lambda flight: flight.num_tokens
        )  # the fewest tokens to be read again; which ones is all the same to lengths
        chosen = able[: max(0, min(excess, left))]
        left -= len(chosen)
        moves += chosen
    return moves

"""How many restarts a server may have before it is given up.

Owns the count and its decay, by a monotonic clock. It starts and watches nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

_FIRST_DELAY_SECONDS = 0.5
_LONGEST_DELAY_SECONDS = 30.0


class RestartBudget:
    """Counts restarts: each adds one, and every `forgiven_after_seconds` of healthy serving take one away.

    A server that never becomes healthy gets `max_restarts` restarts; one that fails once a week never runs out of them.
    Time spent starting, hanging or waiting forgives nothing.
    """

    def __init__(
        self, max_restarts: int, forgiven_after_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_restarts, self._forgiven_after_seconds, self._clock = max_restarts, forgiven_after_seconds, clock
        self._counted = 0.0
        self._healthy_since: float | None = None

    @property
    def failed_starts(self) -> int:
        """How many of the `max_restarts + 1` starts have failed; those that were forgiven are left out."""
        return math.ceil(self._counted)

    @property
    def most_starts(self) -> int:
        return self._max_restarts + 1

    def healthy(self) -> None:
        """The server became ready now."""
        self._healthy_since = self._clock()

    def failed(self, last_healthy: float | None = None) -> float | None:
        """The server has failed. Returns the seconds to wait before its next start, longer each time, or None when it
        is given up.

        `last_healthy`: the clock's time when the server was last healthy; now, by default.
        """
        if self._healthy_since is not None:
            healthy_seconds = (self._clock() if last_healthy is None else last_healthy) - self._healthy_since
            self._counted = max(0.0, self._counted - max(0.0, healthy_seconds) / self._forgiven_after_seconds)
            self._healthy_since = None
        self._counted += 1.0
        if self._counted > self._max_restarts:
            return None
        return min(_LONGEST_DELAY_SECONDS, _FIRST_DELAY_SECONDS * 2 ** (self._counted - 1))

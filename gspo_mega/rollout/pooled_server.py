"""One server as the pool knows it: its registration, its client, its load, and the weights that it is known to hold.

`PooledServer` is one generation of one server. Its calls end as soon as the server is found gone.

`Load` measures a server's speed. `least_loaded` chooses the server for a request, and `requests_to_move` the requests
that should leave a slow server; both only compute, from the measurements. Two responses never race for the same place
in a group, because the first to end would be the shorter one; instead, a response is moved with its tokens. A later
turn of an episode goes to the server that has read its context already, unless that server is much busier.

`LoopThread` is one thread with one asyncio event loop, for everything that talks to servers. The trainer's own threads
submit coroutines to it and wait for results. If the thread has ended, they get an error, because no result would come.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import random
import statistics
import threading
import time
from collections.abc import Collection, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from gspo_mega.base.errors import PublishError, RolloutError
from gspo_mega.rollout.client.server_client import InFlightRequest, ServerClient, ServerError
from gspo_mega.rollout.client.server_control import HttpServerControl
from gspo_mega.rollout.registration import Registration, State

SLOW_RATIO = 3.0
"""A server is slow if its requests get their tokens this many times slower than those of the fastest server."""

DWELL_SECONDS = 2.0
"""The shortest time that a request stays on a server: another server would have to read all of its tokens again."""

PREFER_RATIO = 2.0
"""A request goes to the server that it prefers if that server's load with it is at most this many times the load that
the least loaded server would have with it. Another server has to read the whole context again.
"""

_REPORT_SECONDS = 10.0

_UNKNOWN_REPORT_TOKENS = 32

_MOST_REPORT_TOKENS = 512

_MEMORY = 63 / 64  # the weight that earlier measurements keep when the next one is added

_NONSENSE_LIMIT = 3

_MAX_REST_SECONDS = 5.0


_CHECK_SECONDS = 1.0


T = TypeVar("T")


class PooledServer:
    """One generation of one server.

    Attributes:
        verified_version: the weight version that the server is known to hold in full, or None. A server that started
            from a committed version holds that one. A call that begins to change its weights sets None, and only
            `note_verified` sets a version again.
        is_draining: it ends soon, and gets no more work.
        is_set_aside: it serves an evaluation (`eval_servers.py`), and training and publishes do without it.
        num_open: how many requests the pool gave to it that are not released yet.
        rest_until: the monotonic time before which it gets no request, after a failure.
    """

    def __init__(self, registration: Registration, client: ServerClient) -> None:
        self.registration = registration
        self.client = client
        self.verified_version: int | None = registration.weight_version
        self._is_gone = False
        self._calls: set[asyncio.Timeout] = set()
        self.is_draining = False
        self.is_set_aside = False
        self.num_open = 0
        self._idle_since: float | None = time.monotonic()
        self._idle_seconds = 0.0
        self.load = Load()
        self.rest_until = 0.0
        self._num_failures = 0
        self._num_nonsense = 0

    @property
    def server_id(self) -> str:
        return self.registration.server_id

    def control(self, loop: LoopThread) -> HttpServerControl:
        """Return a blocking control of this generation, for the publisher's threads. Its calls run on `loop`."""

        def run(call: Coroutine[Any, Any, Any]) -> Any:
            if self._is_gone:
                call.close()
                raise PublishError(f"{self.server_id}: generation {self.registration.generation} of it is gone")
            try:
                return loop.run(self.run(call))
            except ServerError as error:
                raise PublishError(str(error)) from error

        return HttpServerControl(self.registration, self.client, run, self._forget_version)

    async def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Await `call`, a call of this server, and return its result. Raises ServerError as soon as the server is found
        gone.
        """
        # A timeout that only `end` reschedules. Two tasks per call would cost more than the call itself does here.
        ends = asyncio.timeout(None)
        try:
            if self._is_gone:
                call.close()
                raise self._went_down()
            async with ends:
                self._calls.add(ends)
                return await call
        except TimeoutError as error:
            if ends.expired():
                raise self._went_down() from error
            raise
        finally:
            self._calls.discard(ends)

    @property
    def is_gone(self) -> bool:
        """Whether this generation of the server has ended."""
        return self._is_gone

    def end(self) -> None:
        """Note that this generation of the server has ended, and end its calls. Call it on the pool's loop."""
        self._is_gone = True
        now = asyncio.get_running_loop().time()
        for call in self._calls:
            call.reschedule(now)

    def _went_down(self) -> ServerError:
        return ServerError(self.server_id, "request", "connection", "the server went down")

    def open_request(self, num_tokens: int) -> None:
        """Note that the server gets a request with a prompt of `num_tokens`."""
        self.num_open += 1
        self.load.num_tokens += num_tokens + 1
        if self._idle_since is not None:
            self._idle_seconds += time.monotonic() - self._idle_since
            self._idle_since = None

    def close_request(self, num_tokens: int) -> None:
        """Note that a request has ended. `num_tokens` is the length of its prompt and its response."""
        self.num_open -= 1
        self.load.num_tokens -= num_tokens + 1
        if not self.num_open:
            self._idle_since = time.monotonic()

    def take_idle_seconds(self) -> float:
        """Return for how many seconds the server had no request since the last call."""
        now = time.monotonic()
        idle = self._idle_seconds + (0.0 if self._idle_since is None else now - self._idle_since)
        self._idle_seconds = 0.0
        self._idle_since = None if self._idle_since is None else now
        return idle

    def note_state(self, state: State) -> None:
        """Note the state as it was read last. The open requests of a draining server end with their tokens."""
        self.is_draining = state == "draining"
        for flight in self.load.flights if self.is_draining else ():
            flight.end("drained")

    def note_verified(self, weight_version: int) -> None:
        """Note that the server is verified to hold `weight_version` in full."""
        self.verified_version = weight_version
        self._num_nonsense = 0

    def note_success(self) -> None:
        """Note that a request was answered."""
        self._num_failures = self._num_nonsense = 0

    def note_failure(self, error: ServerError, now: float) -> bool:
        """Note that a request failed at the monotonic time `now`. The server rests, longer after each failure in a row.

        Return True if this is the third nonsense answer in a row: the server then no longer counts as holding any
        version.
        """
        if now >= self.rest_until:  # requests that fail together are one failure of the server
            self._num_failures += 1
            self.rest_until = now + min(_MAX_REST_SECONDS, 0.1 * 2 ** min(self._num_failures, 10))
        if error.kind != "nonsense":
            return False
        self._num_nonsense += 1
        if self._num_nonsense != _NONSENSE_LIMIT:
            return False
        self._forget_version()
        return True

    def _forget_version(self) -> None:
        self.verified_version = None


class Load:
    """The open requests of one server, and their speed.

    Attributes:
        flights: the open requests.
        num_tokens: the tokens in flight: the prompts and the tokens so far of all open requests.
        speed: tokens per second of one request, by the last `measure`; None until something is known.
    """

    def __init__(self) -> None:
        self.flights: set[InFlightRequest] = set()
        self.num_tokens = 0
        self.speed: float | None = None
        self._tokens = self._seconds = 0.0

    @property
    def is_measured(self) -> bool:
        """Whether `speed` is measured, and not only an upper bound."""
        return self._seconds > 0

    def add_report(self, num_tokens: int, seconds: float, first: bool) -> None:
        """Count a report: one request got `num_tokens` new tokens, `seconds` after its last report. `first` says that
        it is the first report, whose time includes reading the prompt.
        """
        self.num_tokens += num_tokens
        if not first or num_tokens > 1:
            self._tokens = self._tokens * _MEMORY + num_tokens
            self._seconds = self._seconds * _MEMORY + max(seconds, 1e-6)

    def measure(self, now: float, progress_deadline_seconds: float) -> None:
        """Update `speed`. Silence counts, too: a request cannot be faster than if its next report arrived now."""
        known = self._tokens / self._seconds if self.is_measured else None
        silent = [now - flight.last_report for flight in self.flights]
        bound = self.report_tokens(progress_deadline_seconds) / max(statistics.median(silent), 1e-6) if silent else None
        self.speed = min((value for value in (known, bound) if value is not None), default=None)

    def report_tokens(self, progress_deadline_seconds: float) -> int:
        """Return the number of tokens per report of a request: large, because a report has a cost, but small enough for
        several reports before the deadline.
        """
        if not self.is_measured:
            return _UNKNOWN_REPORT_TOKENS
        seconds = min(_REPORT_SECONDS, progress_deadline_seconds / 8)
        return min(_MOST_REPORT_TOKENS, max(1, int(self._tokens / self._seconds * seconds)))


def least_loaded(
    servers: Mapping[str, Load], avoid: Collection[str], prefer: str | None = None, num_tokens: int = 0
) -> str:
    """Return the server with the fewest tokens in flight relative to its speed.

    One of `avoid` is returned only if there is no other. A server whose speed is not known yet counts as fast. `prefer`
    is returned instead if it is one of `servers`, not one of `avoid`, and within `PREFER_RATIO`. `num_tokens` is the
    length of the request's context.
    """
    fastest = max((load.speed for load in servers.values() if load.speed), default=1.0)

    def cost(server_id: str) -> tuple:
        load = servers[server_id]
        return server_id in avoid, (load.num_tokens + 1) / (load.speed or fastest), random.random()

    least = min(servers, key=cost)
    if prefer is None or prefer not in servers or prefer in avoid:
        return least

    def load_with_it(server_id: str) -> float:
        load = servers[server_id]
        return (load.num_tokens + num_tokens + 1) / (load.speed or fastest)

    return prefer if load_with_it(prefer) <= PREFER_RATIO * load_with_it(least) else least


def requests_to_move(servers: Sequence[Load], room: Mapping[int, int], now: float) -> list[InFlightRequest]:
    """Return the requests that slow servers have beyond their share by speed, at most as many as other servers have
    room for.

    `room` says how many more requests a server may take, by its index in `servers`. It has only servers that may take
    any. `now` is the loop's time in seconds.
    """
    fastest = max((load.speed for load in servers if load.is_measured and load.speed), default=0.0)
    slow = {i for i, load in enumerate(servers) if load.speed is not None and load.speed * SLOW_RATIO <= fastest}
    left = sum(free for i, free in room.items() if i not in slow)
    if not slow or left <= 0:
        return []
    total = sum(len(load.flights) for load in servers)
    weights = [fastest if load.speed is None else load.speed for load in servers]
    weight = sum(weights[i] for i in range(len(servers)) if i in slow or i in room)
    moves: list[InFlightRequest] = []
    for i in sorted(slow, key=lambda i: weights[i]):
        excess = len(servers[i].flights) - int(total * weights[i] / weight)
        able = [
            flight for flight in servers[i].flights if flight.cause is None and now - flight.started >= DWELL_SECONDS
        ]
        # Move those with the fewest tokens to read again. The number of tokens so far says nothing about a response's
        # final length.
        able.sort(key=lambda flight: flight.num_tokens)
        chosen = able[: max(0, min(excess, left))]
        left -= len(chosen)
        moves += chosen
    return moves


class LoopThread:
    """A thread with an event loop. It starts at construction; `close()` cancels its tasks and ends it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._error: BaseException | None = None
        self._thread.start()

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        except BaseException as error:  # SystemExit and KeyboardInterrupt of a task end the loop
            self._error = error

    def check(self) -> None:
        """Raise RolloutError if the thread has ended."""
        if not self._thread.is_alive():
            raise RolloutError(f"the thread {self._name!r} has ended: {self._error!r}") from self._error

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> concurrent.futures.Future:
        """Run `coroutine` on the loop, and return its future, which any other thread may wait for or cancel. Raises
        RolloutError if the thread has ended.
        """
        try:
            self.check()
        except RolloutError:
            coroutine.close()
            raise
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run `coroutine` on the loop, wait for its result and return it. A deadline is up to the coroutine. Never call
        this from the loop. Raises what the coroutine raises, and RolloutError if the thread has ended.
        """
        future = self.submit(coroutine)
        while True:
            try:
                return future.result(timeout=_CHECK_SECONDS)
            except concurrent.futures.TimeoutError:
                if future.done():
                    raise  # the coroutine itself raised it
                self.check()

    def close(self) -> None:
        """Cancel all tasks and end the thread."""
        if self._loop.is_closed():
            return
        if self._thread.is_alive():
            self.run(self._cancel_rest())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        else:  # the thread has ended with tasks left: cancel them on this thread
            self._loop.run_until_complete(self._cancel_rest())
        self._loop.close()

    async def _cancel_rest(self) -> None:
        rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

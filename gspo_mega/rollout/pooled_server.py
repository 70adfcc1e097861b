"""One server as the pool knows it: its registration, its client, its load, and the weights it is known to hold.

Owns this state of one generation of one server, and that its calls end when it is found gone. Which server gets a
request is the pool's decision.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from gspo_mega.base.errors import PublishError
from gspo_mega.rollout.client.server_client import ServerClient, ServerError
from gspo_mega.rollout.client.server_control import HttpServerControl
from gspo_mega.rollout.load import Load
from gspo_mega.rollout.loop_thread import LoopThread
from gspo_mega.rollout.registration import Registration, State

T = TypeVar("T")

_NONSENSE_LIMIT = 3
_MAX_REST_SECONDS = 5.0


class PooledServer:
    """One generation of one server.

    Attributes:
        verified_version: the weight version that the server is known to hold in full, or None. A server that started
            from a committed version holds that one. Whoever begins to change its weights sets None; only
            `ServerPool.commit` sets a version again.
        is_draining: it ends soon, and gets no more work.
        is_set_aside: it serves an evaluation beside training (`set_aside.py`): training and publishes do without it.
        num_open: requests that the pool gave to it and that are not released yet.
        rest_until: monotonic time before which it gets no request, after a failure.
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
        """Blocking control of this generation, for the publisher's threads; its calls run on `loop`."""

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
        """Await `call`, a call of this server. Raises ServerError as soon as the server is found gone."""
        # A time-out that only `end` reschedules: two tasks for each call would cost more than the call does here.
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
        """This generation of the server has ended, and so do its calls. On the pool's loop."""
        self._is_gone = True
        now = asyncio.get_running_loop().time()
        for call in self._calls:
            call.reschedule(now)

    def _went_down(self) -> ServerError:
        return ServerError(self.server_id, "request", "connection", "the server went down")

    def open_request(self, num_tokens: int) -> None:
        """The server gets a request with a prompt of `num_tokens`."""
        self.num_open += 1
        self.load.num_tokens += num_tokens + 1
        if self._idle_since is not None:
            self._idle_seconds += time.monotonic() - self._idle_since
            self._idle_since = None

    def close_request(self, num_tokens: int) -> None:
        """A request has ended; `num_tokens`: of its prompt and its response."""
        self.num_open -= 1
        self.load.num_tokens -= num_tokens + 1
        if not self.num_open:
            self._idle_since = time.monotonic()

    def take_idle_seconds(self) -> float:
        """How long the server had no request since this was asked before."""
        now = time.monotonic()
        idle = self._idle_seconds + (0.0 if self._idle_since is None else now - self._idle_since)
        self._idle_seconds = 0.0
        self._idle_since = None if self._idle_since is None else now
        return idle

    def note_state(self, state: State) -> None:
        """The state as it was read last. The open requests of a draining server end with their tokens."""
        self.is_draining = state == "draining"
        for flight in self.load.flights if self.is_draining else ():
            flight.end("drained")

    def note_verified(self, weight_version: int) -> None:
        """The server is verified to hold `weight_version` in full."""
        self.verified_version = weight_version
        self._num_nonsense = 0

    def note_success(self) -> None:
        """A request was answered."""
        self._num_failures = self._num_nonsense = 0

    def note_failure(self, error: ServerError, now: float) -> bool:
        """A request failed at the monotonic time `now`: the server rests, longer after each failure in a row.

        Returns True where this is the third nonsense answer in a row: the server then no longer counts as holding any
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

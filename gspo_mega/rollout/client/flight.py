"""One request while a server works on it: the tokens that it reported, and an early end that loses none of them.

Owns the judgement that a request no longer makes progress. A request that does is never ended for being long: a
deadline on the whole of it would cut long responses and keep short ones. Ending one early asks the server for what it
has: the answer ends with all tokens so far, and the response goes on from there elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal, Protocol

from gspo_mega import beats
from gspo_mega.rollout.client.completion import Answer, Completion, NonsenseAnswer

Cause = Literal["stalled", "moved"]

GRACE_SECONDS = 5.0
"""How long a server may take to end a request that it was asked to end."""


class Meter(Protocol):
    """Who wants to know of tokens as they are reported; `rollout.load.Load` is one."""

    def note(self, num_tokens: int, seconds: float, first: bool) -> None: ...


class Flight:
    """One open request. Use it on one event loop, within the request's `begin` and `close`.

    `num_tokens`: reported so far, of this request alone. `cause`: why it was asked to end early, or None.
    """

    def __init__(self, deadline_seconds: float, meter: Meter | None = None) -> None:
        """`deadline_seconds`: longest wait from one report of new tokens to the next, and for the first."""
        self._deadline = deadline_seconds
        self._meter = meter
        self._timer: asyncio.TimerHandle | None = None
        self._limit: asyncio.Timeout | None = None
        self._abort: Callable[[], None] = lambda: None
        self._answer: Answer | None = None
        self._num_at_end = 0
        self.num_tokens = 0
        self.cause: Cause | None = None
        self.started = self.last_report = asyncio.get_running_loop().time()

    @property
    def grace_seconds(self) -> float:
        return min(GRACE_SECONDS, self._deadline)

    @property
    def made_no_progress(self) -> bool:
        """Whether it was ended for bringing no token for too long, and its end brought none either."""
        return self.cause == "stalled" and self.num_tokens == self._num_at_end

    def begin(self, answer: Answer, limit: asyncio.Timeout, abort: Callable[[], None]) -> None:
        """The request is being sent. `limit` ends it where it does not end by itself; `abort` asks the server to end
        it.
        """
        self._answer, self._limit, self._abort = answer, limit, abort
        self._watch()

    def close(self) -> None:
        """The request is over; there is nothing left to end."""
        self._limit = None
        if self._timer is not None:
            self._timer.cancel()

    def report(self, num_tokens: int) -> None:
        """So many new tokens came."""
        now = asyncio.get_running_loop().time()
        if self._meter is not None:
            self._meter.note(num_tokens, now - self.last_report, first=self.num_tokens == 0)
        self.num_tokens += num_tokens
        self.last_report = now
        beats.beat()  # a long response is no stuck rank

    def end(self, cause: Cause) -> None:
        """Ask the server to end it; what it has comes as the last report."""
        if self.cause is not None or self._limit is None:
            return
        self.cause = cause
        self._num_at_end = self.num_tokens
        self._limit.reschedule(asyncio.get_running_loop().time() + self.grace_seconds)
        self._abort()

    def so_far(self) -> Completion:
        """All tokens that were reported, as a response that was cut short; none where they make no sense."""
        try:
            return Completion([], [], [], "abort") if self._answer is None else self._answer.so_far()
        except NonsenseAnswer:
            return Completion([], [], [], "abort")

    def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        due = self.last_report + self._deadline
        if loop.time() >= due:
            self.end("stalled")
        else:
            self._timer = loop.call_at(due, self._watch)

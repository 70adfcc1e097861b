"""One request while a server works on it: the tokens reported so far, and an early end that loses none of them.

Owns the judgement that a request no longer makes progress. A request that makes progress is never ended for being long:
a deadline on the whole request would cut long responses and keep short ones. To end a request early is to ask the
server for its tokens so far: the answer ends with them, and the response continues on another server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from gspo_mega.base import beats
from gspo_mega.rollout.client.completion import Answer, Completion, NonsenseAnswer

Cause = Literal["stalled", "moved", "drained", "paused"]

GRACE_SECONDS = 5.0
"""Longest time that a server may take to end a request early."""


class Meter(Protocol):
    """Counts tokens as they are reported, as `rollout.load.Load` does."""

    def note(self, num_tokens: int, seconds: float, first: bool) -> None:
        """A request reported `num_tokens` new tokens, `seconds` after its last report."""
        ...


def _nothing() -> None: ...


class Flight:
    """One open request, between `begin` and `close`. Use it on one event loop.

    Attributes:
        prompt: the prompt's name; `is_named`: its silence was told to the user.
        num_tokens: tokens that this request has reported so far.
        cause: why the request is being ended early, or None.
    """

    def __init__(
        self,
        deadline_seconds: float,
        meter: Meter | None = None,
        on_tokens: Callable[[int, Sequence[int]], None] | None = None,
        prompt: str = "",
    ) -> None:
        """`deadline_seconds`: longest wait for the first report of new tokens, and from one report to the next.
        `on_tokens` is called with every report's tokens and the number of those before them; it must not raise.
        `prompt`: its name, for messages.
        """
        self._deadline = deadline_seconds
        self._meter = meter
        self._on_tokens = on_tokens
        self._timer: asyncio.TimerHandle | None = None
        self._limit: asyncio.Timeout | None = None
        self._abort: Callable[[], None] = _nothing
        self._answer: Answer | None = None
        self._num_at_end = 0
        self.prompt, self.is_named = prompt, False
        self.num_tokens = 0
        self.cause: Cause | None = None
        self.started = self.last_report = asyncio.get_running_loop().time()

    @property
    def grace_seconds(self) -> float:
        return min(GRACE_SECONDS, self._deadline)

    @property
    def made_no_progress(self) -> bool:
        """Whether the request was ended because it stalled, and its last report brought no token either."""
        return self.cause == "stalled" and self.num_tokens == self._num_at_end

    def begin(self, answer: Answer, limit: asyncio.Timeout, abort: Callable[[], None]) -> None:
        """The request is being sent. `abort` asks the server to end it early; `limit` ends it if that fails."""
        self._answer, self._limit, self._abort = answer, limit, abort
        self._watch()

    def close(self) -> None:
        """The request is over; there is nothing left to end."""
        self._limit = None
        self._abort = _nothing  # the caller's function knows this flight: its tokens would wait for Python's collector
        if self._timer is not None:
            self._timer.cancel()

    def report(self, num_tokens: int) -> None:
        """The server reported `num_tokens` new tokens."""
        now = asyncio.get_running_loop().time()
        if self._meter is not None:
            self._meter.note(num_tokens, now - self.last_report, first=self.num_tokens == 0)
        if self._on_tokens is not None and self._answer is not None:
            self._on_tokens(self.num_tokens, self._answer.tokens_from(self.num_tokens))
        self.num_tokens += num_tokens
        self.last_report = now
        beats.beat()  # rank 0 is not stuck while a long response makes progress

    def end(self, cause: Cause, asks: bool = True) -> None:
        """Ask the server to end the request; its last report has the tokens so far. Without `asks`, the caller does."""
        if self.cause is not None or self._limit is None:
            return
        self.cause = cause
        self._num_at_end = self.num_tokens
        self._limit.reschedule(asyncio.get_running_loop().time() + self.grace_seconds)
        if asks:
            self._abort()

    def so_far(self) -> Completion:
        """All tokens reported so far, as a response that was cut short; no tokens if they make no sense."""
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

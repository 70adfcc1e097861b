"""The own time of one episode in a worker: what its deadlines count.

It stands still while the episode waits for others: for a turn of the policy, or for a thread where none of its own
functions has one. What other episodes keep the loop busy for is left out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class OwnClock:
    """All in seconds; from any thread."""

    def __init__(self, others_seconds: Callable[[], float]) -> None:
        """`others_seconds`: what other episodes have kept the loop busy for so far."""
        self._others = others_seconds
        self._lock = threading.Lock()
        self._num_turns = self._num_queued = self._num_threads = 0
        self._seconds = 0.0
        self._since, self._others_then = time.perf_counter(), others_seconds()

    @property
    def seconds(self) -> float:
        with self._lock:
            return self._now()

    def change(self, *, turns: int = 0, queued: int = 0, threads: int = 0) -> None:
        """So many more turns are asked for, functions wait for a thread, and functions have one."""
        with self._lock:
            self._seconds = self._now()
            self._since, self._others_then = time.perf_counter(), self._others()
            self._num_turns += turns
            self._num_queued += queued
            self._num_threads += threads

    def _now(self) -> float:
        if self._num_turns or (self._num_queued and not self._num_threads):
            return self._seconds
        passed = time.perf_counter() - self._since
        return self._seconds + max(0.0, passed - (self._others() - self._others_then))

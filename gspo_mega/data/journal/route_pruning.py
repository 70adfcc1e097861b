"""Takes routed experts out of the files of old steps while the run goes on.

Owns the thread: rewriting a step's file reads every byte of it, tens of gigabytes for a large model, for which no step
waits. Which routes are not needed any more is the caller's to know; the files are `journal.py`'s.
"""

from __future__ import annotations

import concurrent.futures
import threading

from gspo_mega.base import background
from gspo_mega.data.journal.journal import Journal


class RoutePruning:
    """One per run. Use it from one thread."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._lock = threading.Lock()
        self._before = 0
        self._is_running = False
        self._future: concurrent.futures.Future[None] | None = None

    def begin(self, before_step: int) -> None:
        """Routes of the steps before this one go. Returns at once. Raises as `check`."""
        self.check()
        with self._lock:
            self._before = max(self._before, before_step)
            if not self._is_running:
                self._is_running = True
                self._future = background.begin("journal.prune_routes", self._run)

    def check(self) -> None:
        """Raise JournalError where a file could not be rewritten: it stays as it is."""
        if self._future is not None and self._future.done():
            future, self._future = self._future, None
            future.result()

    def wait(self) -> None:
        """Returns when all is done. Raises as `check`."""
        if self._future is not None:
            concurrent.futures.wait([self._future])
        self.check()

    def _run(self) -> None:
        done = 0
        try:
            while True:
                with self._lock:
                    before = self._before
                    if before == done:
                        self._is_running = False
                        return
                self._journal.prune_routes(before)
                done = before
        except BaseException:
            self._is_running = False
            raise

"""The stop request, as a rank sees it.

It is a file, attempts/NNNN/stop, whose text is the reason. Any process on any node that sees the run folder can write
it, and a rank that waits in a collective, which no signal interrupts, reads it later. Rank 0 looks at safe points and
tells the other ranks.
"""

from __future__ import annotations

import os

from gspo_mega.base.run_folder import Attempt


class StopRequested(Exception):
    """An orderly stop was requested; the text is the reason."""


class StopRequest:
    """The request of one attempt."""

    def __init__(self, attempt_dir: str | os.PathLike[str]) -> None:
        self._attempt = Attempt(attempt_dir)

    def check(self) -> str | None:
        """The reason once a stop was asked for, else None. One `open` per call: cheap enough for every step."""
        return self._attempt.stop_reason()

    def raise_if_made(self) -> None:
        """Raises StopRequested once a stop was asked for."""
        reason = self.check()
        if reason is not None:
            raise StopRequested(reason)

    def make(self, reason: str) -> None:
        """Request a stop from within the run. The first reason stands."""
        self._attempt.request_stop(reason)

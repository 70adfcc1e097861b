"""The stop request, as a rank sees it.

A file, attempts/NNNN/stop, whose text is the reason: it works from any process and any node that sees the run
folder, where a signal would not reach a rank that sits in a collective. Rank 0 looks at safe points and tells
the others.
"""

from __future__ import annotations

import os

from gspo_mega.run_folder import Attempt


class StopRequested(Exception):
    """Somebody asked for an orderly stop; the text is the reason."""


class StopRequest:
    """The request of one attempt."""

    def __init__(self, attempt_dir: str | os.PathLike[str]) -> None:
        self._attempt = Attempt(attempt_dir)

    def check(self) -> str | None:
        """The reason once a stop was asked for, else None. One `open` a call: cheap enough for every step."""
        return self._attempt.stop_reason()

    def raise_if_made(self) -> None:
        """Raises StopRequested once a stop was asked for."""
        reason = self.check()
        if reason is not None:
            raise StopRequested(reason)

    def make(self, reason: str) -> None:
        """Ask for a stop, from within the run. The first reason stands."""
        self._attempt.request_stop(reason)

"""What the entry point of a rank, such as `loop.run_train`, is given (`WorkerContext`), and the stop request as a rank
sees it. Imports no torch.

A stop request is a file, attempts/NNNN/stop, whose text is the reason. Any process on any node that sees the run folder
can write it, and a rank that waits in a collective, which no signal interrupts, reads it afterwards. Rank 0 checks for
it at safe points and tells the other ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gspo_mega.base.run_folder import Attempt
from gspo_mega.config import Config


class KeyValueStore(Protocol):
    """The part of the client of torch's key-value store that the ranks use."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...


@dataclass(frozen=True)
class WorkerContext:
    """The argument of a rank's entry point.

    The entry point returns a JSON object or None. Rank 0's is written to attempts/NNNN/result.json. If its `stopped` is
    true, the work ended early on a stop request and can be continued.

    Attributes:
        console: shows a line to the user on rank 0; does nothing on other ranks.
        is_lead: whether this is rank 0.
        open_store: makes a new client of the job's key-value store.
    """

    config: Config
    attempt_dir: Path
    run_dir: Path
    is_lead: bool
    console: Callable[[str], None]
    open_store: Callable[[], KeyValueStore]


class StopRequested(Exception):
    """An orderly stop was requested; the text is the reason."""


class StopRequest:
    """The stop request of one attempt."""

    def __init__(self, attempt_dir: str | os.PathLike[str]) -> None:
        self._attempt = Attempt(attempt_dir)

    def check(self) -> str | None:
        """The reason if a stop was requested, else None. One `open` per call: cheap enough for every step."""
        return self._attempt.stop_reason()

    def raise_if_made(self) -> None:
        """Raises StopRequested with the reason if a stop was requested."""
        reason = self.check()
        if reason is not None:
            raise StopRequested(reason)

    def make(self, reason: str) -> None:
        """Request a stop from within the run. If a stop was requested before, the first reason stays."""
        self._attempt.request_stop(reason)

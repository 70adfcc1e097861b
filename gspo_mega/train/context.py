"""What a rank's entry point, such as `loop.run_train`, is given. Imports no torch.

The stop request, as a rank sees it.

It is a file, attempts/NNNN/stop, whose text is the reason. Any process on any node that sees the run folder can write
it, and a rank that waits in a collective, which no signal interrupts, reads it later. Rank 0 looks at safe points and
tells the other ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gspo_mega.base.run_folder import Attempt
from gspo_mega.config import Config


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


class KeyValueStore(Protocol):
    """What the runtime uses of a client of torch's key-value store."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...


@dataclass(frozen=True)
class WorkerContext:
    """`is_lead`: whether this is rank 0. `console` shows a line to the user (on rank 0; elsewhere it does nothing).
    `open_store` makes a new client of the job's key-value store.

    The entry point returns a JSON object or None. Rank 0's is kept as attempts/NNNN/result.json; one with a true
    `stopped` says that the work ended early on a stop request and can be continued.
    """

    config: Config
    attempt_dir: Path
    run_dir: Path
    is_lead: bool
    notices: tuple[str, ...]
    console: Callable[[str], None]
    open_store: Callable[[], KeyValueStore]

"""What a rank's entry point, such as `loop.run_train`, is given. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gspo_mega.config import Config


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

"""Whose turn the GPUs are that ranks and servers share: a file of the attempt that rank 0 writes and servers obey.

Owns the file. A server that is being started would take memory that the ranks use: `gspo-mega serve` starts one in the
servers' turn only. Without the file it is always their turn.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from gspo_mega.base.run_folder import Attempt, atomic_write_json, read_json

Turn = Literal["ranks", "servers"]


def _file(attempt: Attempt) -> Path:
    return attempt.path / "gpu_turn.json"


def give_turn(attempt: Attempt, turn: Turn) -> None:
    """From now on it is this side's turn. Raises OSError."""
    atomic_write_json(_file(attempt), {"turn": turn})


def may_start(attempt: Attempt) -> bool:
    """Whether a server may be started now."""
    return (read_json(_file(attempt)) or {}).get("turn", "servers") == "servers"

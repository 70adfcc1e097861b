"""servers/<server_id>.json: how a server makes itself known to the run, and how the pool reads it.

Owns the record's fields and their meaning. `gspo-mega serve` is the one writer of its file; readers may see
any earlier state of it, never a torn one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from gspo_mega.errors import RolloutError
from gspo_mega.run_folder import atomic_write_json

State = Literal["starting", "ready", "restarting", "failed", "stopped"]


@dataclass(frozen=True)
class Registration:
    """One server as it sees itself.

    `generation` counts its starts in the attempt; a new one means that it holds the weights it was started with,
    whatever it was told before. Their version is `weight_version`: None where the run has committed no version of what
    it started from, as with `model.path`. `heartbeat` is unix seconds. `error` says why it failed, or why it last had
    to be started again.
    """

    server_id: str
    address: str
    pid: int
    state: State
    generation: int
    weight_version: int | None
    heartbeat: float
    tensor_parallel: int = 1
    error: str | None = None

    def write(self, servers_dir: Path) -> None:
        atomic_write_json(servers_dir / f"{self.server_id}.json", asdict(self))


def read_registrations(
    servers_dir: Path, on_error: Callable[[Path, OSError], object] | None = None
) -> list[Registration]:
    """All registrations of an attempt, by server id. Raises RolloutError for a file that is none.

    A file that the file system does not give is handed to `on_error` and left out; without it, and for the folder,
    OSError.
    """
    found = []
    names = sorted(os.listdir(servers_dir)) if servers_dir.exists() else []
    for path in (servers_dir / name for name in names if name.endswith(".json")):
        if path.name.startswith("."):  # a half-written neighbour of an atomic write
            continue
        try:
            found.append(Registration(**json.loads(path.read_text(encoding="utf-8"))))
        except FileNotFoundError:
            continue
        except OSError as error:
            if on_error is None:
                raise
            on_error(path, error)
        except (ValueError, TypeError) as error:
            raise RolloutError(f"{path}: not a server's registration: {error}") from error
    return found

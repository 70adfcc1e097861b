"""The files through which servers and a run find each other: registrations, the API key, and whose turn the GPUs are.

servers/<server_id>.json is a server's registration (`Registration`). Only the server's own `gspo-mega serve` writes it.
Readers may see any earlier state of the file, but never a part of one.

The API key of an attempt is a file of one line, mode 0600. SGLang logs all of its arguments by `repr`, also in
tracebacks; a `Secret` shows `'***'` there, and survives copies and pickling.

gpu_turn.json says whose turn the GPUs are that ranks and servers share. Rank 0 writes it and servers obey. A server
that is being started would take memory that the ranks use, so `gspo-mega serve` starts one only in the servers' turn.
Without the file it is always their turn.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from gspo_mega.base.errors import ConfigError, RolloutError
from gspo_mega.base.run_folder import Attempt, atomic_write_json, read_json
from gspo_mega.base.untrusted import read_json_file

State = Literal["waiting", "starting", "ready", "restarting", "draining", "failed", "stopped"]
"""`waiting`: the server starts as soon as the ranks leave it their GPUs. `draining`: it answers, takes no new work, and
ends when its open requests have gone elsewhere."""


_NUMBERS = (int, float)

_MOST_TIME = 2**63

_FIELDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("server_id", "address", "state"), (str,)),
    **dict.fromkeys(("pid", "generation", "tensor_parallel", "done_bytes", "total_bytes"), (int,)),
    **dict.fromkeys(("num_failures", "failed_starts", "most_starts"), (int,)),
    **dict.fromkeys(("precision", "error", "waits_for"), (str, type(None))),
    "weight_version": (int, type(None)),
    "heartbeat": _NUMBERS,
    "recent_failures": (list,),
}


@dataclass(frozen=True)
class Registration:
    """One server's own state.

    Attributes:
        generation: counts the server's starts in the attempt. After a new start the server holds the weights that it
            was started with; earlier updates are lost.
        weight_version: the version of the weights that it was started with; None if the run has committed no version of
            them, as with `model.path`.
        heartbeat: when the file was last written, in Unix seconds.
        precision: what it computes in, holds and caches, in words; None before it was first ready.
        error: why the server failed, or why it was last restarted.
        num_failures: how often the server failed since its `gspo-mega serve` began. It tells two failures apart.
        failed_starts, most_starts: how many of the starts that `server.max_restarts` allows now have failed, and how
            many it allows. 0 for `most_starts` means that it is not known.
        recent_failures: the causes of the last failures, one line each, the newest last. They may follow each other
            faster than a reader looks.
        waits_for: what is being made before this server can be started, in words; None if nothing is.
        done_bytes, total_bytes: how much of that is made; a total of 0 means that it is not known yet.
    """

    server_id: str
    address: str
    pid: int
    state: State
    generation: int
    weight_version: int | None
    heartbeat: float
    tensor_parallel: int = 1
    precision: str | None = None
    error: str | None = None
    num_failures: int = 0
    failed_starts: int = 0
    most_starts: int = 0
    waits_for: str | None = None
    done_bytes: int = 0
    total_bytes: int = 0
    recent_failures: list[str] = field(default_factory=list)

    @classmethod
    def from_json(cls, found: Any) -> Registration:
        """Return the registration in a file's JSON. Raises ValueError if it has another form, or a value of a wrong
        type.
        """
        if not isinstance(found, dict):
            raise ValueError("not an object")
        for name, kinds in _FIELDS.items():
            if name in found and type(found[name]) not in kinds:
                raise ValueError(f"{name} is of type {type(found[name]).__name__}")
        if any(type(cause) is not str for cause in found.get("recent_failures", ())):
            raise ValueError("recent_failures is not a list of texts")
        if found.get("state") not in get_args(State):
            raise ValueError(f"state {str(found.get('state'))[:80]!r}; valid: {', '.join(get_args(State))}")
        if not -_MOST_TIME < found.get("heartbeat", 0.0) < _MOST_TIME:  # not NaN, either
            raise ValueError("heartbeat is not a time")
        try:
            return cls(**found)
        except TypeError as error:  # an unknown field, or one that is missing
            raise ValueError(str(error)) from None

    @property
    def is_preparing(self) -> bool:
        """Whether the server has not been started yet, because what it starts from is still being made."""
        return self.state == "starting" and self.waits_for is not None

    @property
    def retry(self) -> str | None:
        """Say which start this is and why the last one failed; None if none has failed, or if the server is not
        starting.
        """
        if not self.num_failures or self.state not in ("waiting", "starting", "restarting"):
            return None
        return (
            f"attempt {self.failed_starts + 1} of {self.most_starts}; last failure:"
            f" {(self.error or 'not known').strip().splitlines()[0]}"
        )

    @property
    def preparation(self) -> str | None:
        """Say what the server waits for and how far that is; None if it is not preparing."""
        return (
            f"{self.waits_for}: {format_bytes_done(self.done_bytes, self.total_bytes)}" if self.is_preparing else None
        )

    def write(self, servers_dir: Path) -> None:
        """Write the server's file in `servers_dir`, atomically. Raises OSError."""
        atomic_write_json(servers_dir / f"{self.server_id}.json", asdict(self))


def format_bytes_done(done_bytes: int, total_bytes: int) -> str:
    """Return progress in words, such as "1.5 of 4.0 GiB". A total of 0 is not known, and is left out."""
    unit, size = ("GiB", 2**30) if max(done_bytes, total_bytes) >= 2**30 else ("MiB", 2**20)
    return f"{done_bytes / size:.1f}{f' of {total_bytes / size:.1f}' if total_bytes else ''} {unit}"


def read_registrations(
    servers_dir: Path, on_error: Callable[[Path, OSError], object] | None = None
) -> list[Registration]:
    """Return all registrations of an attempt, in the order of their server ids. Raises RolloutError for a file that is
    not a registration.

    `on_error` gets each file that cannot be read, which is then left out. Without it OSError is raised, as it always is
    for the folder itself.
    """
    found = []
    names = sorted(os.listdir(servers_dir)) if servers_dir.exists() else []
    for path in (servers_dir / name for name in names if name.endswith(".json")):
        if path.name.startswith("."):  # the temporary file of an atomic write
            continue
        try:
            found.append(Registration.from_json(read_json_file(path)))
        except FileNotFoundError:
            continue
        except OSError as error:
            if on_error is None:
                raise
            on_error(path, error)
        except ValueError as error:
            raise RolloutError(f"{path}: not a server's registration: {error}") from error
    return found


def versions_being_loaded(servers_dir: Path) -> set[int]:
    """Return the published versions that servers of the attempt are starting from. Raises OSError and RolloutError."""
    registered = read_registrations(servers_dir, on_error=lambda path, error: None)
    return {r.weight_version for r in registered if r.state == "starting" and r.weight_version is not None}


class Secret(str):
    """A string whose `repr` hides it. `str()` and f-strings give the value, because they build HTTP headers."""

    def __repr__(self) -> str:
        return "'***'"


def read_secret(path: Path) -> Secret:
    """Read a key file and return the key. Raises ConfigError if the file is missing, empty, or readable by others."""
    try:
        mode = path.stat().st_mode & 0o777
        value = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot read the API key: {error}") from error
    if mode & 0o077:
        raise ConfigError(f"{path}: mode {mode:04o} lets others read the API key; it must be 0600")
    if not value:
        raise ConfigError(f"{path}: the API key file is empty")
    return Secret(value)


def ensure_secret(path: Path) -> Secret:
    """Return the key at `path`, and create one (mode 0600) if there is none. Several processes may call it at the same
    time. Raises ConfigError as `read_secret`.
    """
    if not path.exists():
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
        try:
            os.link(draft, path)  # unlike a rename, never replaces the key another process just made
        except FileExistsError:
            draft.unlink()
            return read_secret(path)
        draft.unlink()
    return read_secret(path)


GpuTurn = Literal["ranks", "servers"]


def _turn_file(attempt: Attempt) -> Path:
    return attempt.path / "gpu_turn.json"


def give_turn(attempt: Attempt, turn: GpuTurn) -> None:
    """Give the shared GPUs to this side from now on. Raises OSError."""
    atomic_write_json(_turn_file(attempt), {"turn": turn})


def server_may_start(attempt: Attempt) -> bool:
    """Whether a server may be started now."""
    return (read_json(_turn_file(attempt)) or {}).get("turn", "servers") == "servers"

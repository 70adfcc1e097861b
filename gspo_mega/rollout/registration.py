"""Whose turn the GPUs are that ranks and servers share: a file of the attempt that rank 0 writes and servers obey.

Owns the file. A server that is being started would take memory that the ranks use: `gspo-mega serve` starts one in the
servers' turn only. Without the file it is always their turn.

The API key of an attempt: created, read, and kept out of every log.

Owns the file format (one line, mode 0600) and the string type whose `repr` hides the key. SGLang logs all of its
arguments by `repr`, also in tracebacks; a `Secret` shows `'***'` there, and survives copies and pickling.

servers/<server_id>.json: how a server registers with the run, and how the pool reads it.

Owns the record's fields and their meaning. Only the server's own `gspo-mega serve` writes its file; readers may see any
earlier state of the file, but never a part of one.
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


class Secret(str):
    """A string whose `repr` hides it. `str()` and f-strings give the value: they build HTTP headers."""

    def __repr__(self) -> str:
        return "'***'"


def read_secret(path: Path) -> Secret:
    """Read a key file. Raises ConfigError if it is missing, empty, or readable by others."""
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
    """Read the key at `path`; create one (mode 0600) if there is none. Several processes may call it at the same
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


State = Literal["waiting", "starting", "ready", "restarting", "draining", "failed", "stopped"]
"""`waiting`: it starts as soon as the ranks leave it their GPUs. `draining`: it answers, takes no new work, and ends
when its open requests have gone elsewhere."""


@dataclass(frozen=True)
class Registration:
    """One server's own state.

    Attributes:
        generation: counts the server's starts in the attempt. After a new start the server holds the weights that it
            was started with; earlier updates are lost.
        weight_version: the version of the weights it was started with; None where the run has committed no version of
            them, as with `model.path`.
        heartbeat: when the file was last written, in Unix seconds.
        precision: what it computes in, holds and caches, in words; None before it was first ready.
        error: why the server failed, or why it was last restarted.
        num_failures: how often the server failed since its `gspo-mega serve` began. It tells two failures apart.
        failed_starts, most_starts: of the starts that `server.max_restarts` allows now, how many have failed, and how
            many there are. A `most_starts` of 0 is not known.
        recent_failures: the causes of the last failures, in a line each, the newest last: they may follow each other
            faster than a reader looks.
        waits_for: what is made before this server can be started, in words; None where it is being started.
        done_bytes, total_bytes: how much of that is made; a total of 0 is not known yet.
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
    def of(cls, found: Any) -> Registration:
        """That of a file's JSON. Raises ValueError for another form, or a value of another type than its field's."""
        if not isinstance(found, dict):
            raise ValueError("not an object")
        for name, kinds in _FIELDS.items():
            if name in found and type(found[name]) not in kinds:
                raise ValueError(f"{name} is of type {type(found[name]).__name__}")
        if any(type(cause) is not str for cause in found.get("recent_failures", ())):
            raise ValueError("recent_failures is no list of texts")
        if found.get("state") not in get_args(State):
            raise ValueError(f"state {str(found.get('state'))[:80]!r}; valid: {', '.join(get_args(State))}")
        if not -_MOST_TIME < found.get("heartbeat", 0.0) < _MOST_TIME:  # not NaN, either
            raise ValueError("heartbeat is no time")
        try:
            return cls(**found)
        except TypeError as error:  # a field that there is not, or one that is missing
            raise ValueError(str(error)) from None

    @property
    def is_preparing(self) -> bool:
        """Whether the server has not been started yet, because what it starts from is still being made."""
        return self.state == "starting" and self.waits_for is not None

    @property
    def retry(self) -> str | None:
        """Which start this is and why the last one failed, in words; None where none has failed, or it is over."""
        if not self.num_failures or self.state not in ("waiting", "starting", "restarting"):
            return None
        return (
            f"attempt {self.failed_starts + 1} of {self.most_starts}; last failure:"
            f" {(self.error or 'not known').strip().splitlines()[0]}"
        )

    @property
    def preparation(self) -> str | None:
        """What it waits for and how far that is, in words; None where it is not preparing."""
        return f"{self.waits_for}: {amount(self.done_bytes, self.total_bytes)}" if self.is_preparing else None

    def write(self, servers_dir: Path) -> None:
        """Write the server's file in `servers_dir`, atomically. Raises OSError."""
        atomic_write_json(servers_dir / f"{self.server_id}.json", asdict(self))


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


def amount(done_bytes: int, total_bytes: int) -> str:
    """As in "1.5 of 4.0 GiB". A total of 0 is not known."""
    unit, size = ("GiB", 2**30) if max(done_bytes, total_bytes) >= 2**30 else ("MiB", 2**20)
    return f"{done_bytes / size:.1f}{f' of {total_bytes / size:.1f}' if total_bytes else ''} {unit}"


def read_registrations(
    servers_dir: Path, on_error: Callable[[Path, OSError], object] | None = None
) -> list[Registration]:
    """All registrations of an attempt, in the order of their server ids. Raises RolloutError for a file that is not
    one.

    `on_error` gets each file that cannot be read, which is then left out. Without it, and for the folder itself, raises
    OSError.
    """
    found = []
    names = sorted(os.listdir(servers_dir)) if servers_dir.exists() else []
    for path in (servers_dir / name for name in names if name.endswith(".json")):
        if path.name.startswith("."):  # the temporary file of an atomic write
            continue
        try:
            found.append(Registration.of(read_json_file(path)))
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
    """The published versions that servers of the attempt are starting from. Raises OSError and RolloutError."""
    registered = read_registrations(servers_dir, on_error=lambda path, error: None)
    return {r.weight_version for r in registered if r.state == "starting" and r.weight_version is not None}


Turn = Literal["ranks", "servers"]


def _file(attempt: Attempt) -> Path:
    return attempt.path / "gpu_turn.json"


def give_turn(attempt: Attempt, turn: Turn) -> None:
    """From now on it is this side's turn. Raises OSError."""
    atomic_write_json(_file(attempt), {"turn": turn})


def may_start(attempt: Attempt) -> bool:
    """Whether a server may be started now."""
    return (read_json(_file(attempt)) or {}).get("turn", "servers") == "servers"

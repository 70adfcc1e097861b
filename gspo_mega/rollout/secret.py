"""The API key of an attempt: created, read, and kept out of every log.

Owns the file format (one line, mode 0600) and the string type whose `repr` hides the key. SGLang logs all of its
arguments by `repr`, also in tracebacks; a `Secret` shows `'***'` there, and survives copies and pickling.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from gspo_mega.base.errors import ConfigError


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

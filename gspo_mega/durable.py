"""File operations that survive a crash, each a named kill point: what saves, the journal and publishes write with.

Owns how a file or folder appears whole or not at all. `at` names the operation in `kill_points.OPERATIONS`; small files
that belong to none of the three leave it out. What the files mean is their owners'. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gspo_mega import kill_points


@contextlib.contextmanager
def operation(name: str | None) -> Iterator[None]:
    """One file operation: its kill points stand before and after the block. For writers that are not ours, too."""
    if name is not None:
        kill_points.reached(f"{name}.before")
    yield
    if name is not None:
        kill_points.reached(f"{name}.after")


def sync(path: str | os.PathLike[str], at: str | None = None) -> None:
    """Have a file's content, or a folder's list of names, reach the disk."""
    with operation(at):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def sync_tree(folder: Path, at: str) -> None:
    """`sync` of a folder and all that is in it."""
    with operation(at):
        for parent, _, files in os.walk(folder):
            for path in [*(os.path.join(parent, file) for file in files), parent]:
                sync(path)


def make_folder(path: Path, at: str) -> None:
    """Make a folder and those above it; it may be there."""
    with operation(at):
        path.mkdir(parents=True, exist_ok=True)


def rename(source: Path, target: Path, at: str) -> None:
    """Rename a file or folder at once, and have the new name reach the disk. A file at `target` is replaced."""
    with operation(at):
        os.replace(source, target)
        sync(target.parent)


def remove_tree(path: Path, at: str) -> None:
    """Remove a folder with all that is in it, if it is there. Whole or not at all for those who look for its name."""
    with operation(at):
        doomed = path.with_name(f".{path.name}.removed")
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(doomed)  # of a removal that was cut short
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, doomed)
            shutil.rmtree(doomed)


def remove_file(path: Path, at: str) -> None:
    """Remove a file, if it is there."""
    with operation(at):
        path.unlink(missing_ok=True)


def copy_file(source: Path, target: Path, at: str) -> None:
    """Copy a file's content to a new file, in place of one that is there; on disk when this returns.

    The copy may be read by those alone who may read the source, as far as the umask lets them.
    """
    with operation(at):
        target.unlink(missing_ok=True)  # of a copy that was cut short
        with source.open("rb") as original:
            mode = stat.S_IMODE(os.fstat(original.fileno()).st_mode) & 0o666
            descriptor = os.open(
                target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode | stat.S_IWUSR
            )
            with os.fdopen(descriptor, "wb") as copy:
                shutil.copyfileobj(original, copy)
        sync(target)


def open_end(path: Path, at: str) -> int:
    """A descriptor that writes at the end of a file that is there; `os.close` it."""
    with operation(at):
        return os.open(path, os.O_WRONLY | os.O_APPEND)


def append(descriptor: int, data: bytes, at: str) -> None:
    """Write all of `data` at the descriptor's end. After a failure a part of it may be there."""
    with operation(at):
        remaining = memoryview(data)
        while remaining:
            remaining = remaining[os.write(descriptor, remaining) :]


def sync_descriptor(descriptor: int, at: str) -> None:
    """Have what was written through a descriptor reach the disk."""
    with operation(at):
        os.fsync(descriptor)


def write_whole(path: str | os.PathLike[str], data: bytes, *, mode: int = 0o666, at: str | None = None) -> None:
    """Write `data` so that a reader sees the old file or the new one, never a part; durable on return.

    Written beside, synced, renamed: the operations `<at>.write` and `<at>.rename`. `mode` is the file's permission at
    most: the kernel takes away what the process's umask says, as for any other file. Raises OSError.
    """
    path = Path(path)
    temporary: Path | None = None
    try:
        with operation(at and f"{at}.write"):
            if at is not None:
                # These files have one writer: what a killed one left beside them is nobody's.
                for leftover in path.parent.glob(f".{path.name}.*.part"):
                    leftover.unlink(missing_ok=True)
            descriptor, temporary = _create_beside(path, mode)
            try:
                remaining = memoryview(data)
                while remaining:
                    remaining = remaining[os.write(descriptor, remaining) :]
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        with operation(at and f"{at}.rename"):
            os.replace(temporary, path)
            sync(path.parent)
    except BaseException:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise


def _create_beside(path: Path, mode: int) -> tuple[int, Path]:
    """A new file beside `path`, open for writing, under a name of its own that no link can have taken."""
    while True:
        beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
        with contextlib.suppress(FileExistsError):
            return os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode), beside


def atomic_write_text(path: str | os.PathLike[str], text: str, *, mode: int = 0o666, at: str | None = None) -> None:
    """`write_whole` of text in UTF-8."""
    write_whole(path, text.encode("utf-8"), mode=mode, at=at)


def atomic_write_json(path: str | os.PathLike[str], value: Any, *, mode: int = 0o666, at: str | None = None) -> None:
    """`write_whole` of strict JSON (a NaN raises ValueError), one line and a newline."""
    atomic_write_text(path, json.dumps(value, allow_nan=False) + "\n", mode=mode, at=at)

"""File operations that survive a crash. Saves, the journal and publishes write with them alone.

Owns that a file or folder appears whole or not at all. `at` names the operation in `kill_points.OPERATIONS`; other
small files leave it out. The meaning of a file is its owner's. Standard library only.
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

from gspo_mega.base import failpoints


@contextlib.contextmanager
def operation(name: str | None) -> Iterator[None]:
    """The block is one file operation, with a kill point before and after it. For writers of libraries, too."""
    if name is not None:
        failpoints.reached(f"{name}.before")
    yield
    if name is not None:
        failpoints.reached(f"{name}.after")


def sync(path: str | os.PathLike[str], at: str | None = None) -> None:
    """Flush a file's content, or a folder's list of names, to the disk."""
    with operation(at):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def sync_tree(folder: Path, at: str) -> None:
    """`sync` of a folder and everything in it."""
    with operation(at):
        for parent, _, files in os.walk(folder):
            for path in [*(os.path.join(parent, file) for file in files), parent]:
                sync(path)


def make_folder(path: Path, at: str | None = None) -> None:
    """Make a folder and its parents; it may exist already. New ones are on the disk, by name, when this returns."""
    with operation(at):
        new = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
        for folder in reversed(new):
            sync(folder.parent)


def rename(source: Path, target: Path, at: str) -> None:
    """Rename a file or folder atomically and flush the new name to the disk. A file at `target` is replaced."""
    with operation(at):
        os.replace(source, target)
        sync(target.parent)


def remove_tree(path: Path, at: str) -> None:
    """Remove a folder with its content, if it exists. A reader of its name sees the whole folder or none."""
    with operation(at):
        doomed = path.with_name(f".{path.name}.removed")
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(doomed)  # of a removal that was cut short
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, doomed)
            shutil.rmtree(doomed)


def remove_file(path: Path, at: str) -> None:
    """Remove a file, if it exists."""
    with operation(at):
        path.unlink(missing_ok=True)


def copy_file(source: Path, target: Path, at: str) -> None:
    """Copy a file's content to a new file, which replaces an existing one; on disk when this returns.

    The copy has the source's read and write permissions, limited by the umask.
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
    """A descriptor that appends to an existing file; the caller closes it with `os.close`."""
    with operation(at):
        return os.open(path, os.O_WRONLY | os.O_APPEND)


def append(descriptor: int, data: bytes, at: str) -> None:
    """Append all of `data`. After a failure the file may end in a part of it."""
    with operation(at):
        remaining = memoryview(data)
        while remaining:
            remaining = remaining[os.write(descriptor, remaining) :]


def sync_descriptor(descriptor: int, at: str) -> None:
    """Flush what was written through a descriptor to the disk."""
    with operation(at):
        os.fsync(descriptor)


def write_whole(path: str | os.PathLike[str], data: bytes, *, mode: int = 0o666, at: str | None = None) -> None:
    """Write `data` so that a reader sees the old file or the new one, never a part; durable on return.

    Two operations: `<at>.write` writes and flushes a temporary file beside `path`, `<at>.rename` renames it. `mode`:
    the file's permissions, before the umask. Raises OSError.
    """
    path = Path(path)
    temporary: Path | None = None
    try:
        with operation(at and f"{at}.write"):
            if at is not None:
                # These files have one writer, so a temporary file that a killed writer left belongs to nobody.
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
    """A new file beside `path`, open for writing, under a random name that no link can occupy."""
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

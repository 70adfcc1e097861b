"""File operations that survive a crash: a file or folder appears whole or not at all.

Checkpoints, the journal and publishes write only through these functions. There, the argument `at` names the operation
in `failpoints.OPERATIONS`, so that a test can kill the process before or after it. Other small files leave `at` out.

First come operations on existing files and folders, then appending through a descriptor, then writing a whole file.
Standard library only.
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
    """Make the block one file operation, with a kill point before and after it.

    Use it directly where a library writes the file.
    """
    if name is not None:
        failpoints.reached(f"{name}.before")
    yield
    if name is not None:
        failpoints.reached(f"{name}.after")


def sync(path: str | os.PathLike[str], at: str | None = None) -> None:
    """Flush the content of a file, or the list of names in a folder, to the disk."""
    with operation(at):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def sync_tree(folder: Path, at: str) -> None:
    """Flush a folder and everything in it to the disk."""
    with operation(at):
        for parent, _, files in os.walk(folder):
            for path in [*(os.path.join(parent, file) for file in files), parent]:
                sync(path)


def make_folder(path: Path, at: str | None = None) -> None:
    """Make a folder and its parents. The folder may exist already. The names of new folders are on the disk when this
    returns.
    """
    with operation(at):
        new = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
        for folder in reversed(new):
            sync(folder.parent)


def rename(source: Path, target: Path, at: str) -> None:
    """Rename a file or folder atomically and flush the new name to the disk. This replaces a file at `target`."""
    with operation(at):
        os.replace(source, target)
        sync(target.parent)


def remove_tree(path: Path, at: str) -> None:
    """Remove a folder with its content, if it exists. Under its name, a reader sees the whole folder or nothing."""
    with operation(at):
        doomed = path.with_name(f".{path.name}.removed")
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(doomed)  # left by a removal that was cut short
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, doomed)
            shutil.rmtree(doomed)


def remove_file(path: Path, at: str) -> None:
    """Remove a file, if it exists."""
    with operation(at):
        path.unlink(missing_ok=True)


def copy_file(source: Path, target: Path, at: str) -> None:
    """Copy a file's content to a new file, which replaces an existing one. The copy is on the disk when this returns.

    The copy has the source's read and write permissions, limited by the umask.
    """
    with operation(at):
        target.unlink(missing_ok=True)  # left by a copy that was cut short
        with source.open("rb") as original:
            mode = stat.S_IMODE(os.fstat(original.fileno()).st_mode) & 0o666
            descriptor = os.open(
                target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode | stat.S_IWUSR
            )
            with os.fdopen(descriptor, "wb") as copy:
                shutil.copyfileobj(original, copy)
        sync(target)


def follow_umask(path: Path) -> None:
    """Give a file of a library that makes private files, as safetensors does, the permissions of any other new file."""
    # Asking `os.umask` would change it for all threads for a moment.
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    umask = next(int(line.split()[1], 8) for line in status.splitlines() if line.startswith("Umask:"))
    path.chmod(0o666 & ~umask)


def open_end(path: Path, at: str) -> int:
    """Return a descriptor that appends to an existing file. The caller closes it with `os.close`."""
    with operation(at):
        return os.open(path, os.O_WRONLY | os.O_APPEND)


def append(descriptor: int, data: bytes, at: str) -> None:
    """Append all of `data`. After a failure, the file may end with only a part of it."""
    with operation(at):
        _write_all(descriptor, data)


def sync_descriptor(descriptor: int, at: str) -> None:
    """Flush what was written through a descriptor to the disk."""
    with operation(at):
        os.fsync(descriptor)


def _write_all(descriptor: int, data: bytes) -> None:
    remaining = memoryview(data)
    while remaining:
        remaining = remaining[os.write(descriptor, remaining) :]


def write_whole(path: str | os.PathLike[str], data: bytes, *, mode: int = 0o666, at: str | None = None) -> None:
    """Write `data` so that a reader sees the old file or the new one, never a part. The file is on the disk on return.

    This is two operations: `<at>.write` writes and flushes a temporary file in the same folder, and `<at>.rename`
    renames it to `path`. `mode` is the file's permissions before the umask. Raises OSError.
    """
    path = Path(path)
    temporary: Path | None = None
    try:
        with operation(at and f"{at}.write"):
            if at is not None:
                # These files have one writer, so a temporary file that a killed writer left belongs to nobody.
                for leftover in path.parent.glob(f".{path.name}.*.part"):
                    leftover.unlink(missing_ok=True)
            descriptor, temporary = _create_temporary(path, mode)
            try:
                _write_all(descriptor, data)
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


def _create_temporary(path: Path, mode: int) -> tuple[int, Path]:
    """Create a file next to `path` and open it for writing. Its random name cannot be taken by a link."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
        with contextlib.suppress(FileExistsError):
            return os.open(temporary, flags, mode), temporary


def atomic_write_text(path: str | os.PathLike[str], text: str, *, mode: int = 0o666, at: str | None = None) -> None:
    """Write text in UTF-8 as `write_whole` does."""
    write_whole(path, text.encode("utf-8"), mode=mode, at=at)


def atomic_write_json(path: str | os.PathLike[str], value: Any, *, mode: int = 0o666, at: str | None = None) -> None:
    """Write a value as one line of strict JSON and a newline, as `write_whole` does. A NaN raises ValueError."""
    atomic_write_text(path, json.dumps(value, allow_nan=False) + "\n", mode=mode, at=at)

"""Copies of ranks' training state in a machine's memory, as files in /dev/shm: they outlive the processes that write
them, not the machine.

A file is written as a part and gets its name when it is whole; the name has the SHA-256 of its content.
`peer_copies.py` decides what is in it and which copies are used. A run's copies on one machine are in one folder that
only its user can read. The launcher removes it when the run ends. No torch.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gspo_mega.base import atomic_io

ROOT = Path("/dev/shm")
# `own`: a rank's copy on its own machine. `peer`: the same on its neighbour's.
Place = Literal["own", "peer"]
PLACES: tuple[Place, ...] = ("own", "peer")
_NAME = re.compile(r"rank_(\d{5})\.(own|peer)\.step_(\d{8})\.([0-9a-f]{64})")
_HASHED_BYTES = 2**26


@dataclass(frozen=True)
class HeldCopy:
    """A whole copy on this machine: the state of `rank` after `step`. `digest`: the SHA-256 of the file, in hex."""

    rank: int
    place: Place
    step: int
    digest: str

    @property
    def name(self) -> str:
        return f"rank_{self.rank:05d}.{self.place}.step_{self.step:08d}.{self.digest}"


def copies_folder(run: Path) -> Path:
    """Return the folder of the copies of the run in the folder `run` on this machine, whether it exists or not."""
    return ROOT / f"gspo_mega-{os.getuid()}" / hashlib.sha256(str(run.absolute()).encode()).hexdigest()[:32]


def make_folder(folder: Path) -> None:
    """Make the folder of a run's copies, readable only by this user. Raises OSError, also if somebody else owns it."""
    for path in (folder.parent, folder):
        with suppress(FileExistsError), atomic_io.operation(None):
            path.mkdir(mode=0o700)
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise PermissionError(f"{path} is not a folder that only this user can read")


def held_copies(folder: Path) -> list[HeldCopy]:
    """Return the whole copies in `folder`, in the order of their names; none if there is no such folder."""
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
    found = (_NAME.fullmatch(name) for name in names)
    return [
        HeldCopy(int(one[1]), place, int(one[3]), one[4]) for one in found if one for place in PLACES if place == one[2]
    ]


def begin_part(folder: Path, rank: int, place: Place, num_bytes: int, keep: int | None) -> Path:
    """Return a part of `num_bytes` for a new copy, all of whose memory is there. The part takes over the memory of an
    older copy, but not of that of the step `keep`. Raises OSError if the machine has too little memory.
    """
    part = folder / f"rank_{rank:05d}.{place}.part"
    with atomic_io.operation("copy.begin"):
        old = [one for one in held_copies(folder) if (one.rank, one.place) == (rank, place) and one.step != keep]
        for one in old:
            os.replace(folder / one.name, part)
        descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, num_bytes)
            os.posix_fallocate(descriptor, 0, num_bytes)
        finally:
            os.close(descriptor)
    return part


def mapped(path: Path) -> mmap.mmap:
    """Return a file's content as memory. A write changes the file."""
    with atomic_io.operation(None):
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            return mmap.mmap(descriptor, 0)
        finally:
            os.close(descriptor)


def digest_of(content: mmap.mmap) -> str:
    """Return the SHA-256 of a copy's content in hex."""
    found = hashlib.sha256()
    with memoryview(content) as view:
        for start in range(0, len(view), _HASHED_BYTES):
            found.update(view[start : start + _HASHED_BYTES])
    return found.hexdigest()


def commit_part(folder: Path, part: Path, copy: HeldCopy) -> None:
    """Give a whole part its name."""
    with atomic_io.operation("copy.commit"):
        os.replace(part, folder / copy.name)


def drop_copy(folder: Path, copy: HeldCopy) -> None:
    """Remove one copy, if it is there."""
    atomic_io.remove_file(folder / copy.name, at="copy.drop")


def remove_copies(run: Path) -> None:
    """Remove all copies of the run in the folder `run` from this machine's memory."""
    with atomic_io.operation(None):
        shutil.rmtree(copies_folder(run), ignore_errors=True)
        with suppress(OSError):
            copies_folder(run).parent.rmdir()


@contextmanager
def copies_removed(run: Path) -> Iterator[None]:
    """Remove the copies of the run in the folder `run` from this machine's memory when the context ends."""
    try:
        yield
    finally:
        remove_copies(run)

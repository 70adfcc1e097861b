"""What a machine that loses power keeps of a folder: nothing but what was flushed to the disk.

`Disk` notes every `os.fsync` of the process and what the file or folder had in it then. Of a file that was never
flushed nothing is left, of a folder the names that it had when it was flushed last. A file system may also write names
sooner, and a rename can reach the disk before the data of the renamed file. So there are two worst cases, and
`leavings` makes a folder of each: names as they were flushed, and names as they are. In the second, a file may also
keep the length that it has, with zeros for what was not flushed (`keeps_lengths`), as XFS and ext4 leave it.
"""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gspo_mega.base import failpoints


class Disk:
    """The disk under `root`, which is taken for flushed as it is now."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, keeps_lengths: bool = False) -> None:
        self.root, self._keeps_lengths = root, keeps_lengths
        self._files: dict[int, bytes] = {}  # by inode
        self._folders: dict[int, dict[str, tuple[int, bool]]] = {}  # by name: the inode, and whether it is a folder
        self._kept: list[int] = []  # open, or the number of a removed file would be another's soon
        self._numbers = itertools.count()
        self._is_looking = False
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self._note)
        self.patch = monkeypatch
        self.settle()

    def settle(self) -> None:
        """All that is there has reached the disk."""
        for folder, _, files in os.walk(self.root):
            for path in (folder, *(os.path.join(folder, name) for name in files)):
                descriptor = os.open(path, os.O_RDONLY)
                self._keep(descriptor)
                os.close(descriptor)

    def _note(self, descriptor: int) -> None:
        self._fsync(descriptor)
        self._keep(descriptor)

    def _keep(self, descriptor: int) -> None:
        found = os.fstat(descriptor)
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if stat.S_ISDIR(found.st_mode):
            entries = (entry for entry in os.scandir(path) if not entry.is_symlink())
            self._folders[found.st_ino] = {entry.name: (entry.inode(), entry.is_dir()) for entry in entries}
        else:
            self._files[found.st_ino] = Path(f"/proc/self/fd/{descriptor}").read_bytes()
        self._kept.append(os.dup(descriptor))

    def leavings(self) -> list[Path]:
        """Two folders beside `root`: what a power cut now leaves of it in each of the worst cases."""
        number = next(self._numbers)
        flushed, named = (self.root.with_name(f"{self.root.name}.cut{number}.{case}") for case in ("flushed", "named"))
        self._lay_out(self.root.stat().st_ino, flushed)
        for folder, _, files in os.walk(self.root):
            target = named / Path(folder).relative_to(self.root)
            target.mkdir()
            for name in files:
                found = os.lstat(os.path.join(folder, name))
                data = self._files.get(found.st_ino, b"")
                length = found.st_size if self._keeps_lengths else 0
                target.joinpath(name).write_bytes(data + bytes(max(0, length - len(data))))
        return [flushed, named]

    def _lay_out(self, inode: int, target: Path) -> None:
        target.mkdir()
        for name, (inner, is_folder) in self._folders.get(inode, {}).items():
            if is_folder:
                self._lay_out(inner, target / name)
            else:
                target.joinpath(name).write_bytes(self._files.get(inner, b""))

    @contextmanager
    def cut_at_every_operation(self, look: Callable[[Path], None]) -> Iterator[None]:
        """`look` at what a power cut leaves before and after each file operation of the block, and after the block."""

        def reached(point: str, before: Callable[[str], None] = failpoints.reached) -> None:
            before(point)
            self.look(look)

        with self.patch.context() as patch:
            patch.setattr(failpoints, "reached", reached)
            yield
        self.look(look)

    def look(self, look: Callable[[Path], None]) -> None:
        """`look` at both folders that a power cut now leaves; what it does there is no operation of the block."""
        if not self._is_looking:
            self._is_looking = True
            for left in self.leavings():
                look(left)
            self._is_looking = False

    def close(self) -> None:
        for descriptor in self._kept:
            os.close(descriptor)
        self._kept.clear()

"""What one start of a server leaves on its machine, and its removal: a temporary folder, and shared memory that SGLang
names itself.

Owns both, also those of a server that was killed together with whoever watched it: the next one to start removes them.
A folder is its watcher's as long as that holds a lock on a file in it (flock, which ends with its holder), and a
segment is the server's whose processes were seen to map it. Nothing else is ever touched.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import tempfile
from pathlib import Path

from gspo_mega.rollout.server.process_tree import group_members

_PREFIX = "gspo-server-"
_LOCK, _SEGMENTS = "lock", "segments"
# SGLang's, and those that Python's multiprocessing names for it. A server that is killed cannot remove them.
_SEGMENT = re.compile(r"(sglang_loads_|sgl_shm_|psm_|sem\.mp-)[\w.-]+")
SHARED_MEMORY = Path("/dev/shm")


class Scratch:
    """A folder for one start of a server, mode 0700, and what is known of its shared memory. Remove it when the server
    is gone.
    """

    def __init__(self) -> None:
        # Not below the run folder, whose path may be longer than a socket's may be.
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        draft = self.path / f".{_LOCK}"
        self._lock = draft.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # Under its name only now: whoever finds it finds it held.
        draft.rename(self.path / _LOCK)
        self._segments: set[str] = set()

    def note(self, group: int) -> None:
        """Look which segments the processes of `group` map. Those of processes that end unseen are not known."""
        found = {name for pid in group_members(group) for name in _mapped(pid)}
        if not found <= self._segments:
            self._segments |= found
            (self.path / _SEGMENTS).write_text("\n".join(sorted(self._segments)), encoding="utf-8")

    def remove(self) -> None:
        """Folder and segments. Call it when no process of the server runs any more."""
        _remove(self.path)
        self._lock.close()


def remove_abandoned() -> None:
    """Remove what servers of this user left in the temporary folder whose watchers are no more."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                continue
            with (folder / _LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(folder)
        except OSError:  # held, without a lock so far, or somebody else removes it
            continue


def _remove(folder: Path) -> None:
    try:
        names = (folder / _SEGMENTS).read_text(encoding="utf-8").split()
    except FileNotFoundError:
        names = []
    for name in names:
        if _SEGMENT.fullmatch(name):
            (SHARED_MEMORY / name).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _mapped(pid: int) -> set[str]:
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # it ended
        return set()
    names = (line.rpartition(f" {SHARED_MEMORY}/")[2] for line in lines if f" {SHARED_MEMORY}/" in line)
    return {name for name in names if _SEGMENT.fullmatch(name)}

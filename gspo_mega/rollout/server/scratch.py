"""What one start of a server leaves on its machine: a temporary folder, and shared memory that SGLang names itself.

Owns the removal of both, also for a server that was killed together with its supervisor: the next server to start
removes them. A folder belongs to its supervisor while that holds a lock on a file in it (flock, which ends with its
holder). A segment of shared memory belongs to the server whose processes were seen to map it. Nothing else is removed.
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
# Names that SGLang, and Python's multiprocessing for it, give to segments. A killed server cannot remove them.
_SEGMENT = re.compile(r"(sglang_loads_|sgl_shm_|psm_|sem\.mp-)[\w.-]+")
SHARED_MEMORY = Path("/dev/shm")


class Scratch:
    """A folder for one start of a server, mode 0700, and the known names of its shared memory. Call `remove` when the
    server has ended.
    """

    def __init__(self) -> None:
        # Not below the run folder, whose path may be too long for a socket.
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        draft = self.path / f".{_LOCK}"
        self._lock = draft.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # The file gets its final name only now: whoever finds it, finds it locked.
        draft.rename(self.path / _LOCK)
        self._segments: set[str] = set()

    def note(self, group: int) -> None:
        """Remember the segments that the processes of `group` map now. Segments of processes that end before a call
        stay unknown.
        """
        found = {name for pid in group_members(group) for name in _mapped(pid)}
        if not found <= self._segments:
            self._segments |= found
            (self.path / _SEGMENTS).write_text("\n".join(sorted(self._segments)), encoding="utf-8")

    def remove(self) -> None:
        """Remove folder and segments. Call it when no process of the server runs any more."""
        _remove(self.path)
        self._lock.close()


def remove_abandoned() -> None:
    """Remove what servers of this user left in the temporary folder, if their supervisors have ended."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                continue
            with (folder / _LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(folder)
        except OSError:  # locked, not locked yet, or being removed by another process
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

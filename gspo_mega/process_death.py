"""How processes end together: those that fork from us, those that we started, and those that they left behind.

Owns what Linux offers for it (the parent-death signal, the child subreaper, /proc) and the races around it. Who must
end with whom, and when, is the caller's. Standard library only, so that every layer may import it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Collection, Iterable
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_SECONDS = 0.02
# Whoever waits for a child of its own, in another thread, has had its exit code by then.
_REAP_AFTER_SECONDS = 1.0

# Loaded once: a forked child must not open libraries.
_libc = ctypes.CDLL(None, use_errno=True)
_forking_pid = 0


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process signal `number` when `parent`, which is to be its parent, ends, however it
    ends.

    What the kernel calls the parent is the thread that forked: the signal comes with that thread's end, too. Survives
    exec, not fork. Where the parent is gone already the signal is sent now. Raises OSError.
    """
    _prctl(_PR_SET_PDEATHSIG, int(number), "PR_SET_PDEATHSIG")
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def forks_die_with_us() -> None:
    """From now on every process that forks from this one, at any depth, is killed with the thread that forked it.

    For libraries that fork workers and join them: a worker that waits on a lock or a queue of a killed parent would
    wait for ever. It holds for `os.fork` and multiprocessing's fork; a program started by `subprocess` is tied by
    `die_with_parent` or `launcher/exec_tied_to_parent.py`. A second call does nothing.
    """
    global _registered
    if not _registered:
        _registered = True
        os.register_at_fork(before=_note_parent, after_in_child=_tie_child)


_registered = False


def _note_parent() -> None:
    global _forking_pid
    _forking_pid = os.getpid()


def _tie_child() -> None:
    die_with_parent(_forking_pid)


def adopt_orphans(on: bool = True) -> None:
    """Have processes below this one whose parent ends become its children, and so be found and reaped by it. Raises
    OSError.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, int(on), "PR_SET_CHILD_SUBREAPER")


def _prctl(option: int, value: int, name: str) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({name})")


def parents() -> dict[int, int]:
    """The parent of every live (not zombie) process of this machine, by pid."""
    table = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (found := _state_and_parent(int(name))) is not None and found[0] not in "ZX":
            table[int(name)] = found[1]
    return table


def living_below(pid: int, without: Collection[int] = ()) -> set[int]:
    """Pids of all living processes below `pid`, in whatever group or session, but for the children `without` and what
    is below them.
    """
    table = parents()
    members: set[int] = set()
    below = {child for child, parent in table.items() if parent == pid and child not in without}
    while below:
        members |= below
        below = {child for child, parent in table.items() if parent in below and child not in without}
    return members


def kill_below(without: Collection[int] = (), own: Iterable[int] = (), patience_seconds: float = 60.0) -> set[int]:
    """SIGKILL to everything below this process until nothing lives there, and reap it; with `adopt_orphans` on, none
    escapes.

    `without`: children that are left alone with all that is below them. `own`: children whose exit code somebody else
    (a `subprocess.Popen`) collects: killed, not reaped. Returns the pids that are left after `patience_seconds`: what
    waits for a device or a file server that does not answer cannot be killed.
    """
    us, kept = os.getpid(), {*own, *without}
    deadline = time.monotonic() + patience_seconds
    while (members := living_below(us, without)) and time.monotonic() < deadline:
        for pid in members:
            send_signal(pid, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)
    for pid in children() - kept:
        reap(pid)
    return members


def send_signal(pid: int, number: int) -> None:
    """To a process that may have ended between the look and the signal."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def reap(pid: int) -> bool:
    """Collect the ended child `pid`; False where it is no child of ours, or runs."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return False


class Reaper:
    """Collects adopted children that have ended, which else stay zombies until this process ends.

    A child that another thread of this process started and waits for is not ours to collect: only one that was seen
    ended for `_REAP_AFTER_SECONDS` is taken. `known`: children that are never taken, for somebody asks for their exit
    codes later.
    """

    def __init__(self) -> None:
        self._ended_since: dict[int, float] = {}
        self._last_look = float("-inf")

    def look(self, known: Collection[int] = ()) -> list[int]:
        """The pids that were collected now. Looks at most once a second, so it may be called in every poll."""
        now = time.monotonic()
        if now - self._last_look < _REAP_AFTER_SECONDS:
            return []
        self._last_look = now
        ended = {pid for pid in children() if pid not in known and (_state_and_parent(pid) or "X")[0] == "Z"}
        self._ended_since = {pid: self._ended_since.get(pid, now) for pid in ended}
        due = [pid for pid, since in self._ended_since.items() if now - since >= _REAP_AFTER_SECONDS]
        return [pid for pid in due if reap(pid)]


def children() -> set[int]:
    """This process's children, ended ones too."""
    try:
        lists = [(task / "children").read_text(encoding="ascii") for task in Path("/proc/self/task").iterdir()]
        return {int(pid) for line in lists for pid in line.split()}
    except OSError:  # a kernel without these files, or a thread that ended meanwhile
        us = os.getpid()
        pids = (int(name) for name in os.listdir("/proc") if name.isdigit())
        return {pid for pid in pids if (found := _state_and_parent(pid)) is not None and found[1] == us}


def _state_and_parent(pid: int) -> tuple[str, int] | None:
    """The state letter and the parent; None of a process that is gone."""
    try:
        stat = Path("/proc", str(pid), "stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # "pid (command) state parent ...", and the command may hold anything.
    state, parent = stat.rpartition(")")[2].split()[:2]
    return state, int(parent)

"""Processes that end together: forks of this process, its children, and the orphans that they leave behind.

Owns the means of Linux for this (the parent-death signal, the child subreaper, /proc) and the races around them. Which
processes must end together, and when, is the caller's. Standard library only, so that every layer may import it.
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
# A thread that waits for a child of its own has collected the exit code within this time.
_REAP_AFTER_SECONDS = 1.0

# Loaded once: a forked child must not open libraries.
_libc = ctypes.CDLL(None, use_errno=True)
_forking_pid = 0


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Make the kernel send signal `number` to this process when `parent`, its parent process, ends in any way.

    To the kernel the parent is the thread that forked, so the end of that thread sends the signal as well. The setting
    survives exec, not fork. If the parent has ended already, the signal is sent now. Raises OSError.
    """
    _prctl(_PR_SET_PDEATHSIG, int(number), "PR_SET_PDEATHSIG")
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def forks_die_with_us() -> None:
    """From now on the kernel kills every fork of this process, at any depth, when the thread that forked it ends.

    For libraries that fork workers and join them: otherwise a worker that waits on a lock or queue of a killed parent
    waits for ever. Covers `os.fork` and multiprocessing's fork; a program started by `subprocess` is tied by
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
    """Adopt descendants whose parent ends: they become children of this process, which can find and reap them. Raises
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
    """Pids of all living descendants of `pid`, in any process group or session, except the children `without` and their
    descendants.
    """
    table = parents()
    members: set[int] = set()
    below = {child for child, parent in table.items() if parent == pid and child not in without}
    while below:
        members |= below
        below = {child for child, parent in table.items() if parent in below and child not in without}
    return members


def kill_below(without: Collection[int] = (), own: Iterable[int] = (), patience_seconds: float = 60.0) -> set[int]:
    """Send SIGKILL to all descendants of this process until none lives, and reap them. With `adopt_orphans` on, none
    escapes.

    `without`: children that are spared with their descendants. `own`: children whose exit code something else (a
    `subprocess.Popen`) collects; they are killed, not reaped. Returns the pids that live after `patience_seconds`:
    a process that waits for a device or file server that does not answer cannot be killed.
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
    """Send a signal to a process that may have ended already."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def reap(pid: int) -> bool:
    """Collect the ended child `pid`. False if it still runs or is not a child of this process."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return False


class Reaper:
    """Collects adopted children that have ended; otherwise they stay zombies until this process ends.

    Another thread may be waiting for a child that it started, so only children that ended at least
    `_REAP_AFTER_SECONDS` ago are collected. `known`: children that are never collected, because their exit codes are
    asked for later.
    """

    def __init__(self) -> None:
        self._ended_since: dict[int, float] = {}
        self._last_look = float("-inf")

    def look(self, known: Collection[int] = ()) -> list[int]:
        """Collect, and return the pids. Looks at most once per second, so it may be called in every poll."""
        now = time.monotonic()
        if now - self._last_look < _REAP_AFTER_SECONDS:
            return []
        self._last_look = now
        ended = {pid for pid in children() if pid not in known and (_state_and_parent(pid) or "X")[0] == "Z"}
        self._ended_since = {pid: self._ended_since.get(pid, now) for pid in ended}
        due = [pid for pid, since in self._ended_since.items() if now - since >= _REAP_AFTER_SECONDS]
        return [pid for pid in due if reap(pid)]


def children() -> set[int]:
    """The children of this process, including ended ones."""
    try:
        lists = [(task / "children").read_text(encoding="ascii") for task in Path("/proc/self/task").iterdir()]
        return {int(pid) for line in lists for pid in line.split()}
    except OSError:  # a kernel without these files, or a thread that ended meanwhile
        us = os.getpid()
        pids = (int(name) for name in os.listdir("/proc") if name.isdigit())
        return {pid for pid in pids if (found := _state_and_parent(pid)) is not None and found[1] == us}


def _state_and_parent(pid: int) -> tuple[str, int] | None:
    """The state letter and the parent of a process; None if it is gone."""
    try:
        stat = Path("/proc", str(pid), "stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # "pid (command) state parent ...", and the command may hold anything.
    state, parent = stat.rpartition(")")[2].split()[:2]
    return state, int(parent)

"""A child process that is asked in lines of JSON and answers each with one, after a first line that says how it began.

Owns its pipes and how its end is noticed. What lines mean, and bounds on time and memory, are of those who start one.

Processes that end together: forks of this process, its children, and the orphans that they leave behind.

Owns the means of Linux for this (the parent-death signal, the child subreaper, /proc) and the races around them. Which
processes must end together, and when, is the caller's. Standard library only, so that every layer may import it.

Work beside the thread that needs its result later: a thread for each piece of it.

Owns that such a thread never keeps a process from ending. Standard library only.

The limit on open files and connections of a process. Standard library only.

Owns the limit of this process (RLIMIT_NOFILE), which processes that it starts inherit. The usual soft limit of 1024 is
too low for four servers with 256 open requests each; the administrator sets the hard limit.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import json
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

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


T = TypeVar("T")


def begin(name: str, work: Callable[[], T]) -> concurrent.futures.Future[T]:
    """Run `work` in a thread of this name; the future has its result, or what it raised."""
    future: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # raised where the result is asked for
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


# Beside the requests: logs, checkpoints, libraries, sockets of torch.distributed.
SPARE = 512


def raise_limit() -> int:
    """Raise the soft limit to the hard limit and return it (resource.RLIM_INFINITY where there is none)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def allowed() -> int:
    """The hard limit, up to which `raise_limit` raises."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[1]


def enough_for(num_requests: int) -> bool:
    """Whether the hard limit admits `num_requests` open requests, of one connection each."""
    limit = allowed()
    return limit == resource.RLIM_INFINITY or limit >= num_requests + SPARE


class LineProcess:
    """A running process. Attributes: greeting, its first line; `{"error": text}` where it ended without one."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """`environment`: the process's whole one; this process's when absent. Raises OSError: it cannot be started."""
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=None if environment is None else dict(environment),
        )
        self.greeting = self._receive()

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """The answer; `{"error": text}` where the process has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # which the reply says
        return self._receive()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def exit_code(self) -> int | None:
        """As of `Popen.returncode`; None while it runs."""
        return self._process.poll()

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line.endswith(b"\n"):
            try:
                return json.loads(line)
            except (ValueError, RecursionError):
                return {"error": f"its process said what is no JSON: {line[:100]!r}"}
        return {"error": f"its process ended (exit code {self._process.wait()})"}

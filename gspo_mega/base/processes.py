"""Processes that end together, children that answer in JSON, work in threads, and the limit on open files.

The first part makes forks of this process, its children and their orphans end together. It uses Linux's parent-death
signal, child subreaper and /proc, and handles the races around them. The caller decides which processes end together.

`LineProcess` is a child that answers JSON lines. `run_in_thread` runs work whose result is needed later; its thread
never keeps the process from ending. The last part raises this process's limit on open files (RLIMIT_NOFILE), which the
processes that it starts inherit. The usual soft limit of 1024 is too low for four servers with 256 open requests each;
the administrator sets the hard limit.

Standard library only, so that every room may import it.
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
# Within this time, a thread that waits for its own child has collected that child's exit code.
_REAP_AFTER_SECONDS = 1.0

# Seconds that the reward `code` gives all tests of one program, unless its option `total_seconds` says otherwise. Here
# because a scoring process, which starts often, would import the whole configuration for it.
DEFAULT_TOTAL_SECONDS = 8.0

# Open files that a process needs besides requests: logs, checkpoints, libraries, sockets of torch.distributed.
SPARE_OPEN_FILES = 512

# Loaded once, because a forked child must not open libraries.
_libc = ctypes.CDLL(None, use_errno=True)
_forking_pid = 0
_registered = False

T = TypeVar("T")


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Make the kernel send signal `number` to this process when `parent`, its parent process, ends in any way.

    To the kernel, the parent is the thread that forked, so the end of that thread sends the signal as well. The setting
    survives exec but not fork. If the parent has already ended, the signal is sent now. Raises OSError.
    """
    _prctl(_PR_SET_PDEATHSIG, int(number), "PR_SET_PDEATHSIG")
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def forks_die_with_us() -> None:
    """From now on, make the kernel kill every fork of this process, at any depth, when the thread that forked it ends.

    This is for libraries that fork workers and join them: a worker that waits on a lock or queue of a killed parent
    would otherwise wait for ever. It covers `os.fork` and multiprocessing's fork. To tie a program that `subprocess`
    starts, use `die_with_parent` or `launcher/exec_tied_to_parent.py`. A second call does nothing.
    """
    global _registered
    if not _registered:
        _registered = True
        os.register_at_fork(before=_remember_parent, after_in_child=_tie_child)


def _remember_parent() -> None:
    global _forking_pid
    _forking_pid = os.getpid()


def _tie_child() -> None:
    die_with_parent(_forking_pid)


def adopt_orphans(on: bool = True) -> None:
    """Adopt descendants whose parent ends. They become children of this process, which can find and reap them.

    Raises OSError.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, int(on), "PR_SET_CHILD_SUBREAPER")


def _prctl(option: int, value: int, name: str) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({name})")


def parents() -> dict[int, int]:
    """Return the parent of every live (not zombie) process of this machine, by pid."""
    table = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (found := _state_and_parent(int(name))) is not None and found[0] not in "ZX":
            table[int(name)] = found[1]
    return table


def living_below(pid: int, without: Collection[int] = ()) -> set[int]:
    """Return the pids of all living descendants of `pid`, in any process group or session.

    The children `without` of `pid` and their descendants are left out.
    """
    table = parents()
    members: set[int] = set()
    below = {child for child, parent in table.items() if parent == pid and child not in without}
    while below:
        members |= below
        below = {child for child, parent in table.items() if parent in below and child not in without}
    return members


def kill_below(without: Collection[int] = (), own: Iterable[int] = (), patience_seconds: float = 60.0) -> set[int]:
    """Send SIGKILL to all descendants of this process until none lives, and reap them.

    With `adopt_orphans` on, none escapes. The children `without` are spared together with their descendants. The
    children `own` are killed but not reaped, because something else (a `subprocess.Popen`) collects their exit codes.

    Returns the pids that live after `patience_seconds`: a process cannot be killed while it waits for a device or file
    server that does not answer.
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
    """Send a signal to a process. If the process has already ended, this does nothing."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def reap(pid: int) -> bool:
    """Collect the ended child `pid`. Returns False if it still runs or is not a child of this process."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return False


class Reaper:
    """Collects adopted children that have ended. Otherwise they stay zombies until this process ends.

    Another thread may be waiting for a child that it started. Therefore only children that ended at least
    `_REAP_AFTER_SECONDS` ago are collected.
    """

    def __init__(self) -> None:
        self._ended_since: dict[int, float] = {}
        self._last_collection = float("-inf")

    def collect_ended(self, known: Collection[int] = ()) -> list[int]:
        """Collect ended children and return their pids. It looks at most once per second, so every poll may call it.

        The children `known` are never collected, because somebody asks for their exit codes later.
        """
        now = time.monotonic()
        if now - self._last_collection < _REAP_AFTER_SECONDS:
            return []
        self._last_collection = now
        ended = {pid for pid in children() if pid not in known and (_state_and_parent(pid) or "X")[0] == "Z"}
        self._ended_since = {pid: self._ended_since.get(pid, now) for pid in ended}
        due = [pid for pid, since in self._ended_since.items() if now - since >= _REAP_AFTER_SECONDS]
        return [pid for pid in due if reap(pid)]


def children() -> set[int]:
    """Return the pids of the children of this process, including ended ones."""
    try:
        lists = [(task / "children").read_text(encoding="ascii") for task in Path("/proc/self/task").iterdir()]
        return {int(pid) for line in lists for pid in line.split()}
    except OSError:  # the kernel has no such files, or a thread has just ended
        us = os.getpid()
        pids = (int(name) for name in os.listdir("/proc") if name.isdigit())
        return {pid for pid in pids if (found := _state_and_parent(pid)) is not None and found[1] == us}


def state_of(pid: int) -> str | None:
    """Return the state letter of a process as `/proc/PID/stat` has it (`T`: stopped), or None if it is gone."""
    found = _state_and_parent(pid)
    return found[0] if found is not None else None


def _state_and_parent(pid: int) -> tuple[str, int] | None:
    """Return the state letter and the parent of a process, or None if it is gone."""
    try:
        stat = Path("/proc", str(pid), "stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The line is "pid (command) state parent ...", and the command may contain any characters.
    state, parent = stat.rpartition(")")[2].split()[:2]
    return state, int(parent)


class LineProcess:
    """A child process that answers each JSON line that it is sent with one JSON line.

    `greeting` is the first line, with which it says how it started, or `{"error": text}` if it ended without one. This
    class sets no bound on time or memory, and does not know what the lines mean.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """`environment` is the whole environment of the process, by default this process's.

        Raises OSError if the process cannot be started.
        """
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=None if environment is None else dict(environment),
        )
        self.greeting = self._receive()

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send `message` and return the answer, or `{"error": text}` if the process has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the reply will say so
        return self._receive()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def exit_code(self) -> int | None:
        """The exit code as in `Popen.returncode`, or None while the process runs."""
        return self._process.poll()

    def end(self) -> None:
        """Kill the process and wait for its end."""
        self._process.kill()
        self._process.communicate()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line.endswith(b"\n"):
            try:
                return json.loads(line)
            except (ValueError, RecursionError):
                return {"error": f"its process answered with a line that is not JSON: {line[:100]!r}"}
        return {"error": f"its process ended (exit code {self._process.wait()})"}


def run_in_thread(name: str, work: Callable[[], T]) -> concurrent.futures.Future[T]:
    """Run `work` in a daemon thread of this name. Returns a future with its result or the exception that it raised."""
    future: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # raised again by `Future.result`
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def raise_open_file_limit() -> int:
    """Raise the soft limit to the hard limit and return it (resource.RLIM_INFINITY if there is none)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def open_file_limit() -> int:
    """Return the hard limit, to which `raise_open_file_limit` raises the soft one."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[1]


def open_file_limit_suffices(num_requests: int) -> bool:
    """Whether the hard limit admits `num_requests` open requests with one connection each."""
    limit = open_file_limit()
    return limit == resource.RLIM_INFINITY or limit >= num_requests + SPARE_OPEN_FILES

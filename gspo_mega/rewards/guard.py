"""Prepare a process before it calls any user code.

`begin` starts it: the program continues in a child, and the process itself becomes the child's guard. A function may
start children in sessions of their own, which no signal to a process group reaches. The guard is their subreaper in the
kernel: a process whose parent ends becomes the guard's child, so none is lost, and the guard exits once none lives. It
runs no user code. The pool ends it with SIGTERM, and so does the kernel when the pool's thread dies.

The child keeps its pipes private, limits its memory and files (`limit`), and may give up the network (`leave_network`).
Its parent enforces deadlines.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

from gspo_mega.base.errors import GspoMegaError
from gspo_mega.base.processes import adopt_orphans, die_with_parent, kill_below
from gspo_mega.base.user_functions import look_last_in

_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_AWAITED = {signal.SIGTERM, signal.SIGCHLD}


def begin() -> tuple[Any, Any, dict[str, Any]]:
    """Continue in a child of this process, which was started as `python -m module PARENT_PID` and becomes the guard.
    Users' modules are found in the working folder, and last in `modules_dir` of the first request. Returns the pipes of
    requests and replies, and the first request.
    """
    go_on_guarded(int(sys.argv[1]))
    requests, replies = _take_over_pipes()
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    setup = json.loads(requests.readline())
    look_last_in(setup.pop("modules_dir", None))
    return requests, replies, setup


def go_on_guarded(parent_pid: int) -> None:
    """Return in a child of this process; this process becomes the child's guard and does not return.

    The guard ends everything that the child left running, and then ends as the child did (exit code or signal). Call
    this before any thread is started.
    """
    adopt_orphans()
    signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    die_with_parent(parent_pid, signal.SIGTERM)
    guard_pid = os.getpid()
    child_pid = os.fork()
    if child_pid != 0:
        _guard(child_pid)
    die_with_parent(guard_pid)
    os.setsid()  # a signal to "my group" from inside a function does not reach the guard
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)


def _guard(child_pid: int) -> None:
    """Wait for the child's end or for SIGTERM, end what is left, and exit as the child did."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)  # the pipes belong to the child and must end with it
    os.dup2(nothing, 1)
    os.close(nothing)
    status = None
    while status is None and signal.sigwait(_AWAITED) == signal.SIGCHLD:
        status = _reap(child_pid)
    kill_below()
    code = 0 if status is None else os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        os.kill(os.getpid(), -code)
    os._exit(max(code, 0))


def _reap(child_pid: int) -> int | None:
    """Reap all ended children; returns the status of `child_pid` if it was among them."""
    status = None
    while True:
        try:
            pid, ended = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if pid == 0:
            return status
        if pid == child_pid:
            status = ended


def _take_over_pipes() -> tuple[Any, Any]:
    """Keep stdin and stdout as private channels. Functions get an empty stdin, and print to stderr."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    # Line by line, as in a terminal, so that the output of a process that is killed later is not lost.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    return requests, replies


def limit(memory_bytes: int, file_bytes: int) -> None:
    """Limit the address space to the bytes in use now plus `memory_bytes`, and every written file to `file_bytes`.
    Allocations and writes beyond that fail.
    """
    with open("/proc/self/statm", encoding="ascii") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + memory_bytes, used + memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def leave_network(section: str, refusal: type[GspoMegaError]) -> None:
    """Enter a new network name space, in which no interface is up. Call it before any thread is started.

    `section`: the section of the configuration that asks for it. Raises `refusal` if the kernel does not allow it.
    """
    user, group = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
        raise refusal(
            f"{section}.network: false: the kernel refuses this user a network name space"
            f" ({os.strerror(ctypes.get_errno())}); allow unprivileged user name spaces on this machine, or set"
            f" {section}.network: true and isolate the run from outside"
        )
    try:
        Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1", encoding="ascii")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1", encoding="ascii")
    except OSError as error:
        raise refusal(f"{section}.network: false: the user name space cannot be set up: {error}") from error
    die_with_parent(os.getppid())  # new credentials may have cleared it


def leave() -> NoReturn:
    """End at once, because a thread that a function left running must not keep the process alive."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)

"""Which episode a process belongs to, so that every process that an episode starts, directly or not, ends with it.

A worker's process has many episodes, so the tree of processes does not say which of them started one. The environment
does: a program that an episode starts has the episode's number in a variable, and so has all that this program starts,
with an environment of its own or with the one that it was given. A fork of the worker keeps the worker's first
environment, which the kernel shows to others (`/proc/PID/environ`): the fork writes the number there, in place.

`mark_processes` makes a worker set the variable, and `end_processes` ends the processes that have it. It does not find
programs whose environment was emptied on the way, nor those that `os.system`, `os.posix_spawn` or multiprocessing's
`spawn` started. They end with the worker, whose guard ends everything (`rewards/guard.py`).
"""

from __future__ import annotations

import ctypes
import inspect
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from gspo_mega.agents.loop_watch import CURRENT
from gspo_mega.base.processes import living_below, send_signal

_NAME = "GSPO_MEGA_EPISODE"
_DIGITS = 20
# What a worker is started with: room for a number, and the number of no episode.
NO_EPISODE = {_NAME: "0" * _DIGITS}
_LOOK_SECONDS = 0.005
# A process that is just becoming another program shows no environment, so one look is not enough.
_LOOKS_WITHOUT = 2
_PATIENCE_SECONDS = 2.0
_SIGNATURE = inspect.signature(subprocess.Popen.__init__)


def mark_processes() -> None:
    """Mark what episodes start, from now on. Call it in a worker that was started with `NO_EPISODE`, before any users'
    code is imported. Raises RuntimeError if the worker was not started so.
    """
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    place = libc.getenv(_NAME.encode())
    if place is None or os.environ.get(_NAME) != NO_EPISODE[_NAME]:
        raise RuntimeError(f"the environment lacks {_NAME}={NO_EPISODE[_NAME]}")

    def mark_fork() -> None:
        if (owner := CURRENT.get()) is not None:
            ctypes.memmove(place, _digits(owner.number), _DIGITS)

    os.register_at_fork(before=_note_start, after_in_child=mark_fork)
    subprocess.__dict__["Popen"] = _OwnedPopen


def end_processes(number: int, guard_pid: int) -> int:
    """End every process below `guard_pid` that episode `number` started, and return how many these were.

    Raises TimeoutError if one does not end, because it waits for a device or a file server that does not answer.
    """
    mark = b"\0" + f"{_NAME}=".encode() + _digits(number) + b"\0"
    ended: set[int] = set()
    until, looks_without = time.monotonic() + _PATIENCE_SECONDS, 0
    while looks_without < _LOOKS_WITHOUT:
        if time.monotonic() > until:
            raise TimeoutError(f"processes of episode {number} do not end")
        found = {pid for pid in living_below(guard_pid) if mark in _environment_of(pid)}
        for pid in found:
            send_signal(pid, signal.SIGKILL)
        ended |= found
        looks_without = 0 if found else looks_without + 1
        time.sleep(_LOOK_SECONDS)
    return len(ended)


def _note_start() -> None:
    if (owner := CURRENT.get()) is not None:
        owner.has_processes = True


def _digits(number: int) -> bytes:
    return str(number).zfill(_DIGITS).encode()


def _environment_of(pid: int) -> bytes:
    try:
        return b"\0" + Path("/proc", str(pid), "environ").read_bytes()
    except OSError:  # it has ended, or the pid is another user's by now
        return b""


class _OwnedPopen(subprocess.Popen[Any]):
    """`subprocess.Popen` with the episode's number in the environment. asyncio's subprocesses use it, too."""

    def __init__(self, *args: Any, **options: Any) -> None:
        owner = CURRENT.get()
        if owner is not None:
            _note_start()
            given = _SIGNATURE.bind(self, *args, **options)
            env = given.arguments.get("env")
            given.arguments["env"] = {**(os.environ if env is None else env), _NAME: _digits(owner.number).decode()}
            args, options = given.args[1:], given.kwargs
        super().__init__(*args, **options)

"""What a process with users' code does to itself before it calls any: how it begins (its guard, private pipes), limits,
and how it leaves.

The guard around it is `guard.py`'s, deadlines are its parent's.
"""

from __future__ import annotations

import io
import json
import os
import resource
import sys
from typing import Any, NoReturn

from gspo_mega.rewards.guard import go_on_guarded


def begin() -> tuple[Any, Any, dict[str, Any]]:
    """Go on in a child of this process, which `python -m module PARENT_PID` started and which becomes its guard, with
    users' modules found in the working folder. Returns the pipes of requests and replies, and the first request.
    """
    go_on_guarded(int(sys.argv[1]))
    requests, replies = _take_over_pipes()
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return requests, replies, json.loads(requests.readline())


def _take_over_pipes() -> tuple[Any, Any]:
    """Keep stdin and stdout as private channels; give functions an empty stdin, and stderr for what they print."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    # Line by line, as in a terminal: the output of a process that is killed later is not lost.
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


def leave() -> NoReturn:
    """End at once: a thread that a function left behind must not keep the process alive."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)

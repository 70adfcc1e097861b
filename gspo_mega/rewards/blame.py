"""Decide who caused a scoring to fail: the response, or somebody else.

If the response is the cause, it scores 0 and the cause is counted; a response must not be able to choose "no reward"
over 0. A failure that the machine, the run or the user's own code causes says nothing about the response: the scoring
is tried again if that may help, and otherwise has failed. The table is in docs/rewards.md.

Only built-in functions are judged in this way. A user's function may fail for reasons that cannot be told apart here,
so its exception, crash or timeout is a failed scoring. That somebody else killed its process can be told, and the
scoring is tried again as for a built-in one.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from gspo_mega.base.errors import GspoMegaError

# What a response may cause; each is counted as `rollout/num_response_faults_<cause>`.
CAUSES = ("time", "memory", "crash", "exception")

# Signals that a process raises by its own computing. SIGKILL, SIGTERM and the like are sent by others, such as the
# kernel when the machine's memory is exhausted.
_OWN_SIGNALS = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE, signal.SIGSYS, signal.SIGXCPU}
)


class HeldUp(Exception):
    """The machine kept a scoring from finishing. It is tried again."""


def is_own_end(exit_code: int) -> bool:
    """Return whether a process ended by a signal that its own computing raises. `exit_code`: as in
    `Popen.returncode`.
    """
    return exit_code < 0 and -exit_code in _OWN_SIGNALS


def is_killed_by_others(exit_code: int) -> bool:
    """Return whether a process ended by a signal that its own computing does not raise. `exit_code`: as in
    `Popen.returncode`.
    """
    return exit_code < 0 and not is_own_end(exit_code)


def cause_of(error: BaseException, control: Callable[[], Any]) -> str | None:
    """Return what the response caused when a built-in function raised `error`; None if the response was not the cause.

    `control` scores an empty response for the same row. If that raises as well, the row or the machine is at fault.
    """
    if not isinstance(error, Exception) or isinstance(error, (HeldUp, OSError, ImportError, GspoMegaError)):
        return None
    if isinstance(error, RuntimeError) and not isinstance(error, RecursionError):
        return None  # a process that it asks has failed
    try:
        control()
    except Exception:
        return None
    return "memory" if isinstance(error, MemoryError) else "exception"

"""Who caused it that a scoring did not end as it should: the response, or we.

What a response causes is a score: 0, with the cause counted. It must not be able to choose "no reward" over 0. What the
machine, the run or the user's own code causes says nothing about the response: it is tried again where that may help,
and in the end the scoring has failed. The table is in docs/rewards.md.

Only our own functions are judged so. A user's function may fail for reasons that nobody here can tell apart, and an
exception, a crash or a timeout of it is a failed scoring.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from gspo_mega.base.errors import GspoMegaError

# What a response may have caused, each counted as `rollout/num_response_faults_<cause>`.
CAUSES = ("time", "memory", "crash", "exception")

# Of a process that computed what a response asked for: it did something that its code cannot do. SIGKILL, SIGTERM and
# the like are sent by others, such as the kernel when the machine's memory is exhausted.
_OWN_SIGNALS = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE, signal.SIGSYS, signal.SIGXCPU}
)


class HeldUp(Exception):
    """The machine did not let a scoring be done. It is tried again."""


def is_own_end(exit_code: int) -> bool:
    """Whether a process ended by a signal that its own computing raises. `exit_code`: as of `Popen.returncode`."""
    return exit_code < 0 and -exit_code in _OWN_SIGNALS


def cause_of(error: BaseException, control: Callable[[], Any]) -> str | None:
    """What a response caused when one of our functions raised `error`; None where it was not the response.

    `control` scores an empty response for the same row: where that raises as well, the row or the machine is at fault.
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

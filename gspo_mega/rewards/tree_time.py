"""How a process and everything below it spends its time: computing, asleep, or held up by the machine.

Owns reading it from /proc while a scoring takes long. What follows from it is the scoring pool's.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_MOST_THREADS = 64


class TreeTime:
    """The time of a process tree since this object was made.

    Attributes:
        computed_seconds: processor time of all its processes, those that have ended included.
        held_up_seconds: in which one of them wanted a processor or a disk's page and did not get it, or was stopped by
            somebody.
        seen_seconds: all of it.
        is_stopped: whether one of them was stopped at the last look.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.computed_seconds = self.held_up_seconds = self.seen_seconds = 0.0
        self.is_stopped = False
        self._last = time.monotonic()
        self._before, _ = _now(pid)

    def look(self, expected_seconds: float) -> None:
        """Add what has passed since the last look. `expected_seconds`: that it should be; where it is much more, this
        process was held up, and that one, too.
        """
        passed = time.monotonic() - self._last
        self._last += passed
        ticks, states = _now(self._pid)
        computed = max(0.0, (ticks - self._before) / _TICKS)
        self._before = max(ticks, self._before)
        self.is_stopped = bool(states & set("Tt"))
        if states & set("RDTt") or passed > 2 * expected_seconds + 0.5:
            self.held_up_seconds += max(0.0, passed - computed)
        self.computed_seconds += computed
        self.seen_seconds += passed


def _now(pid: int) -> tuple[int, set[str]]:
    """Processor time so far in ticks, and the states of all threads."""
    ticks, states = 0, set[str]()
    left = [pid]
    while left:
        one = Path("/proc", str(left.pop()))
        with contextlib.suppress(OSError, ValueError):
            fields = _stat(one / "stat")
            ticks += sum(map(int, fields[11:15]))  # utime, stime, and those of children that have ended
            for task in list((one / "task").iterdir())[:_MOST_THREADS]:
                states.add(_stat(task / "stat")[0])
                left += map(int, (task / "children").read_text(encoding="ascii").split())
    return ticks, states


def _stat(path: Path) -> list[str]:
    """The fields after "pid (command)", of which the command may hold anything."""
    return path.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()

"""The progress of this process: the phase of its work, and a count that grows with every piece of work done.

Owns the two values. Working code calls `beat` when something is finished (a micro-batch, a trajectory, a message) and
marks phases; a rank's `train/signals.py` shows them to the supervisor. The phases are the main thread's. Standard
library only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

START, WAIT, DONE = "start", "wait", "done"

_phase, _count = START, 0


def beat() -> None:
    """Count a finished piece of work. Cheap enough for every micro-batch; any thread may call it."""
    global _count
    _count += 1


def enter(phase: str) -> None:
    """Begin a phase, which counts as progress."""
    global _phase
    _phase = phase
    beat()


@contextlib.contextmanager
def during(phase: str) -> Iterator[None]:
    """The phase of a block; the phase before it returns afterwards."""
    before = _phase
    enter(phase)
    try:
        yield
    finally:
        enter(before)


def now() -> tuple[str, int]:
    """(phase, count)."""
    return _phase, _count

"""The progress of this process: the phase of its work, and a count that grows with every finished piece of work.

Working code calls `beat` when something is finished (a micro-batch, a trajectory, a message). The main thread marks
phases with `enter` and `during`. In a rank, `train/signals.py` shows both values to the supervisor. Standard library
only.
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
    """Begin a phase. This counts as progress."""
    global _phase
    _phase = phase
    beat()


@contextlib.contextmanager
def during(phase: str) -> Iterator[None]:
    """Make the block a phase. After it, the earlier phase is set again."""
    before = _phase
    enter(phase)
    try:
        yield
    finally:
        enter(before)


def current() -> tuple[str, int]:
    """Return the phase and the count."""
    return _phase, _count

"""How far this process has come: which phase of its work it is in, and a count that grows with everything that gets
done.

Owns the two values. Whoever does work calls `beat` where something is finished (a micro-batch, a trajectory, a message)
and marks phases; a rank's `beat_writer.py` lets the supervisor see them. One process, its main thread's phases.
Standard library only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

START, WAIT, DONE = "start", "wait", "done"

_phase, _count = START, 0


def beat() -> None:
    """Something got done. Cheap: a rank may call it for every micro-batch. Any thread: a lost count is not missed."""
    global _count
    _count += 1


def enter(phase: str) -> None:
    """The phase from here on, a progress too."""
    global _phase
    _phase = phase
    beat()


@contextlib.contextmanager
def during(phase: str) -> Iterator[None]:
    """The phase of a block; then the one before again."""
    before = _phase
    enter(phase)
    try:
        yield
    finally:
        enter(before)


def now() -> tuple[str, int]:
    """(phase, count)."""
    return _phase, _count

"""The phases of a step: their wall time, the sign of life that names them, and the moments between them.

Owns which phase reaches which of the kill points of a step (`kill_points.MOMENTS`), at which tests end the process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

from gspo_mega.base import beats, kill_points
from gspo_mega.metrics.timer import PhaseTimer

T = TypeVar("T")


class _Moments(NamedTuple):
    """Kill points at the start of a phase, after each of its items, and at its end."""

    start: str | None = None
    each: str | None = None
    end: str | None = None


_MOMENTS = {
    "old_log_probs": _Moments(start="rollout.batch", each="step.old_pass"),
    "train": _Moments(each="step.optimizer", end="step.trained"),
    "report": _Moments(start="step.published"),
    "write": _Moments(end="step.written"),
}
# `write` ends the step of the timer, so its time is part of the next step's "other".
_UNTIMED = ("write",)


class Phases:
    """The phases of one rank. `timer`: the wall time of each, by step. `named_range` marks a phase in a trace."""

    def __init__(self) -> None:
        self.timer = PhaseTimer()
        self.named_range: Callable[[str], contextlib.AbstractContextManager[object]] = contextlib.nullcontext

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The block is the phase `name`. Raises ValueError for an unknown name."""
        moments = _MOMENTS.get(name, _Moments())
        timed = contextlib.nullcontext() if name in _UNTIMED else self.timer.phase(name)
        _reach(moments.start)
        with timed, beats.during(name), self.named_range(name):
            yield
        _reach(moments.end)

    def each(self, name: str, items: Iterable[T]) -> Iterator[T]:
        """The items, all within one phase `name`; the loop's body works on one item."""
        with self.phase(name):
            for item in items:
                yield item
                _reach(_MOMENTS.get(name, _Moments()).each)


def _reach(point: str | None) -> None:
    if point is not None:
        kill_points.reached(point)

"""PyTorch profiler traces of some steps of some ranks, with the phases of a step as named ranges (`profile`).

Owns when the profiler runs and what it writes: profile/steps_<a>-<b>/rank_<r>.json.gz, in the format that Chrome's
tracing page, Perfetto and TensorBoard read, and on a GPU rank_<r>.memory.pickle beside it, for
pytorch.org/memory_viz. A range costs nothing while no profiler runs.

The phases of a step: their wall time, the sign of life that names them, and the moments between them.

Owns which phase reaches which of the kill points of a step (`kill_points.MOMENTS`), at which tests end the process.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

import torch

from gspo_mega.base import failpoints, progress
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.config.schema import Profile
from gspo_mega.metrics.reductions import PhaseTimer

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
        with timed, progress.during(name), self.named_range(name):
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
        failpoints.reached(point)


logger = logging.getLogger(__name__)

# Allocations that a memory snapshot remembers.
_MEMORY_ENTRIES = 1_000_000


class Profiling:
    """The profiler of one rank. `say` shows the user a line (from rank 0)."""

    def __init__(self, settings: Profile, rank: int, folder: RunFolder, say: Callable[[str], None]) -> None:
        steps = settings.steps
        self._first, self._last = steps if steps is not None and rank in settings.ranks else (0, -1)
        self._rank, self._folder, self._say = rank, folder, say
        self._profiler: torch.profiler.profile | None = None
        self._begun_at = self._ended_at = 0

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """The block is that step. A trace begins with the first step of the range that this start of the run trains."""
        if not self._first <= number <= self._last:
            yield
            return
        if self._profiler is None:
            self._begin(number)
        with torch.profiler.record_function(f"step {number}"):
            yield
        self._ended_at = number
        if number == self._last:
            self.close()

    def range(self, name: str) -> contextlib.AbstractContextManager[object]:
        """A named range in the trace, where one is being made."""
        return contextlib.nullcontext() if self._profiler is None else torch.profiler.record_function(name)

    def close(self) -> None:
        """Write what was profiled so far: of a run that stops within the range, too."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        profiler.stop()
        folder = self._folder.profile_dir / f"steps_{self._begun_at}-{self._ended_at}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(folder / f"rank_{self._rank}.json.gz"))
            if torch.cuda.is_available():
                torch.cuda.memory._dump_snapshot(str(folder / f"rank_{self._rank}.memory.pickle"))
        except (OSError, RuntimeError) as error:
            logger.warning("the profile of rank %d cannot be written", self._rank, exc_info=error)
            self._say(f"warning  the profile of rank {self._rank} could not be written: {error}")
        else:
            self._say(f"profile  steps {self._begun_at} to {self._ended_at}: {folder}")
        finally:
            if torch.cuda.is_available():
                torch.cuda.memory._record_memory_history(enabled=None)

    def _begin(self, number: int) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=_MEMORY_ENTRIES)
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.start()
        self._begun_at = self._ended_at = number

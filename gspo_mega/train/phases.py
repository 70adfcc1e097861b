"""The phases of a step: how long each takes, the sign of life that names it, and the kill points between phases.

`Phases` times each phase, tells the watchdog which one runs, and reaches the failpoints at which tests end the process.
`Profiling` writes PyTorch profiler traces of some steps of some ranks (`profile`), with the phases as named ranges:
profile/steps_<a>-<b>/rank_<r>.json.gz, in the format that Chrome's tracing page, Perfetto and TensorBoard read. On a
GPU they also write rank_<r>.memory.pickle, for pytorch.org/memory_viz. A named range costs nothing while no profiler
runs.
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
logger = logging.getLogger(__name__)

# Allocations that a memory snapshot remembers.
_MEMORY_ENTRIES = 1_000_000


class _KillPoints(NamedTuple):
    """The failpoints at the start of a phase, after each of its items, and at its end."""

    start: str | None = None
    each: str | None = None
    end: str | None = None


_KILL_POINTS = {
    "old_log_probs": _KillPoints(start="rollout.batch", each="step.old_pass"),
    "train": _KillPoints(each="step.optimizer", end="step.trained"),
    "report": _KillPoints(start="step.published"),
    "write": _KillPoints(end="step.written"),
}
# The phase `write` ends the timer's step, so its time is part of the next step's "other".
_UNTIMED = ("write",)


class Phases:
    """The phases of one rank. `timer`: the wall time of each, by step. `named_range`: marks a phase in a trace."""

    def __init__(self) -> None:
        self.timer = PhaseTimer()
        self.named_range: Callable[[str], contextlib.AbstractContextManager[object]] = contextlib.nullcontext

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A context manager: the block is the phase `name`. Raises ValueError for an unknown name."""
        points = _KILL_POINTS.get(name, _KillPoints())
        timed = contextlib.nullcontext() if name in _UNTIMED else self.timer.phase(name)
        _reach(points.start)
        with timed, progress.during(name), self.named_range(name):
            yield
        _reach(points.end)

    def each_in_phase(self, name: str, items: Iterable[T]) -> Iterator[T]:
        """Yield the items, all within one phase `name`. The loop's body works on one item."""
        with self.phase(name):
            for item in items:
                yield item
                _reach(_KILL_POINTS.get(name, _KillPoints()).each)


def _reach(point: str | None) -> None:
    if point is not None:
        failpoints.reached(point)


class Profiling:
    """The profiler of one rank. `say` shows a line to the user if this is rank 0."""

    def __init__(self, settings: Profile, rank: int, folder: RunFolder, say: Callable[[str], None]) -> None:
        steps = settings.steps
        self._first, self._last = steps if steps is not None and rank in settings.ranks else (0, -1)
        self._rank, self._folder, self._say = rank, folder, say
        self._profiler: torch.profiler.profile | None = None
        self._begun_at = self._ended_at = 0

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """A context manager: the block is the step `number`. The trace begins with the first step of the range that
        this start of the run trains.
        """
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
        """A context manager that marks a named range in the trace; does nothing while no profiler runs."""
        return contextlib.nullcontext() if self._profiler is None else torch.profiler.record_function(name)

    def close(self) -> None:
        """Write what was profiled so far, also in a run that stops within the range."""
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

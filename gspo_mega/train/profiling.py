"""PyTorch profiler traces of some steps of some ranks, with the phases of a step as named ranges (`profile`).

Owns when the profiler runs and what it writes: profile/steps_<a>-<b>/rank_<r>.json.gz, in the format that Chrome's
tracing page, Perfetto and TensorBoard read, and on a GPU rank_<r>.memory.pickle beside it, for
pytorch.org/memory_viz. A range costs nothing while no profiler runs.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

import torch

from gspo_mega.base.run_folder import RunFolder
from gspo_mega.config.schema import Profile

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

"""Where a step's wall time goes: phases that add up to it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from gspo_mega.metrics.catalogue import PHASES


class PhaseTimer:
    """Accumulates wall seconds by phase. Nested phases are exclusive: the inner one's time is not the outer's, so
    that the phases and `other`, the remainder, account for the step. One thread.

    A step runs from construction, `start_step` or the last `finish_step` to the next `finish_step`.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._inner_seconds: list[float] = []
        self._started = clock()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block's time as `name`, also when it raises. Raises ValueError for a phase of no such name."""
        if name not in PHASES or name == "other":
            raise ValueError(f"phase {name!r}; valid: {', '.join(p for p in PHASES if p != 'other')}")
        started = self._clock()
        self._inner_seconds.append(0.0)
        try:
            yield
        finally:
            elapsed = self._clock() - started
            own = elapsed - self._inner_seconds.pop()
            if self._inner_seconds:
                self._inner_seconds[-1] += elapsed
            self._seconds[name] = self._seconds.get(name, 0.0) + own

    def start_step(self) -> None:
        """Forget what was counted so far; a step starts now. Raises RuntimeError inside a phase."""
        if self._inner_seconds:
            raise RuntimeError("start_step inside a phase")
        self._seconds = {}
        self._started = self._clock()

    def finish_step(self) -> dict[str, float]:
        """{"time/step_seconds", "time/<phase>_seconds" of phases that ran, "time/other_seconds"}; starts the next step.

        Raises RuntimeError inside a phase.
        """
        if self._inner_seconds:
            raise RuntimeError("finish_step inside a phase")
        now = self._clock()
        total = now - self._started
        seconds = {f"time/{name}_seconds": value for name, value in self._seconds.items()}
        other = total - sum(self._seconds.values())
        self._started, self._seconds = now, {}
        return {"time/step_seconds": total, **seconds, "time/other_seconds": max(other, 0.0)}

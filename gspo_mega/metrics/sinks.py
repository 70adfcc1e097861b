"""The sinks of a run: where its metrics go in addition to metrics.jsonl, with one thread per sink.

A sink is a class that the YAML names as `package.module:MySink`; `Sink` and `SinkRun` say what it looks like. Its
methods run in a thread of rank 0 and may raise or take long. `sink_loading.py` finds the classes.

metrics.jsonl is the queue: each thread reads the lines that its sink lacks, so nothing is lost while a sink fails, and
training never waits for one. `sinks/<name>.json`, the ledger, keeps how far a sink has come. It is written once the
sink has all there is, so a killed run may give a sink its last lines again (`Sink` says what a sink can do about that).
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gspo_mega.base.run_folder import RunFolder, atomic_write_json, read_json
from gspo_mega.base.untrusted import open_regular

logger = logging.getLogger(__name__)

# The time that all sinks together have at the end of a run.
CLOSE_SECONDS = 60.0
# A sink that cannot be made is tried again after 1, 2, 4, ... steps, up to this many. A sink whose `write` fails again
# and again is made anew after 4, 16, 64, ... failures in a row, because each attempt may leave files.
_MOST_STEPS_BETWEEN = 64
_MOST_KEPT = 64
_NOT_GIVEN: Any = object()


@dataclass(frozen=True)
class SinkRun:
    """What a sink is made with. `run`: the run's folder. `folder`: the sink's own folder in it, which may not exist
    yet. `config`: the run's configuration. `first_step`: the step of the first line that the sink will be given; what
    the sink holds of this step and later ones is void.
    """

    name: str
    run: RunFolder
    folder: Path
    config: dict[str, Any]
    first_step: int


@dataclass(frozen=True)
class SampleRow:
    """A sampled response: texts, the reward (None: not scored), and the advantage (None: per token, or not trained)."""

    prompt: str
    response: str
    reward: float | None
    advantage: float | None


class Sink(Protocol):
    """A destination of metrics:

        class MySink:
            def __init__(self, run: SinkRun, **options): ...      # options from the configuration
            def write(self, step: int, time: float, metrics: dict[str, float]) -> None: ...
            def close(self) -> None: ...

    `write` is given one line: unix seconds and the finite values by their names in the catalogue. A sink that also has
    a method `write_samples(step: int, rows: list[SampleRow])` is given responses of every step that
    `metrics.samples_every_steps` divides, just before the step's line (see `Sinks.keep_samples`).

    A sink that cannot take back what it holds says so in one of two ways, and is then given only later steps. If it can
    tell what it holds, it has an attribute `last_step` (None: nothing). If it cannot, because it buffers, it has an
    attribute `buffer_seconds`: what it was given that long ago, or before it was closed, it holds for sure, and the
    ledger keeps that step. What it was given since may be lost with a kill, so it is given again: twice is better than
    never.
    """

    def write(self, step: int, time: float, metrics: dict[str, float]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class SinkMaker:
    """The name of a sink, and the function that makes it."""

    name: str
    make: Callable[[SinkRun], Sink]


class Sinks:
    """All sinks of a run. `tell` shows a line to the user."""

    def __init__(
        self,
        run: RunFolder,
        makers: Sequence[SinkMaker],
        config: dict[str, Any] | None = None,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._samples: dict[int, list[SampleRow]] = {}
        self._feeds = [_Feed(run, maker, config or {}, tell, self._samples) for maker in makers]
        self._tell = tell

    def __len__(self) -> int:
        return len(self._feeds)

    @property
    def num_failures(self) -> int:
        """Failures of all sinks since this object was made."""
        return sum(feed.num_failures for feed in self._feeds)

    def keep_lines(self, num_lines: int) -> None:
        """Call this after metrics.jsonl was cut to its first `num_lines` lines and before the first `wake`. The sinks
        are given again what follows these lines.
        """
        for feed in self._feeds:
            feed.keep_lines(num_lines)

    def keep_samples(self, step: int, rows: list[SampleRow]) -> None:
        """Call this before the line of `step` is written. The last 64 steps are kept, in memory only: a sink that is
        further behind, or is given lines again after a kill, gets these lines without rows.
        """
        self._samples[step] = rows
        for old in sorted(self._samples)[:-_MOST_KEPT]:
            del self._samples[old]

    def wake(self) -> None:
        """Call this when there are new lines. Returns at once."""
        for feed in self._feeds:
            feed.wake()

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Give the sinks what they lack and close them, within `seconds` in all."""
        deadline = time.monotonic() + seconds
        for feed in self._feeds:
            feed.end()
        for feed in self._feeds:
            if not feed.join(max(0.0, deadline - time.monotonic())):
                self._tell(
                    f"notice   metrics sink {feed.name} did not finish within {seconds:g} s;"
                    " metrics.jsonl has every line"
                )


class _Feed:
    """The thread of one sink."""

    def __init__(
        self,
        run: RunFolder,
        maker: SinkMaker,
        config: dict[str, Any],
        tell: Callable[[str], None],
        samples: Mapping[int, list[SampleRow]],
    ) -> None:
        self.name, self._samples = maker.name, samples
        self.num_failures = 0
        self._run, self._maker, self._config, self._tell = run, maker, config, tell
        label = maker.name.replace(":", ".")
        self._ledger, self._folder = run.sinks_dir / f"{label}.json", run.sinks_dir / label
        # The number of lines that the sink has, and the place in the file where the next one begins.
        self._num_lines, self._kept_step = _read_ledger(self._ledger)
        self._offset: int | None = None
        self._held_step: int | None = None
        # (time, step) of the lines that the sink was given and may have in a buffer.
        self._buffered: deque[tuple[float, int]] = deque()
        self._failures_in_a_row = self._num_not_made = self._to_skip = 0
        self._sink: Sink | None = None
        self._has_news, self._over = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def keep_lines(self, num_lines: int) -> None:
        self._num_lines, self._offset = min(self._num_lines, num_lines), None

    def wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"sink {self.name}", daemon=True)
            self._thread.start()
        self._has_news.set()

    def end(self) -> None:
        if self._thread is None and not any(True for _ in self._lines()):
            return
        self._over.set()
        self.wake()

    def join(self, seconds: float) -> bool:
        if self._thread is None:
            return True
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _work(self) -> None:
        is_over = False
        while not is_over:
            self._has_news.wait()
            self._has_news.clear()
            # Read the flag before the lines: what is written while the sink is fed is read in one more round.
            is_over = self._over.is_set()
            self._feed()
        self._close()

    def _feed(self) -> None:
        """Give the sink the lines that it lacks. After a failure, the next call begins with the same line."""
        if self._sink is None and self._to_skip > 0 and not self._over.is_set():
            self._to_skip -= 1
            return
        try:
            if self._sink is None and not self._make_sink():
                return
            assert self._sink is not None
            before = self._num_lines
            try:
                for line, end in self._lines():
                    step, seconds = line.pop("step"), line.pop("time")
                    if self._held_step is None or step > self._held_step:
                        given = {name: value for name, value in line.items() if value is not None}
                        self._write_samples(step, given)
                        self._sink.write(step, seconds, given)
                        self._buffered.append((time.monotonic(), step))
                        self._failures_in_a_row = 0
                    self._num_lines, self._offset = self._num_lines + 1, end
            finally:
                if self._num_lines > before:
                    self._write_ledger()
        except Exception as error:
            self._failed(error)

    def _write_samples(self, step: int, line: dict[str, float]) -> None:
        """Give the sink the responses of a step of training, if there are any and it takes them."""
        write, rows = getattr(self._sink, "write_samples", None), self._samples.get(step)
        if write is not None and rows and "reward/mean" in line:
            write(step, rows)

    def _make_sink(self) -> bool:
        """Make the sink. Returns False if there is no line to give to it."""
        first = next(self._lines(), None)
        if first is None:
            return False
        run = SinkRun(self.name, self._run, self._folder, self._config, first_step=first[0]["step"])
        self._ledger.parent.mkdir(parents=True, exist_ok=True)
        self._sink = self._maker.make(run)
        self._num_not_made = self._to_skip = 0
        last_step = getattr(self._sink, "last_step", _NOT_GIVEN)
        if last_step is _NOT_GIVEN and self._buffer_seconds is not None:
            last_step = self._kept_step
        if last_step is not _NOT_GIVEN:  # a killed run has lost what the sink had in its buffer
            self._held_step = last_step
            self._num_lines, self._offset = 0, 0
        return True

    @property
    def _buffer_seconds(self) -> float | None:
        return getattr(self._sink, "buffer_seconds", None)

    def _write_ledger(self, is_closed: bool = False) -> None:
        """Write how far the sink has come. `is_closed`: it was closed without an error, so it holds all it was
        given.
        """
        record: dict[str, int] = {"lines": self._num_lines}
        if self._buffer_seconds is not None:
            until = time.monotonic() - (0.0 if is_closed else self._buffer_seconds)
            while self._buffered and self._buffered[0][0] <= until:
                step = self._buffered.popleft()[1]
                self._kept_step = step if self._kept_step is None else max(step, self._kept_step)
            if self._kept_step is not None:
                record["kept_step"] = self._kept_step
        else:
            self._buffered.clear()
        atomic_write_json(self._ledger, record)

    def _failed(self, error: Exception) -> None:
        self.num_failures += 1
        logger.warning("metrics sink %s failed", self.name, exc_info=error)
        if self.num_failures == 1:
            text = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
            self._tell(
                f"notice   metrics sink {self.name} failed: {text}; training goes on, the sink is tried again, and"
                " further failures are counted (metrics/num_sink_failures)"
            )
        if self._sink is None:
            self._num_not_made += 1
            self._to_skip = min(2 ** (self._num_not_made - 1), _MOST_STEPS_BETWEEN) - 1
            return
        self._failures_in_a_row += 1
        if _is_power_of_four(self._failures_in_a_row):
            self._close(is_broken=True)

    def _close(self, is_broken: bool = False) -> None:
        if self._sink is None:
            return
        try:
            self._sink.close()
            if self._buffer_seconds is not None:
                self._write_ledger(is_closed=True)
        except Exception as error:
            if is_broken:
                logger.warning("metrics sink %s could not be closed after its failure: %s", self.name, error)
            else:
                self._sink = None
                self._failed(error)
        self._sink = None

    def _lines(self) -> Iterator[tuple[dict[str, Any], int]]:
        """The complete lines that the sink lacks, each with the place in the file where the next one begins."""
        try:
            file = open_regular(self._run.metrics_file)
        except FileNotFoundError:
            return
        with file:
            place, skip = (0, self._num_lines) if self._offset is None else (self._offset, 0)
            file.seek(place)
            for number, line in enumerate(file):
                if not line.endswith(b"\n"):
                    return
                place += len(line)
                if number >= skip:
                    yield json.loads(line), place


def _is_power_of_four(number: int) -> bool:
    return number >= 4 and number & (number - 1) == 0 and number.bit_length() % 2 == 1


def _read_ledger(path: Path) -> tuple[int, int | None]:
    """The number of lines that a sink has, and, if it buffers, the last step that it holds for sure. 0 and None if
    there is no readable ledger.
    """
    try:
        record = read_json(path) or {"lines": 0}
        kept = record.get("kept_step")
        return int(record["lines"]), None if kept is None else int(kept)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return 0, None

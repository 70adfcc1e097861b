"""The sinks of a run: where its metrics go beside metrics.jsonl, one thread for each.

A sink is a class

    class MySink:
        def __init__(self, run: SinkRun, **options): ...      # options from the configuration
        def write(self, step: int, time: float, metrics: dict[str, float]) -> None: ...
        def close(self) -> None: ...

that the YAML names as `package.module:MySink`. Its methods run in a thread of rank 0 and may raise or take long.

Owns how lines reach the sinks. metrics.jsonl is the queue: a thread reads the lines that its sink lacks, so nothing is
lost while a sink fails, and training never waits for one. How far a sink has come is in `sinks/<name>.json`, written
once it has all there is. So a killed run may give a sink its last lines again: `SinkRun.first_step` says which step
comes first, and what a sink holds of that step and later ones is void. A sink that can tell what it holds has an
attribute `last_step` (None: nothing); it is given later steps only. Loading of classes is `sink_loading.py`'s.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gspo_mega.guarded_files import open_regular
from gspo_mega.run_folder import RunFolder, atomic_write_json, read_json

logger = logging.getLogger(__name__)

# Time that all sinks together have at a run's end.
CLOSE_SECONDS = 60.0
_UNTOLD: Any = object()


@dataclass(frozen=True)
class SinkRun:
    """What a sink is made with. `run`: the run's folder. `folder`: the sink's own in it, which may not exist yet.
    `config`: the run's configuration. `first_step`: the step of the first line that the sink will be given.
    """

    name: str
    run: RunFolder
    folder: Path
    config: dict[str, Any]
    first_step: int


class Sink(Protocol):
    """`write` is given one line: unix seconds and its finite values by their names of the catalogue."""

    def write(self, step: int, time: float, metrics: dict[str, float]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class SinkMaker:
    """A sink's name, and how it is made."""

    name: str
    make: Callable[[SinkRun], Sink]


class Sinks:
    """All sinks of a run. `tell` shows the user a line."""

    def __init__(
        self,
        run: RunFolder,
        makers: Sequence[SinkMaker],
        config: dict[str, Any] | None = None,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._feeds = [_Feed(run, maker, config or {}, tell) for maker in makers]
        self._tell = tell

    def __len__(self) -> int:
        return len(self._feeds)

    @property
    def num_failures(self) -> int:
        """Failures of all sinks since this object was made."""
        return sum(feed.num_failures for feed in self._feeds)

    def keep_lines(self, num_lines: int) -> None:
        """Metrics.jsonl was cut to its first `num_lines` lines: sinks get what follows again. Before the first
        `wake`.
        """
        for feed in self._feeds:
            feed.keep_lines(num_lines)

    def wake(self) -> None:
        """There are new lines. Returns at once."""
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

    def __init__(self, run: RunFolder, maker: SinkMaker, config: dict[str, Any], tell: Callable[[str], None]) -> None:
        self.name = maker.name
        self.num_failures = 0
        self._run, self._maker, self._config, self._tell = run, maker, config, tell
        label = maker.name.replace(":", ".")
        self._ledger, self._folder = run.sinks_dir / f"{label}.json", run.sinks_dir / label
        # The number of lines that the sink has, and where in the file the next one begins.
        self._num_lines = _read_ledger(self._ledger)
        self._offset: int | None = None
        self._held: int | None = None
        self._sink: Sink | None = None
        self._news, self._over = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def keep_lines(self, num_lines: int) -> None:
        self._num_lines, self._offset = min(self._num_lines, num_lines), None

    def wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"sink {self.name}", daemon=True)
            self._thread.start()
        self._news.set()

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
            self._news.wait()
            self._news.clear()
            # Asked before the lines are read: what is written while the sink is fed is read in one more round.
            is_over = self._over.is_set()
            self._feed()
        self._close()

    def _feed(self) -> None:
        """Give the sink the lines that it lacks. After a failure the next line, or the end, begins with the same."""
        try:
            if self._sink is None and not self._begin():
                return
            assert self._sink is not None
            before = self._num_lines
            for line, end in self._lines():
                step, seconds = line.pop("step"), line.pop("time")
                if self._held is None or step > self._held:
                    self._sink.write(step, seconds, {name: value for name, value in line.items() if value is not None})
                self._num_lines, self._offset = self._num_lines + 1, end
            if self._num_lines > before:
                atomic_write_json(self._ledger, {"lines": self._num_lines})
        except Exception as error:
            self._failed(error)

    def _begin(self) -> bool:
        """Make the sink; False where there is nothing to give to it."""
        first = next(self._lines(), None)
        if first is None:
            return False
        run = SinkRun(self.name, self._run, self._folder, self._config, first_step=first[0]["step"])
        self._ledger.parent.mkdir(parents=True, exist_ok=True)
        self._sink = self._maker.make(run)
        last_step = getattr(self._sink, "last_step", _UNTOLD)
        if last_step is not _UNTOLD:  # it knows better: what it buffered is lost with a killed run
            self._held = last_step
            self._num_lines, self._offset = 0, 0
        return True

    def _failed(self, error: Exception) -> None:
        self.num_failures += 1
        logger.warning("metrics sink %s failed", self.name, exc_info=error)
        if self.num_failures == 1:
            text = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
            self._tell(
                f"notice   metrics sink {self.name} failed: {text}; training goes on, the sink is tried again with each"
                " step, and further failures are counted (metrics/num_sink_failures)"
            )
        self._close(is_broken=True)

    def _close(self, is_broken: bool = False) -> None:
        sink, self._sink = self._sink, None
        if sink is None:
            return
        try:
            sink.close()
        except Exception as error:
            if is_broken:
                logger.warning("metrics sink %s could not be closed after its failure: %s", self.name, error)
            else:
                self._failed(error)

    def _lines(self) -> Iterator[tuple[dict[str, Any], int]]:
        """The whole lines that the sink lacks, each with the place of the next."""
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


def _read_ledger(path: Path) -> int:
    """The number of lines that a sink has; 0 where there is no record that can be read."""
    try:
        return int((read_json(path) or {"lines": 0})["lines"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0

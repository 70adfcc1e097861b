"""Where metrics go: `metrics.jsonl`, one strict JSON object per line, and from there to the sinks.

Owns that file, the record of a run that everything else reads, and its repair after a crash; rank 0 alone writes. Names
are checked against the catalogue, values are not computed here. TensorBoard and others are `sinks.py`'s.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gspo_mega.base import durable
from gspo_mega.base.errors import DataError, FolderError
from gspo_mega.base.guarded_files import parse_json, read_bytes
from gspo_mega.metrics.catalogue import find_metric
from gspo_mega.metrics.prometheus import PrometheusEndpoint
from gspo_mega.metrics.sinks import Sinks

NON_FINITE = "metrics/num_non_finite"
SINK_FAILURES = "metrics/num_sink_failures"

# More than a report reads: a run continues all the same.
_MOST_OWN_BYTES = 64 * 1024**3


class MetricsWriter:
    """Appends to `<run_folder>/metrics.jsonl` and wakes the sinks, which read it.

    A line is {"step": int, "time": unix seconds, "<metric>": number or null, ...}, on disk (fsync) when `write`
    returns. A half-written last line, which a killed run may leave, is cut off when the file is opened.
    """

    def __init__(
        self, run_folder: Path, sinks: Sinks | None = None, endpoint: PrometheusEndpoint | None = None
    ) -> None:
        self.path = Path(run_folder) / "metrics.jsonl"
        self._sinks, self._endpoint = sinks, endpoint
        self._file: Any = None

    def resume_from(self, step: int) -> None:
        """Drop what was written of steps after `step` (-1: everything); a continued run writes them again.

        Raises DataError for a line that is not one of this writer's, RuntimeError after the first `write`.
        """
        if self._file is not None:
            raise RuntimeError("resume_from must come before the first write")
        if not self.path.exists():
            if self._sinks is not None:
                self._sinks.keep_lines(0)
            return
        kept = [line for line in self._whole_lines() if self._step_of(line) <= step]
        beside = self.path.with_suffix(".jsonl.new")
        with self._folder_errors():
            with beside.open("wb") as file:
                file.writelines(line for _, line in kept)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, self.path)
            durable.sync(self.path.parent)  # or the lines that follow would be in a file without a name
        if self._sinks is not None:
            self._sinks.keep_lines(len(kept))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line. A NaN or infinite value becomes null, and `metrics/num_non_finite` says how many did.

        Raises ValueError for a name that is not in the catalogue; nothing is written then. FolderError where the disk
        refuses.
        """
        for name in metrics:
            find_metric(name)
        values = {name: _number(value) for name, value in metrics.items()}
        missing = sum(value is None for value in values.values())
        if missing:
            values[NON_FINITE] = missing
        if self._sinks:
            values[SINK_FAILURES] = self._sinks.num_failures
        line = json.dumps({"step": step, "time": round(time.time(), 3)} | values, allow_nan=False)
        with self._folder_errors():
            self._open()
            self._file.write(line.encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        if self._sinks is not None:
            self._sinks.wake()
        if self._endpoint is not None:
            self._endpoint.update(step, values)

    @contextmanager
    def _folder_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # Close now: a buffer that cannot be written would fail again at the end.
            with suppress(OSError):
                self._close_file()
            self._file = None
            raise FolderError(
                f"{self.path}: the metrics cannot be written: {error.strerror}; the same command continues the run"
            ) from error

    def close(self) -> None:
        """Close the file, and the sinks once they have every line."""
        self._close_file()
        if self._sinks is not None:
            self._sinks.close()

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> None:
        if self._file is not None:
            return
        durable.make_folder(self.path.parent)
        is_new = not self.path.exists()
        if not is_new:
            content = read_bytes(self.path, _MOST_OWN_BYTES)
            if content and not content.endswith(b"\n"):
                os.truncate(self.path, content.rfind(b"\n") + 1)
        self._file = self.path.open("ab")
        if is_new:
            durable.sync(self.path.parent)

    def _whole_lines(self) -> list[tuple[int, bytes]]:
        lines = read_bytes(self.path, _MOST_OWN_BYTES).splitlines(keepends=True)
        return [(number, line) for number, line in enumerate(lines, start=1) if line.endswith(b"\n")]

    def _step_of(self, numbered: tuple[int, bytes]) -> int:
        number, line = numbered
        try:
            step = parse_json(line)["step"]
        except (ValueError, KeyError, TypeError):
            step = None
        if not isinstance(step, int):
            raise DataError(f"{self.path}:{number}: is not a line of metrics; move the file away to continue the run")
        return step


def _number(value: Any) -> float | int | None:
    if isinstance(value, int):  # bool included
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl` in order; a half-written last line is left out. Raises DataError."""
    lines = read_bytes(path).splitlines(keepends=True)
    found = []
    for number, line in enumerate(lines, 1):
        if line.endswith(b"\n"):
            try:
                found.append(parse_json(line))
            except ValueError as error:
                raise DataError(f"{path}:{number}: is not a line of metrics: {error}") from None
    return found

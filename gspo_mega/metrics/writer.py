"""Where metrics go: `metrics.jsonl`, one strict JSON object per line, and from there to the sinks.

`MetricsWriter` writes that file, which is the record of a run that everything else reads, and repairs it after a crash.
Only rank 0 writes. Names are checked against the catalogue; values are computed elsewhere. `sinks.py` passes the lines
on to TensorBoard and others. `progress_line` and `final_table` format metrics for people; they return text and print
nothing.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gspo_mega.base import atomic_io
from gspo_mega.base.errors import DataError, FolderError
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.base.untrusted import parse_json, read_bytes
from gspo_mega.metrics.catalogue import find_metric
from gspo_mega.metrics.prometheus import PrometheusEndpoint
from gspo_mega.metrics.sinks import Sinks

NON_FINITE = "metrics/num_non_finite"
SINK_FAILURES = "metrics/num_sink_failures"

# The most bytes that a run reads of its own file. A report reads less.
_MOST_OWN_BYTES = 64 * 1024**3

_PROGRESS = (
    # label, metric, format
    ("loss", "sft/loss", "{:.4f}"),
    ("reward", "reward/mean", "{:.3f}"),
    ("accuracy", "eval/accuracy", "{:.3f}"),
    ("turns", "episode/turns_mean", "{:.1f}"),
    ("length", "response/length_mean", "{:.1f}"),
    ("truncated", "response/truncated_fraction", "{:.2f}"),
    ("constant", "groups/constant_fraction", "{:.2f}"),
    ("entropy", "policy/entropy", "{:.3f}"),
    ("clip", "policy/clip_fraction", "{:.3f}"),
    ("explained", "critic/explained_variance", "{:.3f}"),
    ("|grad|", "optimizer/grad_norm", "{:.3g}"),
    ("mismatch k3", "mismatch/k3", "{:.1e}"),
    ("tokens/s", "speed/tokens_per_second", "{:.0f}"),
)
_FAILURES = (
    ("retries", "rollout/num_retries"),
    ("servers given up", "rollout/num_servers_given_up"),
    ("reward failures", "rollout/num_reward_failures"),
    ("episode failures", "rollout/num_episode_failures"),
    ("held-out reward failures", "eval/num_reward_failures"),
    ("groups missing", "rollout/num_groups_missing"),
    ("skipped", "optimizer/num_skipped"),
    ("not finite", "metrics/num_non_finite"),
)
_PHASE_ORDER = ("rollout", "old_log_probs", "critic", "train", "publish", "eval", "checkpoint")

# The step whose weights the evaluation in a line measured, if it is not the line's own step.
MEASURED_STEP = "eval/measured_step"

# These are shown only above the given number. (The number of turns says nothing if episodes have one turn.)
_ABOVE = {"episode/turns_mean": 1.0}


class MetricsWriter:
    """Appends to `<run_folder>/metrics.jsonl` and wakes the sinks, which read it.

    A line is {"step": int, "time": unix seconds, "<metric>": number or null, ...}. It is on disk (fsync) when `write`
    returns. If a killed run left a half-written last line, it is cut off when the file is opened.
    """

    def __init__(
        self, run_folder: Path, sinks: Sinks | None = None, endpoint: PrometheusEndpoint | None = None
    ) -> None:
        self.path = Path(run_folder) / "metrics.jsonl"
        self._sinks, self._endpoint = sinks, endpoint
        self._file: Any = None

    def resume_from(self, step: int) -> None:
        """Drop the lines of steps after `step` (-1: all lines), because a continued run writes them again. The file
        `metrics.superseded.jsonl` keeps them.

        Raises DataError for a line that this class did not write, RuntimeError after the first `write`.
        """
        if self._file is not None:
            raise RuntimeError("resume_from must come before the first write")
        if not self.path.exists():
            if self._sinks is not None:
                self._sinks.keep_lines(0)
            return
        kept, dropped = [], []
        for line in self._whole_lines():
            (kept if self._step_of(line) <= step else dropped).append(line)
        replacement = self.path.with_suffix(".jsonl.new")
        with self._folder_errors():
            self._keep_aside(b"".join(line for _, line in dropped))
            with replacement.open("wb") as file:
                file.writelines(line for _, line in kept)
                file.flush()
                os.fsync(file.fileno())
            os.replace(replacement, self.path)
            atomic_io.sync(self.path.parent)  # otherwise a power cut could bring the old file back
        if self._sinks is not None:
            self._sinks.keep_lines(len(kept))

    def _keep_aside(self, lines: bytes) -> None:
        """Append `lines` to the superseded ones, unless a start that was killed after this has done so already."""
        path = RunFolder(self.path.parent).superseded_metrics_file
        before = read_bytes(path, _MOST_OWN_BYTES) if path.exists() else b""
        if lines and not before.endswith(lines):
            atomic_io.write_whole(path, before + lines)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line. NaN and infinite values become null, and `metrics/num_non_finite` counts them.

        Raises ValueError for a name that is not in the catalogue, and writes nothing then. Raises FolderError if the
        disk refuses the line.
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
            # Close the file now, because a buffer that cannot be written would fail again at the end.
            with suppress(OSError):
                self._close_file()
            self._file = None
            raise FolderError(
                f"{self.path}: the metrics cannot be written: {error.strerror}; the same command continues the run"
            ) from error

    def close(self) -> None:
        """Close the file, and close the sinks once they have every line."""
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
        atomic_io.make_folder(self.path.parent)
        is_new = not self.path.exists()
        if not is_new:
            content = read_bytes(self.path, _MOST_OWN_BYTES)
            if content and not content.endswith(b"\n"):
                os.truncate(self.path, content.rfind(b"\n") + 1)
        self._file = self.path.open("ab")
        if is_new:
            atomic_io.sync(self.path.parent)

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
    """The lines of a `metrics.jsonl` in order, without a half-written last line. Raises DataError for a line that is
    not JSON.
    """
    lines = read_bytes(path).splitlines(keepends=True)
    found = []
    for number, line in enumerate(lines, 1):
        if line.endswith(b"\n"):
            try:
                found.append(parse_json(line))
            except ValueError as error:
                raise DataError(f"{path}:{number}: is not a line of metrics: {error}") from None
    return found


def progress_line(step: int, metrics: Mapping[str, float], num_steps: int | None = None) -> str:
    """One line for a step: its usual metrics, its time with the phases of at least 0.05 s, and its failures."""
    width = len(str(num_steps)) if num_steps is not None else 0
    parts = [f"step {step:>{width}}" + (f"/{num_steps}" if num_steps is not None else "")]
    for label, name, form in _PROGRESS:
        value = metrics.get(name)
        if name == "eval/accuracy" and MEASURED_STEP in metrics:
            label = f"accuracy of step {metrics[MEASURED_STEP]:.0f}"
        if value is not None and not value <= _ABOVE.get(name, -math.inf):
            parts.append(f"{label} {form.format(value) if math.isfinite(value) else value}")
    seconds = metrics.get("time/step_seconds")
    if seconds is not None:
        phases = [(phase, metrics.get(f"time/{phase}_seconds", 0.0)) for phase in _PHASE_ORDER]
        shown = " ".join(f"{phase} {value:.1f}" for phase, value in phases if value >= 0.05)
        parts.append(f"{seconds:.1f} s" + (f" ({shown})" if shown else ""))
    parts += [f"{label}: {metrics[name]:g}" for label, name in _FAILURES if metrics.get(name)]
    return "  ".join(parts)


def final_table(rows: Sequence[Sequence[str]], headers: Sequence[str] = ()) -> str:
    """Text cells in aligned columns under `headers` if given. The first column is aligned left, the others right.

    Raises ValueError for rows of different width.
    """
    lines = [list(row) for row in ([headers] if headers else []) + list(rows)]
    if len({len(line) for line in lines}) > 1:
        raise ValueError(f"rows of different width: {sorted({len(line) for line in lines})}")
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    text = [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    if headers:
        text.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(text)

"""`gspo-mega status RUN --watch`: the same report again and again, as a screen on a terminal, else as plain lines.

Reads the run's folder alone. Ends with the run's last attempt, or with Ctrl-C, and changes nothing of the run.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from gspo_mega.base.guarded_files import open_regular, parse_json
from gspo_mega.base.printable import printable
from gspo_mega.base.run_folder import Attempt, DamagedFileError, RunFolder, read_json
from gspo_mega.launcher.attempt_state import SILENCE_SECONDS, read_state
from gspo_mega.launcher.restarts import starts_again
from gspo_mega.metrics.console import progress_line

_TAIL_BYTES = 256 * 1024
_MOST_STEPS = 12
_MOST_LINES = 8
# Columns of the table of steps: heading, metric, format.
_COLUMNS = (
    ("reward", "reward/mean", "{:.3f}"),
    ("accuracy", "eval/accuracy", "{:.3f}"),
    ("loss", "sft/loss", "{:.4f}"),
    ("length", "response/length_mean", "{:.1f}"),
    ("entropy", "policy/entropy", "{:.3f}"),
    ("clip", "policy/clip_fraction", "{:.3f}"),
    ("|grad|", "optimizer/grad_norm", "{:.3g}"),
    ("mismatch", "mismatch/budget_share", "{:.2f}"),
    ("tokens/s", "speed/tokens_per_second", "{:.0f}"),
    ("seconds", "time/step_seconds", "{:.1f}"),
)
Describe = Callable[[RunFolder, float], list[tuple[str, str]]]


def watch(folder: RunFolder, describe: Describe, interval: float, output: TextIO | None = None) -> int:
    """Show `describe`'s (name, text) pairs every `interval` seconds. `output`: standard output by default. Raises what
    `describe` raises for a folder that is not a run's.
    """
    # rich draws with escapes: it gets the terminal itself, and the texts are made printable here.
    console = Console(file=output or getattr(sys.stdout, "foreign", sys.stdout))
    try:
        if console.is_terminal:
            _on_terminal(folder, describe, interval, console)
        else:
            for line in _plain_lines(folder, describe, interval):
                print(printable(line), file=output or sys.stdout, flush=True)
    except KeyboardInterrupt:
        pass  # the way to end it
    return 0


def _on_terminal(folder: RunFolder, describe: Describe, interval: float, console: Console) -> None:
    with Live(screen_of(folder, describe), console=console, auto_refresh=False, transient=False) as live:
        while not _is_over(folder):
            time.sleep(interval)
            live.update(screen_of(folder, describe), refresh=True)
        live.update(screen_of(folder, describe), refresh=True)


def _plain_lines(folder: RunFolder, describe: Describe, interval: float) -> Iterator[str]:
    """The report once, a line per step as it comes, and the state again at the end."""
    yield from (f"{name:<11}{text}" for name, text in describe(folder, time.time()))
    lines = last_lines(folder)
    shown = lines[-1]["step"] if lines else 0
    while True:
        is_over = _is_over(folder)  # before the last look at the lines
        for line in last_lines(folder):
            if line["step"] > shown:
                shown = line["step"]
                yield progress_line(shown, _numbers(line))
        if is_over:
            break
        time.sleep(interval)
    yield from (f"{name:<11}{text}" for name, text in describe(folder, time.time()) if name in ("state", "error"))


def screen_of(folder: RunFolder, describe: Describe) -> RenderableType:
    """What a terminal shows at a moment."""
    report = Table.grid(padding=(0, 2))
    for name, text in describe(folder, time.time()):
        # Text: nothing in a run's words is markup.
        report.add_row(Text(name, style="bold"), Text(printable(text), style="red" if name == "error" else ""))
    parts: list[RenderableType] = [report]
    attempt = folder.latest_attempt()
    if attempt is not None and (ranks := ranks_at_work(attempt)):
        report.add_row(Text("ranks", style="bold"), Text(printable(ranks)))
    if lines := last_lines(folder)[-_MOST_STEPS:]:
        parts.append(_steps(lines))
    if attempt is not None and (tail := _console_tail(attempt)):
        parts.append(
            Panel(
                Text(printable("\n".join(tail)), overflow="ellipsis", no_wrap=True), title="console", title_align="left"
            )
        )
    parts.append(Text(f"{time.strftime('%H:%M:%S')}   Ctrl-C ends this view, not the run", style="dim"))
    return Group(*parts)


def _steps(lines: list[dict[str, Any]]) -> Table:
    columns = [column for column in _COLUMNS if any(line.get(column[1]) is not None for line in lines)]
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for heading in ("step", *(heading for heading, _, _ in columns)):
        table.add_column(heading, justify="right")
    for line in lines:
        values = (line.get(metric) for _, metric, _ in columns)
        table.add_row(
            printable(str(line["step"])),
            *("" if value is None else form.format(value) for value, (_, _, form) in zip(values, columns, strict=True)),
        )
    return table


def ranks_at_work(attempt: Attempt) -> str:
    """The number of ranks in each phase, from their signs of life; empty where there are none."""
    records = []
    for path in attempt.beats_dir.glob("rank_*"):
        try:
            records.append(read_json(path))
        except (OSError, ValueError):
            continue  # it is being written: the next look reads it
    phases = Counter(str(record["phase"]) for record in records if isinstance(record, dict) and "phase" in record)
    return ", ".join(f"{count} in {phase}" for phase, count in phases.most_common())


def last_lines(folder: RunFolder) -> list[dict[str, Any]]:
    """The whole lines at the end of metrics.jsonl."""
    try:
        with open_regular(folder.metrics_file) as file:
            start = max(0, folder.metrics_file.stat().st_size - _TAIL_BYTES)
            file.seek(start)
            lines = file.read().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    # The first may be the rest of a line.
    try:
        found = [parse_json(line) for line in lines[1 if start else 0 :] if line.endswith(b"\n")]
    except ValueError as error:
        raise DamagedFileError(f"{folder.metrics_file}: a line at its end is not one of metrics: {error}") from None
    return [line for line in found if isinstance(line, dict) and type(line.get("step")) is int]


def _console_tail(attempt: Attempt) -> list[str]:
    try:
        with open_regular(attempt.console_log) as file:
            file.seek(max(0, attempt.console_log.stat().st_size - _TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return []
    return [line for line in text.splitlines() if line.strip()][-_MOST_LINES:]


def _numbers(line: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in line.items() if value is not None}


def _is_over(folder: RunFolder) -> bool:
    """Whether the run ended with its newest attempt, or the supervisor is silent. A job that is queued again goes on,
    and so does a run whose supervisor begins another attempt.
    """
    attempt = folder.latest_attempt()
    state = None if attempt is None else read_state(attempt)
    if attempt is None or state is None or state.state == "requeued":
        return False
    now = time.time()
    if state.state == "failed" and starts_again(attempt):
        return now - state.heartbeat > SILENCE_SECONDS
    return state.is_over or state.is_silent(now)

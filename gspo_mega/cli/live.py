"""A run's lines in a terminal: short lines that fit its width, in colour, above a line of progress that is kept up to
date.

`run_screen` chooses: a terminal gets `LiveScreen`, a file or a pipe the whole lines of `Screen`, which are in the
attempt's console.log in any case. NO_COLOR and TERM=dumb are respected.
"""

from __future__ import annotations

import io
import os
import queue
import re
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import TextIO

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from gspo_mega.base.untrusted import printable
from gspo_mega.cli.screen import Screen

_REFRESH_SECONDS = 1.0
_FEWEST_COLUMNS = 40
_BAR = 24
_CLEAR = "\r\x1b[K"
# A line of `metrics.writer.progress_line`: the step, then parts that two spaces part.
_STEP = re.compile(r"step +(\d+)(?:/(\d+))?  ")
# What a line leaves out first where the terminal is narrow.
_EXPENDABLE = ("tokens/s", "entropy", "constant", "truncated", "turns", "explained", "length", "clip", "|grad|")
_STYLES = {"notice": "yellow", "warning": "yellow", "error": "bold red", "held-out accuracy": "bold"}


def run_screen(stream: TextIO | None = None) -> Screen:
    """The screen of a command that runs something. `stream`: standard output by default."""
    stream = sys.stdout if stream is None else stream
    if stream is None or not _is_terminal(stream) or Console(file=stream).is_dumb_terminal:
        return Screen(stream)
    if _columns(stream) < _FEWEST_COLUMNS:
        return Screen(stream)
    return LiveScreen(stream)


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except ValueError:  # it is closed
        return False


class LiveScreen(Screen):
    """As `Screen`, for a terminal. The line of progress is redrawn every second by the screen's thread."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds."""
        super().__init__(stream)
        self._terminal, self._clock = stream, clock
        self._began = self._last_line = self._last_step = clock()
        self._first_step: tuple[int, float] | None = None
        self._step, self._num_steps = 0, 0
        self._durations: deque[float] = deque(maxlen=10)
        self._is_over = False

    def _show_all(self) -> None:
        while True:
            try:
                line = self._lines.get(timeout=_REFRESH_SECONDS)
            except queue.Empty:
                if not self._is_over:
                    self._write(_CLEAR + self._progress())
                continue
            if line is None:
                break
            self._write(_CLEAR + self._styled(line) + "\n" + ("" if self._is_over else self._progress()))
        self._write(_CLEAR)

    def _styled(self, line: str) -> str:
        """One or more lines of the run as they are shown."""
        now, columns = self._clock(), _columns(self._terminal)
        step = _STEP.match(line)
        if step is not None:
            self._take_step(int(step[1]), int(step[2] or 0), now)
            shown = short_step(line, columns)
        else:
            shown = Text(printable(line), next((style for word, style in _STYLES.items() if line.startswith(word)), ""))
            seconds = now - self._last_line
            # What the start waited for: each of its lines ends with the seconds since the line before.
            if self._first_step is None and seconds >= 1 and "\n" not in line and shown.cell_len + 10 < columns:
                shown.append(f"  +{seconds:.0f} s", "dim")
        self._last_line = now
        return self._rendered(shown)

    def _take_step(self, step: int, num_steps: int, now: float) -> None:
        if self._first_step is not None and step > self._step:
            self._durations.append((now - self._last_step) / (step - self._step))
        self._first_step = self._first_step or (step, now)
        self._step, self._num_steps, self._last_step = step, num_steps, now
        self._is_over = 0 < num_steps <= step

    def _progress(self) -> str:
        """The last line: how far the run is, and when it will end at the pace of the last ten steps."""
        now = self._clock()
        if self._first_step is None or not self._num_steps:
            what = "starting" if self._first_step is None else f"step {self._step}"
            return self._rendered(Text(f"{what}  {_duration(now - self._began)}", "dim"), cut=True)
        filled = _BAR * self._step // self._num_steps
        parts = [f"{self._step}/{self._num_steps}", f"{100 * self._step // self._num_steps}%"]
        if self._durations:
            pace = statistics.median(self._durations)
            left = max(0.0, (self._num_steps - self._step) * pace - (now - self._last_step))
            parts += [f"{_duration(left)} left", f"{pace:.1f} s/step"]
        done, rest = ("#" * filled, "green"), ("." * (_BAR - filled), "dim")
        text = Text.assemble(done, rest, "  ", "  ".join([*parts, f"{_duration(now - self._began)} since the start"]))
        return self._rendered(text, cut=True)

    def _rendered(self, text: Text, cut: bool = False) -> str:
        """The text with the terminal's escapes. `cut`: to less than its width, so that the line never wraps."""
        columns = _columns(self._terminal)
        if cut:
            text.truncate(columns - 1)
        out = io.StringIO()
        # Lines longer than the terminal is wide are left to it: so they stay whole when it is resized or copied from.
        console = Console(file=out, force_terminal=True, width=max(columns, text.cell_len + 1), highlight=False)
        console.print(text, end="", soft_wrap=True)
        return out.getvalue()


def short_step(line: str, columns: int) -> Text:
    """The line of a step in at most `columns` cells: without the phases, and without what is least asked for."""
    step, *parts = printable(line).split("  ")
    parts = [re.sub(r"^([0-9.]+ s) \(.*\)$", r"\1", part) for part in parts]
    for word in _EXPENDABLE:
        if cell_len("  ".join([step, *parts])) < columns:
            break
        parts = [part for part in parts if not part.startswith(f"{word} ")]
    text = Text(set_cell_size(step, min(cell_len(step), columns - 1)), "bold")
    for part in parts:
        if text.cell_len + 2 + cell_len(part) >= columns:
            break
        failed = re.match(r"[^:]+: [0-9]", part) is not None
        style = "red" if failed else "green" if part.startswith(("reward ", "accuracy ")) else ""
        text.append("  ").append(part, style)
    return text


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _columns(stream: TextIO | None) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns if stream is not None else 0
    except (OSError, ValueError):
        return 0

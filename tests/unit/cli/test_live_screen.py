"""What a terminal shows of a run: read back through a pseudo-terminal by a small terminal of our own."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import termios
import threading
import time

import pytest

from gspo_mega.cli.live import LiveScreen, run_screen, short_step
from gspo_mega.cli.screen import Screen

STEP = (
    "step {0:>2}/20  reward 0.125  accuracy 0.250  length 22.7  truncated 0.75  constant 0.50  entropy 0.762  clip 0.188"
    "  |grad| 0.128  mismatch k3 2.8e-11  tokens/s 74  18.6 s (rollout 4.4 old_log_probs 2.6 train 5.4)"
)


class Terminal:
    """A pseudo-terminal of some width. `lines` are what stands on it, the last one that of progress."""

    def __init__(self, columns):
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        self.stream = os.fdopen(slave, "w", encoding="utf-8")
        self.got = b""
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        while True:
            try:
                data = os.read(self.master, 65536)
            except OSError:
                return
            self.got += data

    def lines(self):
        shown = [""]
        plain = re.sub(r"\x1b\[[0-9;]*m", "", self.got.decode()).replace("\r\n", "\n")
        for piece in re.split(r"(\r\x1b\[K|\n)", plain):
            if piece == "\n":
                shown.append("")
            elif piece == "\r\x1b[K":
                shown[-1] = ""
            else:
                shown[-1] += piece
        return shown


@pytest.fixture
def terminal():
    made = []

    def make(columns):
        made.append(Terminal(columns))
        return made[-1]

    yield make
    for one in made:
        one.stream.close()  # ends the reader; another terminal may get the number of a closed descriptor
        one.reader.join()
        os.close(one.master)


@pytest.fixture(autouse=True)
def usual_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)


def settled(terminal, wanted, seconds=10.0):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if wanted(terminal.lines()):
            return terminal.lines()
        time.sleep(0.02)
    raise AssertionError(terminal.lines())


def shows(text, lines):
    """Whether the line of progress is there, whole, and has the text."""
    return text in lines[-1] and lines[-1].endswith(" since the start")


def test_steps_stand_above_a_line_of_progress(terminal):
    seen, now = terminal(100), [0.0]
    with LiveScreen(seen.stream, lambda: now[0]) as say:
        say("data     train.jsonl: 512 prompts")
        settled(seen, lambda lines: lines[:1] == ["data     train.jsonl: 512 prompts"] and "starting" in lines[-1])
        for step in range(1, 4):
            now[0] = 30.0 * step
            say(STEP.format(step))
            lines = settled(seen, lambda lines, step=step: shows(f"{step}/20", lines))
        progress = "  3/20  15%  8 min 30 s left  30.0 s/step  1 min 30 s since the start"
        assert lines[-1] == "###....................." + progress
        now[0] = 100.0
        settled(seen, lambda lines: shows("8 min 20 s left", lines))
    assert len(lines) == 5
    for line in lines[1:4]:
        assert len(line) < 100 and line.startswith("step ") and "reward 0.125  accuracy 0.250" in line
        assert "18.6 s" in line and "rollout" not in line and "mismatch k3 2.8e-11" in line
    settled(seen, lambda lines: lines[-1] == "")  # nothing of the line of progress is left
    assert b"\x1b[" in seen.got and b"\x1b[32m" in seen.got


def test_after_the_last_step_only_lines(terminal):
    seen = terminal(100)
    with LiveScreen(seen.stream) as say:
        for step in (19, 20):
            say(STEP.format(step))
        say("held-out accuracy after  0.5")
        time.sleep(1.3)  # longer than until the line of progress would be drawn again
        settled(seen, lambda lines: lines[-2:] == ["held-out accuracy after  0.5", ""])


def test_what_the_start_waited_for(terminal):
    seen, now = terminal(80), [0.0]
    with LiveScreen(seen.stream, lambda: now[0]) as say:
        say("run      runs/a")
        settled(seen, lambda lines: lines[0] == "run      runs/a")
        now[0] = 12.0
        say("held out heldout.jsonl")
        settled(seen, lambda lines: lines[1] == "held out heldout.jsonl  +12 s")


@pytest.mark.parametrize("columns", [40, 60, 80, 120, 200])
def test_a_step_fits_and_keeps_what_counts(columns):
    line = STEP.format(7) + "  reward failures: 3"
    shown = short_step(line, columns)
    assert shown.cell_len < columns and shown.plain.startswith("step  7/20  reward 0.125")
    if columns >= 100:
        assert "reward failures: 3" in shown.plain
    assert ("entropy" in shown.plain) == (columns == 200)


def test_hostile_text_does_not_act(terminal):
    seen = terminal(80)
    with LiveScreen(seen.stream) as say:
        say("notice   \x1b[2J\x07[bold]x[/bold]")
        say("step 1/2  reward \x1b[31m0.5  1.0 s")
        settled(seen, lambda lines: shows("1/2", lines))
    assert b"\x1b[2J" not in seen.got and b"\x07" not in seen.got and b"[bold]x[/bold]" in seen.got


def test_a_file_a_dumb_and_a_narrow_terminal_have_whole_lines(terminal, monkeypatch):
    assert type(run_screen(io.StringIO())) is Screen and type(run_screen(terminal(30).stream)) is Screen
    assert type(run_screen(terminal(80).stream)) is LiveScreen
    monkeypatch.setenv("TERM", "dumb")
    assert type(run_screen(terminal(80).stream)) is Screen


def test_without_colours(terminal, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    seen = terminal(80)
    with LiveScreen(seen.stream) as say:
        say(STEP.format(1))
        settled(seen, lambda lines: shows("1/20", lines))
    assert not re.search(rb"\x1b\[[0-9;]*3[0-9]", seen.got)


def test_a_terminal_that_is_gone_holds_nothing_up():
    master, slave = pty.openpty()
    stream = os.fdopen(slave, "w")
    os.close(master)
    with LiveScreen(stream) as say:
        for step in range(1, 20):
            say(STEP.format(step))
    stream.close()

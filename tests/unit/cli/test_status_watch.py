"""`gspo-mega status --watch`: a screen on a terminal, lines elsewhere, until the run ends."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
import threading
from time import sleep

from rich.console import Console
from waiting import until

from gspo_mega.base.errors import RankError
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.cli import status
from gspo_mega.cli.status import screen_of, watch
from gspo_mega.launcher.attempt_state import StateKeeper
from gspo_mega.launcher.restarts import Furthest, Restarts


def line(step, **more):
    return json.dumps({"step": step, "time": 0.0, "reward/mean": step / 10, "time/step_seconds": 2.0, **more}) + "\n"


def made(tmp_path):
    folder = RunFolder(tmp_path / "run")
    attempt = folder.new_attempt()
    attempt.beats_dir.mkdir()
    for rank, phase in enumerate(("rollout", "wait", "wait")):
        attempt.beat_file(rank).write_text(json.dumps({"tick": 1, "phase": phase, "count": 3}))
    folder.metrics_file.write_text("".join(line(step) for step in range(1, 21)) + '{"step": 21, "rew')
    attempt.console_log.write_text("old\n" * 20 + "step 20 [red]is no markup[/red]\n")
    return folder, attempt


def test_the_screen_has_state_ranks_steps_and_log(tmp_path):
    folder, attempt = made(tmp_path)
    with StateKeeper(attempt):
        console = Console(file=io.StringIO(), width=100)
        console.print(screen_of(folder))
    text = console.file.getvalue()
    shown = [row.split() for row in text.splitlines()]
    assert ["ranks", "2", "in", "wait,", "1", "in", "rollout"] in shown
    assert ["step", "reward", "seconds"] in shown, "no column without a value"
    assert ["20", "2.000", "2.0"] in shown and ["9", "0.900", "2.0"] in shown and ["8", "0.800", "2.0"] not in shown
    assert "step 20 [red]is no markup[/red]" in text and "running for" in text


def test_plain_lines_where_it_is_no_terminal(tmp_path):
    folder, attempt = made(tmp_path)
    output = io.StringIO()
    with StateKeeper(attempt) as state:
        seen = threading.Thread(target=watch, args=(folder, 0.01, output))
        seen.start()
        until(lambda: "logs" in output.getvalue())
        folder.metrics_file.write_text("".join(line(step) for step in range(1, 23)))
        until(lambda: "step 22" in output.getvalue())
        state.tell("finished")
        seen.join(60)
    shown = output.getvalue().splitlines()
    assert shown[0] == f"run        {folder.path}"
    steps = [row for row in shown if row.startswith("step 2")]
    assert steps == ["step 21  reward 2.100  2.0 s", "step 22  reward 2.200  2.0 s"], "each new step once"
    assert shown[-1].startswith("state      finished")


def test_a_failed_attempt_after_which_another_begins_is_not_the_end(tmp_path, monkeypatch):
    folder, attempt = made(tmp_path)
    output = io.StringIO()
    looks = []
    monkeypatch.setattr(status.time, "sleep", lambda seconds: looks.append(seconds) or sleep(0.01))
    with StateKeeper(attempt) as state:
        restarts = Restarts(1, Furthest())
        decision = restarts.decide_and_record(attempt, RankError("rank 1 was killed"))
        assert decision.again
        state.tell("failed", error="rank 1 was killed")
    seen = threading.Thread(target=watch, args=(folder, 0.01, output))
    seen.start()
    until(lambda: len(looks) > 3)
    assert "failed 0 s ago; another attempt begins" in output.getvalue()
    with StateKeeper(folder.new_attempt()) as state:
        state.tell("finished")
    seen.join(60)
    assert not seen.is_alive() and output.getvalue().splitlines()[-2].startswith("state      finished")


def test_a_supervisor_that_dies_between_two_attempts_ends_the_view(tmp_path, monkeypatch):
    folder, attempt = made(tmp_path)
    monkeypatch.setattr(status, "SILENCE_SECONDS", -1.0)
    with StateKeeper(attempt) as state:
        Restarts(1, Furthest()).decide_and_record(attempt, RankError("rank 1 was killed"))
        state.tell("failed", error="rank 1 was killed")
    assert watch(folder, 0.01, io.StringIO()) == 0


def test_a_real_terminal_gets_a_screen_and_the_command_ends_with_the_run(tmp_path):
    folder, attempt = made(tmp_path)
    with StateKeeper(attempt) as state:
        state.tell("failed", error="rank 0 failed")
    parent, child = pty.openpty()
    shown = subprocess.Popen(
        [sys.executable, "-m", "gspo_mega", "status", str(folder.path), "--watch"],
        stdout=child,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "50"},
    )
    os.close(child)
    text = b""
    try:
        while part := os.read(parent, 65536):
            text += part
    except OSError:  # the terminal's other end is closed
        pass
    os.close(parent)
    assert shown.wait(60) == 0
    assert b"\x1b[" in text and b"rank 0 failed (attempt 1)" in text and b"Ctrl-C ends this view" in text

"""Ranks that are stuck or die: who it was and where, and what becomes of the run. Real ranks for the one, stand-ins for
the other.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launcher_runs import Launched, write_config

from gspo_mega.checkpoint import memory_files
from gspo_mega.cli.status import shown_pairs

KEEP = "import sys; open(sys.argv[1], 'a').write(sys.stdin.read())"
WORKER = Path(__file__).with_name("launcher_worker.py")


@pytest.fixture
def start(tmp_path):
    """start(behaviours, work, **sections) launches a run of 2 ranks and 1 server; at the end of the test nothing may be
    left of it.
    """
    launched = []

    def launch(behaviours, work=None, **sections):
        write_config(tmp_path, **sections)
        launched.append(Launched(tmp_path, behaviours, 60.0, work))
        return launched[-1]

    yield launch
    for run in launched:
        run.leaves_nothing()


def status(run) -> dict:
    shown = subprocess.run(
        [sys.executable, "-m", "gspo_mega", "status", str(run.folder.path), "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(shown.stdout)


def test_a_rank_that_is_busy_with_nothing_is_named_with_its_line(start, tmp_path):
    kept = tmp_path / "alerts"
    command = [sys.executable, "-c", KEEP, str(kept)]
    bounds = {"train_seconds": 2.0, "silence_seconds": 120.0}
    run = start({}, "spin_while_others_wait", watchdog=bounds, alerts={"command": command})
    code, out, err = run.finish()
    assert code == 7
    (alert,) = map(json.loads, kept.read_text().splitlines())
    assert (alert["cause"], alert["attempt"], alert["restarts"]) == ("stall", 1, False) and "rank 1" in alert["text"]
    assert f"alert    stall: {sys.executable} exited with code 0\n" in out
    found = re.match(
        r"rank 1 \(process \d+ on \S+\) is stuck: nothing got done for \d+ s in phase train \(watchdog.train_seconds\);"
        r" it is at (\S+):(\d+) in spin\n",
        err,
    )
    assert found, err
    assert Path(found[1]) == WORKER and WORKER.read_text().splitlines()[int(found[2]) - 1].strip() in (
        "while time.monotonic() < until:",
        "pass",
    )
    assert "rank 0 waits for it" in err and "in spin_while_others_wait" in err
    # And at that moment all ranks wrote their stacks, the waiting one too.
    told = re.search(r"\nstacks of all 2 ranks: (\S+)", err)
    assert told, err
    assert "in spin\n" in (Path(told[1]) / "rank_1.txt").read_text()
    assert "in all_reduce\n" in (Path(told[1]) / "rank_0.txt").read_text()
    assert run.left_running() == []


def test_a_stopped_rank_is_named(start):
    run = start({}, "stop_while_others_wait", watchdog={"silence_seconds": 10.0})
    code, _, err = run.finish()
    assert code == 7
    assert re.match(
        r"rank 1 \(process \d+ on \S+\) is stuck: no sign of life for \d+ s \(watchdog.silence_seconds\); its process"
        r" stopped \(T\), in phase train\n",
        err,
    ), err
    assert "\nstacks of 1 of 2 ranks: " in err and "; no answer from rank 1" in err
    assert run.left_running() == []


def test_slow_work_in_which_things_get_done_is_left_alone(start):
    code, _, err = start({}, "slow_but_steady", watchdog={"train_seconds": 3.0, "silence_seconds": 120.0}).finish()
    assert (code, err) == (0, "")


def test_a_failed_run_is_started_again_and_says_so(start, tmp_path):
    command = [sys.executable, "-c", KEEP, str(tmp_path / "alerts")]
    run = start({"rank 0": "finish", "rank 1": "killed_twice"}, alerts={"command": command})
    code, out, err = run.finish()
    assert (code, err) == (0, "")
    assert [attempt.number for attempt in run.folder.attempts()] == [1, 2, 3]
    assert out.count("rank 1 was killed by SIGKILL") == 2
    assert "started again from the checkpoint of step 2 (restart 2 of 3, train.max_restarts)" in out
    shown = status(run)
    assert (shown["state"], shown["num_restarts"]) == ("finished", 2)
    assert shown["last_restart"]["why"].startswith("started again from the checkpoint of step 2")
    assert "rank 1 was killed by SIGKILL" in shown["last_restart"]["cause"] and shown["last_restart"]["again"] is True
    said = dict(shown_pairs(run.folder, time.time()))["restarts"]
    assert said.startswith("2 in 24 h; last: started again from the checkpoint of step 2")
    assert run.folder.num_restarts() == 2
    for attempt in run.folder.attempts()[:2]:  # who finds it failed finds the decision on it
        assert attempt.restart_file.stat().st_mtime_ns <= attempt.state_file.stat().st_mtime_ns
    alerts = [json.loads(line) for line in (tmp_path / "alerts").read_text().splitlines()]
    assert [(alert["cause"], alert["attempt"], alert["restarts"]) for alert in alerts] == [
        ("failure", 1, True),
        ("failure", 2, True),
    ]
    assert run.left_running() == []


def test_not_again_from_where_it_failed_before(start):
    run = start({"rank 0": "finish", "rank 1": "killed_at_the_same_place"})
    code, _, err = run.finish()
    assert code == 7 and err.startswith("rank 1 was killed by SIGKILL")
    assert len(run.folder.attempts()) == 2
    assert "the run came no further than the start before" in status(run)["last_restart"]["why"]
    assert "\nfailed   no automatic restart: the run came no further" in err
    assert "To continue: gspo-mega train " in err.splitlines()[-1]


def test_not_more_often_than_allowed(start, tmp_path):
    copies = memory_files.copies_folder(tmp_path / "runs/demo")
    memory_files.make_folder(copies)
    sections = {"train": {"max_restarts": 1}, "checkpoint": {"peer_copies": 1}}
    run = start({"rank 0": "finish", "rank 1": "killed_further_each_time"}, **sections)
    code, out, _ = run.finish()
    assert code == 7 and "started again from the ranks' copies in memory, or else from " in out
    assert not copies.exists(), "what ranks left in memory goes with the run"
    assert len(run.folder.attempts()) == 2
    assert "1 restarts in 24 h (train.max_restarts)" in status(run)["last_restart"]["why"]


def test_whoever_asks_for_a_stop_is_not_answered_with_a_restart(start):
    run = start({"rank 0": "hang", "rank 1": "save_then_die_of_a_stop"})
    run.wait_started()
    run.process.send_signal(signal.SIGTERM)
    code, _, err = run.finish()
    assert code == 7 and err.startswith("rank 1 was killed")
    assert len(run.folder.attempts()) == 1

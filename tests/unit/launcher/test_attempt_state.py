"""What a supervisor says of its run, and `gspo-mega status` of the folder."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest

from gspo_mega.base.errors import ConfigError
from gspo_mega.base.run_folder import RunFolder, atomic_write_json, atomic_write_text
from gspo_mega.cli.main import main
from gspo_mega.cli.status import describe_run, shown_pairs
from gspo_mega.launcher import attempt_state as state_module
from gspo_mega.launcher.attempt_state import StateKeeper, closing_line, read_state
from gspo_mega.rollout.registration import Registration
from gspo_mega.rollout.server.reward_server import make_reward_folder


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path / "run")


def test_a_run_that_ends_says_how(folder):
    attempt = folder.new_attempt()
    assert read_state(attempt) is None
    with StateKeeper(attempt, slurm_job="12") as state:
        assert read_state(attempt).state == "running"
        state.tell("stopping", note="USR1")
        state.tell("requeued")
    end = read_state(attempt)
    assert (end.state, end.note, end.slurm_job, end.is_over) == ("requeued", "USR1", "12", True)
    with pytest.raises(RuntimeError), StateKeeper(attempt):
        raise RuntimeError("rank 1 failed")
    assert (read_state(attempt).state, read_state(attempt).error) == ("failed", "rank 1 failed")


def test_a_stopped_attempt_closes_with_one_line(folder):
    attempt = folder.new_attempt()
    atomic_write_text(attempt.command_file, "train\n")
    atomic_write_json(attempt.result_file, {"stopped": "SIGINT", "step": 0, "to_measure": []})
    again = f"To continue: gspo-mega train {folder.path}"
    nothing = f"no checkpoint yet; what was sampled is in {folder.path} and is not sampled again"
    assert closing_line(attempt) == f"Stopped in order after step 0 (SIGINT). Saved: {nothing}. {again}"

    atomic_write_json(attempt.result_file, {"stopped": "SIGTERM", "step": 6, "to_measure": [4, 6]})
    folder.latest_checkpoint_file.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_text(folder.latest_checkpoint_file, "step_00000006\n")
    saved = f"Saved: checkpoint step_00000006 in {folder.path}. {again}"
    assert closing_line(attempt) == (
        f"Stopped in order after step 6 (SIGTERM). {saved}, which first measures the weights of step 4, 6"
    )
    attempt.result_file.unlink()
    assert closing_line(attempt, "Ended at once") == f"Ended at once. {saved}"

    atomic_write_text(attempt.command_file, "eval\n")
    assert closing_line(attempt) == "Stopped in order. Nothing is saved; the same command begins again."


def test_it_beats_while_it_runs_and_is_missed_when_it_does_not(folder, monkeypatch):
    monkeypatch.setattr(state_module, "HEARTBEAT_SECONDS", 0.02)
    attempt = folder.new_attempt()
    with StateKeeper(attempt):
        first = read_state(attempt).heartbeat
        deadline = time.monotonic() + 20
        while read_state(attempt).heartbeat == first:
            assert time.monotonic() < deadline
        now = read_state(attempt).heartbeat
        assert not read_state(attempt).is_silent(now + 59) and read_state(attempt).is_silent(now + 61)
        assert describe_run(folder, now + 300)["state"].startswith(
            "lost: no sign of life from its supervisor for 5 min"
        )


def test_status_of_a_run(folder):
    first, second = folder.new_attempt(), folder.new_attempt()
    for rank, when, text in ((0, 9.0, "echo"), (3, 8.0, "Traceback\nValueError: the cause")):
        atomic_write_json(first.error_file(rank), {"rank": rank, "text": text, "type": "E", "time": when})
    with StateKeeper(second, slurm_job="7") as state:
        lines = [
            {"step": 1},
            {"step": 2, "reward/mean": 0.25, "speed/tokens_per_second": 812.4, "time/step_seconds": 3.04},
        ]
        folder.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "rew')
        report = describe_run(folder, read_state(second).started)
        assert report["state"].startswith("running for 0 s")
        assert report["attempt"].startswith("2, job 7, on ")
        assert report["step"].startswith("2, reward 0.250, ")
        assert report["speed"] == "812 tokens/s, 3.0 s per step"
        assert report["error"] == "ValueError: the cause (attempt 1)"
        assert report["logs"] == str(second.logs_dir)
        state.tell("finished")
    assert describe_run(folder, read_state(second).heartbeat)["state"].startswith("finished 0 s ago")


def test_status_names_the_servers_that_were_given_up(folder):
    attempt = folder.new_attempt()
    assert describe_run(folder, time.time())["servers"] is None
    for index, (state, error) in enumerate(
        [
            ("ready", None),
            ("ready", "SGLang was killed"),
            ("failed", "SGLang exited with code 1\nand its log"),
            ("restarting", "x"),
        ]
    ):
        Registration(f"server-{index}", "", 1, state, 1, None, time.time(), error=error).write(attempt.servers_dir)
    assert (
        describe_run(folder, time.time())["servers"]
        == "1 given up, 2 ready, 1 restarting (server-2: SGLang exited with code 1)"
    )
    (attempt.servers_dir / "server-9.json").write_text("{}")
    assert "server-9.json: not a server's registration" in describe_run(folder, time.time())["servers"]


def test_status_says_which_start_a_server_is_in_and_why_the_last_one_failed(folder):
    attempt = folder.new_attempt()
    failure = {"error": "X: no proxy\nlog", "num_failures": 1, "failed_starts": 1, "most_starts": 6}
    one = Registration("server-0", "", 1, "starting", 2, None, time.time(), **failure)
    one.write(attempt.servers_dir)
    retry = "attempt 2 of 6; last failure: X: no proxy"
    assert describe_run(folder, time.time())["servers"] == f"1 starting ({retry})"
    replace(one, server_id="server-1", state="ready").write(attempt.servers_dir)
    assert describe_run(folder, time.time())["servers"] == f"1 ready, 1 starting (server-0: {retry})"


def test_status_names_the_servers_of_reward_models(folder):
    attempt = folder.new_attempt()
    assert describe_run(folder, time.time())["reward_models"] is None
    make_reward_folder(attempt, "style")
    for name, index, state in (("sums", 0, "ready"), ("sums", 1, "failed")):
        one = Registration(f"server-{index}", "", 1, state, 1, None, time.time(), error="it crashed too often\nlog")
        one.write(make_reward_folder(attempt, name).servers_dir)
    told = describe_run(folder, time.time())["reward_models"]
    assert told == "style: none has begun; sums: 1 given up, 1 ready (server-1: it crashed too often)"
    assert ("rewards", told) in shown_pairs(folder, time.time())


def test_status_before_the_job_started_and_of_no_run(folder):
    folder.path.mkdir()
    with pytest.raises(ConfigError, match="is not a run folder"):
        describe_run(folder, 0.0)
    (folder.path / "slurm-12.log").touch()
    assert describe_run(folder, 0.0)["state"].startswith("no attempt yet")


def test_status_for_programs_has_numbers_names_and_times(folder, capsys):
    """Nothing that has to be read out of a sentence, and the whole of an error with its cause."""
    first, second = folder.new_attempt(), folder.new_attempt()
    text = "rank 0: 4 of 4 scorings failed, and reward.max_failed_fraction is 0.1. The first:\n  s000: KeyError: 'x'"
    atomic_write_json(first.error_file(0), {"rank": 0, "text": text.removeprefix("rank 0: "), "type": "E", "time": 8.0})
    line = {"step": 2, "time": 5.0, "reward/mean": 0.25, "speed/tokens_per_second": 812.4, "time/step_seconds": 3.04}
    folder.metrics_file.write_text(json.dumps(line) + "\n")
    with StateKeeper(second, slurm_job="7"):
        assert main(["status", str(folder.path), "--json"]) == 0
        said = json.loads(capsys.readouterr().out)
        state = read_state(second)
    assert said | {"time": 0, "last_sign_of_life_time": 0} == {
        "run": str(folder.path),
        "time": 0,
        "state": "running",
        "note": None,
        "another_attempt_begins": False,
        "attempt": 2,
        "slurm_job": "7",
        "host": state.host,
        "started_time": state.started,
        "last_sign_of_life_time": 0,
        "ended_time": None,
        "step": 2,
        "step_time": 5.0,
        "reward_mean": 0.25,
        "accuracy": None,
        "tokens_per_second": 812.4,
        "step_seconds": 3.04,
        "servers": {"by_state": {}, "errors": {}, "preparing": None, "problem": None},
        "reward_models": {},
        "checkpoint": None,
        "checkpoint_step": None,
        "error": {
            "attempt": 1,
            "summary": f"{text.splitlines()[0]} s000: KeyError: 'x'",
            "text": text,
        },
        "num_restarts": 0,
        "last_restart": None,
        "logs": str(second.logs_dir),
    }
    assert "4 of 4 scorings failed" in dict(shown_pairs(folder, 9.0))["error"]

"""Alerts: what is told, to whom, how often; a call that hangs holds nothing up."""

from __future__ import annotations

import http.server
import json
import random
import sys
import threading
import time

import pytest

from gspo_mega.base.errors import ConfigError, RankError, StuckError
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.config import load_config
from gspo_mega.launcher.alerts import AlertSender
from gspo_mega.launcher.inputs import check_users_functions

KEEP = "import sys; open(sys.argv[1], 'a').write(sys.stdin.read())"


class Run:
    """An attempt of a run whose metrics the test writes, with alerts that a command keeps."""

    def __init__(self, tmp_path, *overrides, command=None):
        self.folder, self.kept, self.said = RunFolder(tmp_path / "run"), tmp_path / "kept", []
        command = command or [sys.executable, "-c", KEEP, str(self.kept)]
        config = load_config(
            "configs/quickstart.yaml", [f"alerts.command={json.dumps(command)}", "run.name=demo", *overrides]
        ).config
        self.alerts = AlertSender(config, self.folder.new_attempt(), self.said.append, poll_seconds=1000.0)
        self.alerts.check_metrics()

    def write(self, steps, **metrics):
        with self.folder.metrics_file.open("a") as file:
            for step in steps:
                values = {name.replace("__", "/"): value for name, value in metrics.items()}
                values = {name: value(step) if callable(value) else value for name, value in values.items()}
                file.write(json.dumps({"step": step, "time": 0.0, **values}) + "\n")
        self.alerts.check_metrics()

    def told(self):
        self.alerts.close()
        return [json.loads(line) for line in self.kept.read_text().splitlines()] if self.kept.exists() else []


def test_a_failure_is_told_with_what_follows_from_it(tmp_path):
    run = Run(tmp_path)
    run.write([1, 2], reward__mean=0.5)
    run.alerts.failed(RankError("rank 0 failed:\n\nTraceback"), restarts=True, why="started again from step 1")
    run.alerts.failed(RankError("again"), restarts=False)
    (body,) = run.told()
    assert body.pop("time") == pytest.approx(time.time(), abs=100)
    assert body == {
        "cause": "failure",
        "text": "rank 0 failed",
        "name": "demo",
        "run": str(run.folder.path),
        "attempt": 1,
        "step": 2,
        "restarts": True,
        "decision": "started again from step 1",
    }
    assert run.said == [f"alert    failure: {sys.executable} exited with code 0"]


def test_stuck_ranks_are_a_stall_also_behind_another_error(tmp_path):
    run = Run(tmp_path)
    error = RankError("error: rank 1 is stuck (logs: x)")
    error.__cause__ = StuckError("rank 1 is stuck")
    run.alerts.failed(error, restarts=False)
    assert [body["cause"] for body in run.told()] == ["stall"]


def test_a_collapse_and_a_passed_budget_are_told_once(tmp_path):
    run = Run(tmp_path, "old_log_probs=rollout")
    run.write(range(1, 31), reward__mean=lambda step: step / 30, mismatch__budget_share=0.1)
    assert run.alerts._calls == []
    run.write(range(31, 61), reward__mean=lambda step: 0.02 * (step % 2), mismatch__budget_share=0.7)
    run.write(range(61, 70), reward__mean=0.0, mismatch__budget_share=0.7)
    told = {body["cause"]: body["text"] for body in run.told()}
    assert len(run.kept.read_text().splitlines()) == 2
    assert told["budget"] == "the engines' log-probs differ by 0.70 of the clip range (mismatch.budget 0.5) in step 31"
    assert told["collapse"].startswith("reward/mean fell from 0.883 (step 30) to 0.01")
    assert told["collapse"].endswith("; the fall began at step 31")


def test_with_the_trainers_old_log_probs_only_a_mismatch_that_precisions_do_not_explain_is_told(tmp_path):
    """The mismatch is not in the ratio then, so the run's own line about it is a notice and not a warning."""
    run = Run(tmp_path)
    run.write(range(1, 4), mismatch__budget_share=3.0, mismatch__k3=6e-4)
    run.write([4], mismatch__budget_share=3.0)
    assert run.alerts._calls == []
    run.write([5, 6], mismatch__budget_share=9.0, mismatch__k3=0.03)
    (body,) = run.told()
    assert body["cause"] == "budget"
    assert body["text"] == (
        "the engines' log-probs differ by k3 0.03 nats per token, more than precisions explain, in step 5"
        " (old_log_probs: trainer keeps this out of the ratio)"
    )


@pytest.mark.parametrize("seed", range(3))
def test_a_run_in_which_nothing_happens_is_not_told_to_collapse(tmp_path, seed):
    """Two successes in a hundred, 64 responses: by chance alone the best mean of steps is far above the last one."""
    chance = random.Random(seed)
    run = Run(tmp_path)
    for step in range(150):
        run.write([step], reward__mean=sum(chance.random() < 0.02 for _ in range(64)) / 64)
    assert run.told() == []


def test_what_earlier_attempts_wrote_is_no_news(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.metrics_file.write_text('{"step": 1, "time": 0.0, "mismatch/budget_share": 0.9}\n')
    run = Run(tmp_path, "old_log_probs=rollout")
    run.write([2], mismatch__budget_share=0.1)
    assert run.told() == []


def test_what_is_not_asked_for_is_not_told(tmp_path):
    run = Run(tmp_path, "alerts.on=[collapse]", "old_log_probs=rollout")
    run.write([1], mismatch__budget_share=0.9)
    run.alerts.failed(RankError("x"), restarts=False)
    assert run.told() == [] and run.said == []


def test_no_line_for_long_is_a_stall(tmp_path):
    run = Run(tmp_path, "alerts.stall_seconds=0.001")
    run.write([1], reward__mean=0.5)
    time.sleep(0.002)
    run.alerts.check_metrics()
    (body,) = run.told()
    assert body["cause"] == "stall" and body["text"].endswith("(alerts.stall_seconds 0.001)")


def test_a_command_that_hangs_is_killed_with_its_children(tmp_path):
    script = "import subprocess; subprocess.run(['sleep', '1000'])"
    run = Run(tmp_path, "alerts.deadline_seconds=2", command=[sys.executable, "-c", script])
    started = time.monotonic()
    run.alerts.failed(RankError("x"), restarts=False)
    assert time.monotonic() - started < 1.8, "it is not waited for"
    assert run.told() == []
    assert run.said == [f"alert    failure: {sys.executable} was killed after 2 s (alerts.deadline_seconds)"]


@pytest.fixture
def hook():
    """(address, the bodies posted there)."""
    bodies = []

    class Hook(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hook)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/hook/token-of-ours", bodies
    server.shutdown()
    server.server_close()


def test_a_url_gets_the_same_and_its_path_is_not_shown(tmp_path, hook, monkeypatch):
    address, bodies = hook
    monkeypatch.setenv("GSPO_TEST_HOOK", address)
    run = Run(tmp_path, "alerts.url=$GSPO_TEST_HOOK")
    run.alerts.failed(RankError("x"), restarts=False)
    assert run.told() == bodies and bodies[0]["cause"] == "failure"
    assert run.said[1] == "alert    failure: 127.0.0.1 answered 204"


def test_an_address_that_cannot_be_reached_is_said(tmp_path, monkeypatch):
    monkeypatch.delenv("GSPO_TEST_HOOK", raising=False)
    run = Run(tmp_path, "alerts.url=http://127.0.0.1:9/token")
    run.alerts.failed(RankError("x"), restarts=False)
    run.told()
    assert run.said[1].startswith("alert    failure: 127.0.0.1 could not be reached: ")
    assert Run(tmp_path, "alerts.url=$GSPO_TEST_HOOK").said == [
        "warning  alerts.url: $GSPO_TEST_HOOK: the environment has no such variable; no alert will be sent there"
    ]


def test_a_program_that_is_not_there_is_refused_before_a_run(tmp_path):
    loaded = load_config("configs/quickstart.yaml", ["alerts.command=[no-such-program, now]"])
    with pytest.raises(ConfigError, match=r"alerts.command: there is no program 'no-such-program' here; give a path"):
        check_users_functions(loaded)

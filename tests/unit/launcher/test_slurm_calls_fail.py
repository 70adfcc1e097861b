"""Every call of Slurm's programs that a job makes fails once, in turn, and what becomes of the job is the same."""

from __future__ import annotations

import os
import sys
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from failing_calls import FailingCalls

from gspo_mega.base.errors import FolderError, RankError
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.config import load_config
from gspo_mega.launcher.attempt_state import read_state
from gspo_mega.launcher.slurm import job, scontrol, steps, stop
from gspo_mega.rollout.registration import read_registrations

REPOSITORY = Path(__file__).parents[3]
SCONTROL = """#!/bin/sh
cd "$JOB" && echo "$*" >> calls
case "$*" in
  "show job"*) cat job ;;
  "show hostnames"*) echo "$3" | tr , '\\n' ;;
  "show node"*) for name in $(echo "$4" | tr , ' '); do echo "NodeName=$name NodeAddr=127.0.0.1"; done ;;
  "show config"*) echo "SlurmdTimeout = 1 sec" ;;
  "requeue"*) kill -TERM "$SUPERVISOR" ;;
esac
"""
# Ranks do what the file of their attempt says; a server registers and serves until it is told to end, or gives up.
SRUN = """#!/bin/sh
attempt=$(ls -d "$JOB"/runs/run/attempts/0* | tail -n 1)
case "$*" in
  *" doctor "*)
    echo "n: ok    python 3"
    index=${*##*--index }; index=${index%% *}; role=${*##*--role }; role=${role%% *}
    mkdir -p "$attempt/software"
    [ ! -e "$JOB/$role" ] || cp "$JOB/$role" "$attempt/software/machine-$index-$role.json" ;;
  *train.worker*)
    touch "$attempt/logs/rank_0.log"
    . "$JOB/ranks.$(basename "$attempt")" ;;
  *" serve "*)
    index=${*##*--index }; index=${index%% *}
    entry='"server_id": "server-'$index'", "address": "http://n:1", "pid": 1, "generation": 1, "weight_version": 0, "heartbeat": 1.0'
    if [ -e "$JOB/give_up.$index" ]; then
      echo "{$entry, \\"state\\": \\"failed\\", \\"error\\": \\"it crashed too often\\"}" > "$attempt/servers/server-$index.json"
      echo "crashed"; touch "$JOB/gave_up"
      exit 7
    fi
    echo "{$entry, \\"state\\": \\"ready\\"}" > "$attempt/servers/server-$index.json"
    touch "$attempt/serving.$index"
    if [ -e "$JOB/leave.$index" ]; then
      echo "{$entry, \\"state\\": \\"stopped\\"}" > "$attempt/servers/server-$index.json"
      exit 0
    fi
    exec sleep 600 ;;
  *batch_node_watch.py*) exec sleep 600 ;;
esac
"""
SERVED = 'until ls "$attempt"/serving.* >/dev/null 2>&1; do sleep 0.02; done; '
STEP = 'mkdir -p "$JOB/runs/run/checkpoints"; printf step_0000000%d {} > "$JOB/runs/run/checkpoints/latest"; '
FAIL = 'echo "srun: error: n2: task 1: Killed" >&2; exit 137\n'
LOSE = 'sed -i s/n1,n2,n3/n1,n3/ "$JOB/job"; exit 1\n'
STOPPED = 'until [ -e "$attempt/stop" ]; do sleep 0.02; done; exit 75\n'


class Slurm:
    """A job of two trainer nodes and a rollout node, in which the n-th call of Slurm's programs fails."""

    def __init__(self, folder: Path, fail: int) -> None:
        self.folder = folder
        programs = folder / "bin"
        programs.mkdir()
        for name, text in {"scontrol": SCONTROL, "srun": SRUN}.items():
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        self.calls = FailingCalls(folder, programs)
        self.calls.fail(fail)
        self.run_folder = RunFolder(folder / "runs/run")
        self.said: list[str] = []
        end = (datetime.now() + timedelta(seconds=3600)).isoformat(timespec="seconds")
        (folder / "job").write_text(f"JobId=7 JobState=RUNNING TimeLimit=01:10:00 EndTime={end} NodeList=n1,n2,n3\n")

    def ranks(self, attempt: int, what: str) -> None:
        (self.folder / f"ranks.{attempt:04d}").write_text(what)

    def run(self, *overrides: str) -> int:
        cluster = "cluster={num_nodes: 2, ranks_per_node: 1, num_rollout_nodes: 1}"
        shape = f"model.path={REPOSITORY / 'configs/models/quickstart_moe.json'}"
        words = [shape, cluster, f"run.dir={self.folder / 'runs'}", "run.name=run", *overrides]
        return job.launch_slurm(
            load_config(REPOSITORY / "configs/quickstart.yaml", words, "train"), "train", self.said.append
        )

    @property
    def outcome(self) -> tuple[list[str], int]:
        """States of the attempts, and how often the job was queued again."""
        calls = (self.folder / "calls").read_text()
        return [read_state(attempt).state for attempt in self.run_folder.attempts()], calls.count("requeue 7")


@pytest.fixture
def slurm(tmp_path_factory, monkeypatch):
    """slurm(n): a new job."""
    for module, name, seconds in (
        (scontrol, "ASK_AGAIN_SECONDS", 0.05),
        (steps, "ASK_AGAIN_SECONDS", 0.05),
        (job, "_POLL_SECONDS", 0.02),
        (job, "_SETTLE_SECONDS", 0.02),
        (job, "_ASK_SECONDS", 0.1),
        (job, "_WATCH_AGAIN_SECONDS", 0.05),
        (stop, "_ENDED_PAUSE_SECONDS", 0.05),
        (stop, "_POLL_SECONDS", 0.02),
        (steps, "_POLL_SECONDS", 0.02),
        (job, "versions_text", lambda: ""),
    ):
        monkeypatch.setattr(module, name, seconds)

    def make(fail: int) -> Slurm:
        made = Slurm(tmp_path_factory.mktemp("job"), fail)
        variables = {
            "PATH": made.calls.path,
            "JOB": str(made.folder),
            "SUPERVISOR": str(os.getpid()),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "n1,n2,n3",
            "GSPO_SERVER_PYTHON": sys.executable,
            "GSPO_GPUS_PER_NODE": "0",
            "GSPO_PREFLIGHT": "1",
            "GSPO_SIGNAL_SECONDS": "100",
        }
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return made

    yield make


def every_call(slurm, scenario, expected) -> None:
    """`scenario` runs a job; then once more for each call that it made, which fails there."""
    path = os.environ["PATH"]
    number = last = 0
    while number <= last:
        os.environ["PATH"] = path
        made = slurm(number)
        scenario(made)
        calls = made.calls.calls
        # How often Slurm is asked depends on the time that all takes: a number may never come.
        failed = calls[number - 1] if 0 < number <= len(calls) else None
        what = f"{number}: {failed}\n" + "\n".join(made.said)
        assert made.outcome == expected, what
        last = len(calls) if number == 0 else last
        assert (
            failed is None
            or any("does not answer" in line or "could not start" in line for line in made.said)
            or _is_quiet(failed)
        ), what
        number += 1
    assert last > 10


def _is_quiet(call: str) -> bool:
    """A probe is made twice, and a watch that ended is started again, without a word."""
    return call.endswith(" true") or "batch_node_watch.py" in call


def test_a_rank_fails_then_a_node(slurm):
    """Doctors, a failed rank, a second attempt on the same nodes, a lost trainer node, queued again."""

    def scenario(made):
        made.ranks(1, SERVED + STEP.format(1) + FAIL)
        made.ranks(2, SERVED + STEP.format(2) + LOSE)
        assert made.run() == 75, made.said

    every_call(slurm, scenario, (["failed", "requeued"], 1))


def test_a_server_gives_up_then_the_time_limit_is_near(slurm, monkeypatch):
    monkeypatch.setattr(job, "_ASK_SECONDS", 30.0)

    def scenario(made):
        monkeypatch.setenv("GSPO_PREFLIGHT", "0")
        (made.folder / "give_up.1").touch()
        left = 'until grep -q failed "$attempt"/servers/server-1.json 2>/dev/null; do sleep 0.02; done; sleep 0.3; '
        made.ranks(1, SERVED + left + 'kill -USR1 "$SUPERVISOR"; ' + STOPPED)
        assert made.run("server.num_servers=2", "publish.verify=replicas") == 75, made.said
        assert [(r.server_id, r.state) for r in read_registrations(made.run_folder.latest_attempt().servers_dir)][
            1
        ] == ("server-1", "failed")
        assert any(
            line.startswith("warning  server-1 gave up: it crashed too often") and line.endswith("; 1 servers are left")
            for line in made.said
        ), made.said

    every_call(slurm, scenario, (["requeued"], 1))


def test_servers_whose_nccl_is_another_end_the_job_before_a_rank_starts(slurm, monkeypatch):
    made = slurm(0)
    monkeypatch.setenv("GSPO_GPUS_PER_NODE", "8")
    (made.folder / "trainer").write_text('{"torch": "2.14.1", "NCCL": "2.30.7"}')
    (made.folder / "server").write_text('{"torch": "2.14.1", "NCCL": "2.28.9"}')
    with pytest.raises(RankError, match="the servers' Python does not fit the trainer's"):
        made.run("publish.method=distributed")
    (line,) = [line for line in made.said if "NCCL is 2.30.7" in line]
    assert line.startswith("doctor   wrong pythons") and "and 2.28.9 in the servers'" in line
    assert "train.worker" not in "\n".join(made.calls.calls)


def test_the_last_server_that_gives_up_fails_the_attempt(slurm, monkeypatch):
    monkeypatch.setenv("GSPO_PREFLIGHT", "0")
    made = slurm(0)
    (made.folder / "give_up.0").touch()
    made.ranks(1, "exec sleep 600\n")
    with pytest.raises(RankError, match="error: server 0 gave up: it crashed too often"):
        made.run()
    assert made.outcome == (["failed"], 0)
    assert any("no automatic restart: the run came no further than the start before" in line for line in made.said), (
        made.said
    )


@pytest.mark.parametrize("num_servers", [1, 2])
def test_a_server_that_leaves_in_order_is_no_failure_and_the_run_goes_on(slurm, monkeypatch, num_servers):
    """Also the last one: another may have joined, and the ranks know."""
    monkeypatch.setenv("GSPO_PREFLIGHT", "0")
    made = slurm(0)
    for index in range(num_servers):
        (made.folder / f"leave.{index}").touch()
    made.ranks(1, SERVED + "sleep 1; exit 0\n")
    assert made.run(f"server.num_servers={num_servers}", "publish.verify=replicas") == 0, made.said
    assert made.outcome == (["finished"], 0)
    said = [line for line in made.said if "has left, as it was asked to" in line]
    assert len(said) == num_servers and said[-1].endswith("; 0 servers are left"), made.said
    found = read_registrations(made.run_folder.latest_attempt().servers_dir)
    assert [r.state for r in found] == ["stopped"] * num_servers


def test_restarts_are_bounded_and_there_is_none_without_progress(slurm, monkeypatch):
    """Two of them, of which each came further; the third failure ends the job with the first error as the last line."""
    made = slurm(0)
    for attempt in (1, 2, 3):
        made.ranks(attempt, STEP.format(attempt) + FAIL)
    with pytest.raises(RankError, match="rank 1 on n2 ended without an error report: Killed"):
        made.run("train.max_restarts=2")
    assert made.outcome == (["failed"] * 3, 0)
    assert any(
        "attempt 3 failed: no automatic restart: 2 restarts in 24 h (train.max_restarts)" in line for line in made.said
    ), made.said
    # Who finds an attempt failed finds the decision on it.
    for attempt in made.run_folder.attempts():
        assert attempt.restart_file.stat().st_mtime_ns <= attempt.state_file.stat().st_mtime_ns
    made = slurm(0)
    made.ranks(1, STEP.format(1) + FAIL)
    made.ranks(2, FAIL)
    with pytest.raises(RankError, match="rank 1 on n2 ended"):
        made.run()
    assert made.outcome == (["failed"] * 2, 0)


def test_a_rank_that_hangs_is_noticed_and_another_attempt_begins(slurm):
    """Its beats are in the run's shared folder, whichever node it is on."""
    made = slurm(0)
    beat = '{"phase": "train", "count": 1, "tick": %d, "pid": 1, "host": "n2"}'
    beats = (
        f"for tick in 1 2 3; do for rank in 0 1; do printf '{beat}' $tick > \"$attempt/beats/rank_$rank\"; sleep 0.05;"
        " done; done; "
    )
    made.ranks(1, 'mkdir -p "$attempt/beats"; ' + beats + STEP.format(1) + "exec sleep 600\n")
    made.ranks(2, "exit 0\n")
    assert made.run("watchdog.silence_seconds=0.5") == 0, made.said
    assert made.outcome == (["failed", "finished"], 0)
    assert "is stuck: no sign of life for" in read_state(made.run_folder.attempts()[0]).error
    assert any(
        "attempt 1 failed: started again from the checkpoint of step 1 (restart 1 of 3" in line for line in made.said
    ), made.said


def test_a_run_folder_that_another_supervisor_took_ends_the_job(slurm):
    """As where a node was given up by Slurm, its job queued again, and it came back."""
    made = slurm(0)
    made.ranks(1, 'cd "$JOB/runs/run/lease" && for number in *; do :; done; cp $number 00000099; exec sleep 600\n')
    with pytest.raises(FolderError):
        made.run()
    assert made.outcome == (["failed"], 0)


def test_what_was_asked_to_stop_is_not_started_again(slurm):
    made = slurm(0)
    made.ranks(1, STEP.format(1) + 'touch "$attempt/stop"; ' + FAIL)
    with pytest.raises(RankError, match="rank 1 on n2 ended"):
        made.run()
    assert made.outcome == (["failed"], 0)


def test_a_second_attempt_has_no_server_on_a_lost_node(slurm, monkeypatch):
    made = slurm(0)
    made.ranks(1, SERVED + STEP.format(1) + 'sed -i s/n1,n2,n3,n4/n1,n2,n3/ "$JOB/job"; sleep 0.4; ' + FAIL)
    made.ranks(2, STEP.format(2) + "exit 0\n")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1,n2,n3,n4")
    (made.folder / "job").write_text((made.folder / "job").read_text().replace("n1,n2,n3", "n1,n2,n3,n4"))
    lost = 'case "$*" in *" serve "*"--index 1 "*) until ! grep -q n4 "$JOB/job"; do sleep 0.02; done; exit 1;; esac\n'
    (made.folder / "bin/srun").write_text(SRUN.replace("case", lost + "case", 1))
    words = ("cluster.num_rollout_nodes=2", "server.num_servers=2", "publish.verify=replicas")
    assert made.run(*words) == 0, made.said
    assert made.outcome == (["failed", "finished"], 0)
    assert any("node n4 is lost, and server-1 with it; 1 servers are left" in line for line in made.said), made.said
    first = read_registrations(made.run_folder.attempts()[0].servers_dir)
    assert ("server-1", "failed", "node n4 is lost") in [(r.server_id, r.state, r.error) for r in first], (
        "ranks that start would wait for it"
    )
    second = load_config(made.run_folder.latest_attempt().config_file).config
    assert (second.server.num_servers, second.cluster.num_rollout_nodes) == (1, 1)
    assert not [
        path.name for path in made.run_folder.latest_attempt().path.glob("serving.*") if path.name != "serving.0"
    ]


def test_a_step_that_srun_always_refuses_is_told_soon(slurm):
    made = slurm(0)
    made.ranks(1, "exit 0\n")
    refuse = (
        'case "$*" in *train.worker*) echo "srun: unrecognized option \'--container-image=x\'" >&2; exit 1;; esac\n'
    )
    (made.folder / "bin/srun").write_text(SRUN.replace("case", refuse + "case", 1))
    with pytest.raises(RankError, match="error: ranks 0 exited with code 1"):
        made.run()
    assert (
        sum("srun could not start ranks 0; trying again: srun: unrecognized option" in line for line in made.said) == 2
    ), made.said

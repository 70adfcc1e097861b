"""The supervisor of a job beside a `scontrol` and an `srun` that answer from files: what it makes of silence, signals
and ends.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from gspo_mega.base.errors import RankError
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.config import load_config
from gspo_mega.launcher.attempt_state import StateKeeper, read_state
from gspo_mega.launcher.children import collect_signals
from gspo_mega.launcher.slurm import scontrol
from gspo_mega.launcher.slurm.job import JobContext, SlurmJob
from gspo_mega.launcher.slurm.scontrol import Allocation, Answers, NoAnswerError, SlurmNode
from gspo_mega.launcher.slurm.size import Site, job_size
from gspo_mega.launcher.slurm.steps import AttemptSteps
from gspo_mega.launcher.slurm.stop import SIGNALS

CONFIG = Path(__file__).parents[3] / "configs/quickstart.yaml"

SCONTROL = """#!/bin/sh
cd "$(dirname "$0")" && echo "$*" >> calls
if [ -e down ]; then echo "Unable to contact slurm controller" >&2; exit 1; fi
case "$*" in
  "show job"*) cat job ;;
  "show hostnames"*) echo "$3" | tr , '\\n' ;;
  "requeue"*) kill -TERM "$SUPERVISOR" ;;
  "show config") echo "SlurmdTimeout = 0 sec" ;;
esac
"""

# Ranks that end with 75 when asked to, after what `$RANKS` has them do; all else waits for its end.
SRUN = """#!/bin/sh
case "$*" in
  *train.worker*)
    eval "$RANKS"
    until ls "$ATTEMPT/stop" 2>/dev/null; do sleep 0.05; done
    exit 75 ;;
  *--reward-model*) eval "$SCORERS"; exec sleep 600 ;;
  *) exec sleep 600 ;;
esac
"""
MODELS = ["reward.model=[{name: sums, path: m, num_servers: 2}]", "reward.functions=[{function: sums}]"]

USR1 = 'kill -USR1 "$SUPERVISOR"'


class Here:
    """A job of two nodes; `said`: what is in its log."""

    def __init__(self, folder: Path) -> None:
        self.programs = folder / "bin"
        self.programs.mkdir()
        self.program("scontrol", SCONTROL)
        self.program("srun", SRUN)
        (self.programs / "calls").touch()
        self.run_folder = RunFolder(folder / "run")
        self.said: list[str] = []
        self.show()

    def program(self, name: str, text: str) -> None:
        (self.programs / name).write_text(text)
        (self.programs / name).chmod(0o755)

    def show(self, nodes: str = "n1,n2", seconds: int = 200, state: str = "RUNNING") -> None:
        """What Slurm says of the job from now on."""
        end = (datetime.now() + timedelta(seconds=seconds)).isoformat(timespec="seconds")
        (self.programs / "job").write_text(
            f"JobId=7 JobState={state} TimeLimit=00:10:00 EndTime={end} NodeList={nodes}\n"
        )

    def slurm(self, answers: bool) -> None:
        down = self.programs / "down"
        if answers:
            down.unlink()
        else:
            down.touch()

    @property
    def requeues(self) -> int:
        return (self.programs / "calls").read_text().count("requeue ")

    def job(
        self,
        state: StateKeeper,
        attempt,
        signal_seconds: float = 100,
        seconds_left: float | None = None,
        job_id: str = "7",
        overrides: Sequence[str] = (),
    ) -> SlurmJob:
        nodes = (SlurmNode("n1", "10.0.0.1"), SlurmNode("n2", "10.0.0.2"))
        site = Site.read({"GSPO_GPUS_PER_NODE": "8", "GSPO_SERVER_PYTHON": sys.executable})
        allocation = Allocation(job_id, 0, nodes, nodes)
        size = job_size(load_config(CONFIG, ["cluster.num_nodes=2", "publish.verify=replicas", *overrides]), site)
        context = JobContext(allocation, signal_seconds, self.said.append, Answers(self.said.append), 600)
        self.signals = context.signals
        return SlurmJob(attempt, context, AttemptSteps(allocation, size, site, attempt, 1), state, seconds_left)

    def run(self, ranks: str, job_id: str = "7", seconds_left: float | None = None) -> int:
        """An attempt whose ranks do that before they wait to be stopped."""
        attempt = self.run_folder.new_attempt()
        os.environ |= {"RANKS": ranks, "ATTEMPT": str(attempt.path), "SUPERVISOR": str(os.getpid())}
        with StateKeeper(attempt, job_id) as state:
            job = self.job(state, attempt, job_id=job_id, seconds_left=seconds_left)
            with collect_signals(SIGNALS, self.signals):
                return job.run("train", [0], 14_000, [])

    def run_with_scorers(self, ranks: str, scorers: str, indices: Sequence[int] = (0, 1)) -> int:
        """An attempt with servers of a reward model, one on each node, that do that before they wait for their end."""
        attempt = self.run_folder.new_attempt()
        os.environ |= {"RANKS": ranks, "SCORERS": scorers, "ATTEMPT": str(attempt.path)}
        with StateKeeper(attempt, "7") as state:
            job = self.job(state, attempt, overrides=MODELS)
            os.environ["SUPERVISOR"] = str(os.getpid())
            with collect_signals(SIGNALS, self.signals):
                return job.run("train", [0], 14_000, [], {"sums": indices})

    def look(self, job: SlurmJob) -> bool:
        job._next_question = 0
        return job.check_nodes()


@pytest.fixture
def here(tmp_path, monkeypatch):
    here = Here(tmp_path)
    monkeypatch.setenv("PATH", f"{here.programs}{os.pathsep}{os.environ['PATH']}")
    for name in ("RANKS", "SCORERS", "ATTEMPT", "SUPERVISOR"):
        monkeypatch.setenv(name, "")  # so that they go with the test
    return here


@pytest.mark.parametrize(("signal_seconds", "stops"), [(200, False), (300, True)])
def test_a_job_near_its_end_stops_without_a_signal(here, signal_seconds, stops):
    attempt = here.run_folder.new_attempt()
    with StateKeeper(attempt, "7") as state:
        here.look(here.job(state, attempt, signal_seconds))
    assert (attempt.stop_reason() is not None) == stops
    assert not stops or re.match(
        r"\d+ s are left and no signal arrived: stopping after a checkpoint, within 280 s", here.said[0]
    )


def test_a_run_goes_on_while_slurms_controller_is_restarted(here, monkeypatch):
    attempt = here.run_folder.new_attempt()
    with StateKeeper(attempt, "7") as state:
        job = here.job(state, attempt)
        here.slurm(answers=False)
        assert not here.look(job) and not here.look(job)
        (warning,) = here.said
        assert warning.startswith(
            "warning  Slurm does not answer; the run continues without it for 10 min (scontrol show job -o 7: Unable to"
            " contact"
        )
        here.slurm(answers=True)
        here.show("n1")
        assert here.look(job), "the lost node is not seen"
        assert here.said[1:] == ["Slurm answers again."]
        # Only silence in a row counts.
        here.slurm(answers=False)
        assert not here.look(job)
        monkeypatch.setattr(scontrol, "NO_ANSWER_SECONDS", 0.0)
        with pytest.raises(NoAnswerError, match="Unable to contact slurm controller"):
            here.look(job)


LOSE_NODE = 'sed -i s/n1,n2/n1/ "$(dirname "$(command -v srun)")/job"; exit 1'
CANCEL = 'sed -i s/RUNNING/CANCELLED/ "$(dirname "$(command -v srun)")/job"'
TERM_FIRST = 'kill -TERM "$SUPERVISOR"; until grep -q SIGTERM "$ATTEMPT/stop"; do sleep 0.05; done; '
USR1_FIRST = 'kill -USR1 "$SUPERVISOR"; until grep -q SIGUSR1 "$ATTEMPT/stop"; do sleep 0.05; done; '


@pytest.mark.parametrize(
    ("ranks", "again"),
    [
        (USR1, True),
        (USR1_FIRST + 'kill -TERM "$SUPERVISOR"; sleep 0.5', True),
        ('kill -TERM "$SUPERVISOR"', False),
        (TERM_FIRST + 'kill -USR1 "$SUPERVISOR"; sleep 0.5', False),
        ('touch "$ATTEMPT/stop"; kill -USR1 "$SUPERVISOR"; sleep 0.5', False),
        (LOSE_NODE, True),
        (TERM_FIRST + LOSE_NODE, False),
        ('touch "$ATTEMPT/stop"; ' + LOSE_NODE, False),
        (USR1_FIRST + CANCEL, False),
    ],
)
def test_what_asked_first_decides_whether_the_job_is_queued_again(here, ranks, again):
    assert here.run(ranks) == 75
    attempt = here.run_folder.latest_attempt()
    assert (here.requeues, read_state(attempt).state) == ((1, "requeued") if again else (0, "stopped")), here.said


def test_a_cancellation_just_before_the_job_is_queued_again(here, monkeypatch):
    attempt = here.run_folder.new_attempt()
    with StateKeeper(attempt, "7") as state:
        job = here.job(state, attempt)
        here.program("scontrol", SCONTROL.replace("cat job ;;", 'cat job; kill -TERM "$SUPERVISOR" ;;'))
        monkeypatch.setenv("SUPERVISOR", str(os.getpid()))
        with collect_signals([signal.SIGTERM], here.signals):
            assert not job.stop.still_runs()


def test_a_job_that_comes_to_its_time_limit_twice_without_a_step_is_not_queued_a_third_time(here):
    step = 'echo step > "$ATTEMPT/../../checkpoints/latest"; '
    here.run_folder.checkpoints_dir.mkdir(parents=True)
    short = 150  # the signal comes after 50 s, or as much as 60 s earlier
    assert here.run(USR1, seconds_left=short) == 75
    assert here.run(step + USR1, seconds_left=short) == 75
    assert here.run(USR1, seconds_left=short) == 75
    # Preempted, which is no word on the limit; without one; another job.
    assert (
        here.run(USR1, seconds_left=3600)
        == here.run(USR1)
        == here.run(USR1, seconds_left=short)
        == here.run(USR1, "8", short)
        == 75
    )
    assert here.requeues == 7
    with pytest.raises(
        RankError,
        match=(
            "^error: job 8 reached its time limit twice in a row without a new checkpoint; 50 s are too few for a start"
            r" and a step\. Raise --time of GSPO_SBATCH in launch/slurm/site.sh, or GSPO_SIGNAL_SECONDS"
        ),
    ):
        here.run(USR1, "8", short)
    assert here.requeues == 7 and read_state(here.run_folder.latest_attempt()).state == "failed"


FIRST_ENDS = 'case "$*" in *"--index 0 "*) echo crashed; exit 7 ;; esac'


def test_a_reward_model_whose_last_server_gives_up_ends_the_attempt(here):
    with pytest.raises(RankError, match=r"^error: reward server \d of sums exited with code 7 \(logs: "):
        here.run_with_scorers("", "echo crashed; exit 7")
    (warning,) = [line for line in here.said if line.startswith("warning")]
    assert re.match(r"warning  server-\d of reward model sums gave up: its step exited with code 7 ", warning)
    assert warning.endswith("; 1 servers of reward model sums are left") and here.requeues == 0


def test_a_reward_model_whose_nodes_are_lost_has_the_job_queued_again(here):
    assert here.run_with_scorers("", "", indices=[]) == 75
    assert here.requeues == 1
    said = "all servers of reward model sums are lost: stopping after a checkpoint"
    assert any(line.startswith(said) for line in here.said)


def test_the_others_of_a_reward_model_go_on(here):
    stops = 'until grep -qs failed "$ATTEMPT/reward_models/sums/servers/server-0.json"; do sleep 0.05; done; exit 0'
    assert here.run_with_scorers(stops, FIRST_ENDS) == 0
    assert read_state(here.run_folder.latest_attempt()).state == "finished"

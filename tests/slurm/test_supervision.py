"""What the supervisor of a job makes of signals, failures and lost nodes, on a real Slurm with stand-ins for ranks and servers."""

from __future__ import annotations

import re

import pytest

from gspo_mega.launcher.state import read_state
from gspo_mega.rollout.registration import read_registrations
from gspo_mega.run_folder import read_json

LONG = "train.num_steps=500"


def test_sbatch_itself_submits_a_job_of_the_right_size(submit_stand_ins):
    job = submit_stand_ins("train.num_steps=3", through_sbatch="yes")
    job.wait_for_line("Submitted batch job")
    job.follow()
    assert job.finish() == "COMPLETED", job.log
    assert job.steps() == [1, 2, 3] and "ranks on node" in job.log


@pytest.mark.parametrize("heterogeneous", [False, True])
def test_the_time_limit_is_near(submit_stand_ins, heterogeneous):
    job = submit_stand_ins("train.num_steps=25", GSPO_ROLLOUT_SBATCH="--exclusive --mem=16000 --time=30" if heterogeneous else "")
    job.wait_for_line("step 2/25")
    job.cluster.run("scancel", "--signal=USR1", "--batch", job.id)
    job.wait_for_line("queued again: SIGUSR1: the time limit is near")
    first = job.run.latest_attempt()
    assert read_state(first).state == "requeued"
    assert read_json(first.result_file) == {"stopped": "SIGUSR1: the time limit is near"}
    assert [registration.state for registration in read_registrations(first.servers_dir)] == ["stopped"], "not ended in order"
    job.wait_for_line("resumed from step_")
    assert job.finish() == "COMPLETED", job.log
    assert job.steps() == list(range(1, 26))
    assert read_state(job.run.latest_attempt()).state == "finished"


def test_a_limit_that_leaves_no_time_for_a_step_is_refused(submit_stand_ins):
    job = submit_stand_ins(LONG, GSPO_SBATCH="--exclusive --mem=16000 --time=1")
    assert job.finish() == "FAILED"
    assert re.match(rf"job {job.id} has \d+ s, and saves and stops 120 s before its end", job.log.rstrip().splitlines()[-1]), job.log


def test_ranks_and_servers_divide_the_gpus_of_their_nodes(submit_stand_ins):
    shared = ("cluster={num_nodes: 2, ranks_per_node: 2, num_rollout_nodes: 0}", "server={num_servers: 3, tensor: 2}", "publish.verify=replicas")
    job = submit_stand_ins("train.num_steps=3", *shared, GSPO_GPUS_PER_NODE="8")
    assert job.finish() == "COMPLETED", job.log
    attempt = job.run.latest_attempt()
    seen = {path.name.removeprefix("gpus_"): path.read_text() for path in attempt.path.glob("gpus_*")}
    ranks = dict.fromkeys(("rank_0", "rank_1", "rank_2", "rank_3"), "0,1")
    assert seen == {**ranks, "server_0": "2,3", "server_1": "2,3", "server_2": "4,5"}
    assert job.nodes("ranks") == job.nodes("servers") and len(job.nodes("ranks")) == 2


def test_a_run_on_recorded_rollouts_needs_no_servers(submit_stand_ins, tmp_path):
    journal = tmp_path / "recorded" / "journal"
    journal.mkdir(parents=True)
    for step in range(3):
        (journal / f"step_{step:08d}").touch()
    # Of the four nodes, five would be needed with those of the servers.
    job = submit_stand_ins("train.num_steps=3", f"train.from_rollouts={tmp_path / 'recorded'}", "cluster={num_nodes: 2, num_rollout_nodes: 3}", "server.num_servers=3")
    assert job.finish() == "COMPLETED", job.log
    assert len(job.nodes("ranks")) == 2 and ", no servers: it trains on recorded rollouts\n" in job.log
    assert not list(job.run.latest_attempt().path.glob("gpus_server_*"))


@pytest.mark.parametrize("together", [False, True])
def test_a_trainer_node_crashes(submit_stand_ins, together):
    size = ("cluster.num_rollout_nodes=0",) if together else ()
    job = submit_stand_ins(LONG, *size)
    job.wait_for_line("step 2/500")
    lost = job.nodes("ranks")[1]
    job.cluster.crash_node(lost)
    # The ranks that are left wait for the lost one and would for long.
    job.wait_for_line(f"queued again: lost node node{lost}")
    job.wait_for_line("resumed from step_")
    behind = max(job.steps())
    job.wait_for("it goes on", lambda: max(job.steps()) > behind)
    assert job.steps() == list(range(1, max(job.steps()) + 1))


def test_a_rollout_node_crashes_and_scancel_leaves_nothing(submit_stand_ins):
    job = submit_stand_ins(LONG, "server.num_servers=2", "cluster.num_rollout_nodes=2")
    job.wait_for_line("step 2/500")
    lost = job.nodes("servers")[1]
    job.cluster.crash_node(lost)
    job.wait_for_line(f"warning  node node{lost} is lost, and server-1 with it; 1 servers are left")
    attempt = job.run.latest_attempt()
    states = {registration.server_id: registration.state for registration in read_registrations(attempt.servers_dir)}
    assert states == {"server-0": "ready", "server-1": "stopped"}
    seen = max(job.steps())
    job.wait_for("training goes on", lambda: max(job.steps()) > seen + 2)
    assert len(job.cluster.processes()) > 5
    job.cluster.run("scancel", job.id)
    assert job.finish() == "CANCELLED"
    job.cluster.wait_gone()
    assert "Slurm ends this job." in job.log and "stopping after a checkpoint" not in job.log


@pytest.mark.parametrize(
    ("what", "last"),
    [("raise 1", "error: rank 1 failed: ValueError: of a test (logs: "), ("kill 1", "error: rank 1 on {node} ended without a word of its own: Killed")],
)
def test_the_first_error_of_any_rank_is_the_last_line(submit_stand_ins, what, last):
    job = submit_stand_ins(LONG, STAND_IN=what)
    assert job.finish() == "FAILED"
    last = last.format(node=f"node{job.nodes('ranks')[1]}")
    assert job.log.rstrip().splitlines()[-1].startswith(last), job.log
    state = read_state(job.run.latest_attempt())
    assert state.state == "failed" and state.error.startswith(last)


def test_something_is_wrong_on_a_node(submit_stand_ins):
    """The doctor runs in the ranks' own environment: here one whose Python is none."""
    job = submit_stand_ins(LONG, GSPO_PREFLIGHT="1")
    assert job.finish() == "FAILED"
    first, second = job.nodes("ranks")
    assert job.log.rstrip().splitlines()[-1].startswith(f"error: something is wrong on node{first}, node{second}"), job.log

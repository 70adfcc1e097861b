"""What the supervisor of a job makes of signals, failures and lost nodes, on a real Slurm with stand-ins for ranks and servers."""

from __future__ import annotations

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


def test_the_time_limit_is_near(submit_stand_ins):
    job = submit_stand_ins("train.num_steps=30")
    job.wait_for_line("step 2/30")
    job.cluster.run("scancel", "--signal=USR1", "--batch", job.id)
    job.wait_for_line("queued again: SIGUSR1: the time limit is near")
    first = job.run.latest_attempt()
    assert read_state(first).state == "requeued"
    assert read_json(first.result_file) == {"stopped": "SIGUSR1: the time limit is near"}
    assert [registration.state for registration in read_registrations(first.servers_dir)] == ["stopped"], "not ended in order"
    job.wait_for_line("resumed from step_")
    assert job.finish() == "COMPLETED", job.log
    assert job.steps() == list(range(1, 31))
    assert read_state(job.run.latest_attempt()).state == "finished"


def test_slurms_own_signal_ahead_of_the_limit(submit_stand_ins):
    # Slurm looks at limits once a minute and counts them in minutes: one minute, with the signal due at once.
    job = submit_stand_ins(LONG, GSPO_SBATCH="--exclusive --mem=16000 --time=1", GSPO_SIGNAL_SECONDS="59")
    job.wait_for_line("queued again: SIGUSR1: the time limit is near")
    assert job.steps()


@pytest.mark.parametrize("together", [False, True])
def test_a_trainer_node_crashes(submit_stand_ins, together):
    size = ("cluster.num_rollout_nodes=0",) if together else ()
    job = submit_stand_ins("train.num_steps=90", *size)
    job.wait_for_line("step 2/90")
    job.cluster.crash_node(2)
    # The ranks that are left wait for the lost one and would for long.
    job.wait_for_line("queued again: lost node node2")
    job.wait_for_line("resumed from step_")
    assert job.finish() == "COMPLETED", job.log
    assert job.steps() == list(range(1, 91))


def test_the_batch_node_crashes(submit_stand_ins):
    job = submit_stand_ins(LONG)
    job.wait_for_line("step 2/500")
    first = job.run.latest_attempt()
    job.cluster.crash_node(1)
    job.wait_for_line("resumed from step_")
    assert "node1, where the supervisor ran, is lost" in (first.logs_dir / "watch.log").read_text()
    assert read_state(first).state == "running", "nobody was left to say otherwise"


def test_rollout_nodes_crash_one_after_the_other(submit_stand_ins):
    job = submit_stand_ins(LONG, "server.num_servers=2", "cluster.num_rollout_nodes=2")
    job.wait_for_line("step 2/500")
    job.cluster.crash_node(4)
    job.wait_for_line("warning  node node4 is lost, and server-1 with it; 1 servers are left")
    attempt = job.run.latest_attempt()
    states = {registration.server_id: registration.state for registration in read_registrations(attempt.servers_dir)}
    assert states == {"server-0": "ready", "server-1": "stopped"}
    seen = max(job.steps())
    job.wait_for("training goes on", lambda: max(job.steps()) > seen + 2)
    job.cluster.crash_node(3)
    job.wait_for_line("queued again: all servers are lost")
    # Four nodes are needed: it waits for those that are gone.
    job.cluster.start_node(3)
    job.cluster.start_node(4)
    job.wait_for_line("resumed from step_")


def test_a_heterogeneous_job_is_queued_again_as_a_whole(submit_stand_ins):
    job = submit_stand_ins("train.num_steps=40", GSPO_ROLLOUT_SBATCH="--exclusive --mem=16000 --time=30")
    job.wait_for_line("step 2/40")
    job.cluster.run("scancel", "--signal=USR1", "--batch", job.id)
    job.wait_for_line("queued again: SIGUSR1")
    job.wait_for_line("resumed from step_")
    assert job.finish() == "COMPLETED", job.log
    assert job.steps() == list(range(1, 41))


@pytest.mark.parametrize(
    ("what", "last"),
    [("raise 1", "error: rank 1 failed: ValueError: of a test (logs: "), ("kill 1", "error: rank 1 on node2 ended without a word of its own: Killed")],
)
def test_the_first_error_of_any_rank_is_the_last_line(submit_stand_ins, what, last):
    job = submit_stand_ins(LONG, STAND_IN=what)
    assert job.finish() == "FAILED"
    assert job.log.rstrip().splitlines()[-1].startswith(last), job.log
    state = read_state(job.run.latest_attempt())
    assert state.state == "failed" and state.error.startswith(last)


def test_scancel_leaves_nothing(submit_stand_ins):
    job = submit_stand_ins(LONG)
    job.wait_for_line("step 2/500")
    assert len(job.cluster.processes()) > 5
    job.cluster.run("scancel", job.id)
    assert job.finish() == "CANCELLED"
    job.cluster.wait_gone()


def test_something_is_wrong_on_a_node(submit_stand_ins):
    """The doctor runs in the ranks' own environment: here one whose Python is none."""
    job = submit_stand_ins(LONG, GSPO_PREFLIGHT="1")
    assert job.finish() == "FAILED"
    assert job.log.rstrip().splitlines()[-1].startswith("error: something is wrong on node1, node2"), job.log

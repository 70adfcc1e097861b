"""Slower failures of a Slurm job, which tests/soak/slurm_nodes.sh runs: what Slurm has to notice by itself, and the batch node."""

from __future__ import annotations

from gspo_mega.launcher.state import read_state

LONG = ("train.num_steps=8", "checkpoint.every_steps=1", "rollout.max_concurrent_requests=1")


def test_the_batch_node_crashes_and_the_watch_has_the_job_queued_again(submit):
    job = submit(*LONG)
    job.wait_for_line("step 2/8")
    job.wait_for("its checkpoint", job.run.latest_checkpoint_file.exists)
    first = job.run.latest_attempt()
    job.cluster.crash_node(1)
    job.wait_for_line("resumed from step_")
    assert "node1, where the supervisor ran, is lost" in (first.logs_dir / "watch.log").read_text()
    assert read_state(first).state == "running", "nobody was left to say otherwise"
    assert job.finish() == "COMPLETED", job.log
    assert sorted(set(job.steps())) == list(range(1, 9))


def test_a_trainer_node_crashes_and_slurm_finds_out_by_itself(submit):
    job = submit(*LONG)
    job.wait_for_line("step 2/8")
    job.wait_for("its checkpoint", job.run.latest_checkpoint_file.exists)
    job.cluster.crash_node(2, noticed=False)
    job.wait_for_line("queued again: lost node node2")
    job.cluster.start_node(2)
    assert job.finish() == "COMPLETED", job.log


def test_the_only_rollout_node_crashes_and_training_goes_on_after_it_returns(submit):
    # All four nodes: the job cannot go on without the one that is lost.
    job = submit(*LONG, "cluster.num_nodes=3", "batch.prompts_per_step=6", "parallel.expert=1", "server.num_servers=1")
    job.wait_for_line("step 2/8")
    job.cluster.crash_node(4)
    job.wait_for_line("queued again: all servers are lost")
    job.cluster.start_node(4)
    job.wait_for_line("resumed from step_")
    assert job.finish() == "COMPLETED", job.log


def test_a_heterogeneous_job_near_its_time_limit_is_queued_again(submit):
    job = submit(*LONG, "cluster.num_nodes=1", "parallel.expert=1", GSPO_ROLLOUT_SBATCH="--exclusive --mem=16000 --time=30")
    job.wait_for_line("step 1/8")
    job.cluster.run("scancel", "--signal=USR1", "--batch", job.id)
    job.wait_for_line("queued again: SIGUSR1")
    job.wait_for_line("resumed from step_")
    assert job.finish() == "COMPLETED", job.log

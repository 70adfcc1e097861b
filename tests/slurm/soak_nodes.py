"""Slower jobs on a real Slurm, which tests/soak/slurm_nodes.sh runs: what Slurm has to notice by itself, the batch
node, and more jobs of real ranks and servers. Those with `submit_stand_ins` have neither.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import psutil
from tiny_models import make_model

from gspo_mega.base.run_folder import RunFolder, read_json
from gspo_mega.launcher.attempt_state import read_state
from gspo_mega.rollout.server.reward_server import reward_folder
from gspo_mega.verify.drill.outcome import digests

LONG = ("train.num_steps=8", "checkpoint.every_steps=1", "rollout.max_concurrent_requests=1")
STEPS = "train.num_steps=500"


def test_the_batch_node_crashes_and_the_watch_has_the_job_queued_again(submit):
    job = submit(*LONG)
    job.wait_for_line("step 2/8")
    job.wait_for("its checkpoint", job.run.latest_checkpoint_file.exists)
    first = job.run.latest_attempt()
    lost = job.nodes("ranks")[0]
    job.cluster.crash_node(lost)
    job.wait_for_line("resumed from step_")
    assert f"node{lost}, where the supervisor ran, is lost" in (first.logs_dir / "watch.log").read_text()
    assert read_state(first).state == "running", "nobody was left to say otherwise"
    assert job.finish() == "COMPLETED", job.log
    assert sorted(set(job.steps())) == list(range(1, 9))


def test_a_trainer_node_crashes_and_slurm_finds_out_by_itself(submit):
    job = submit(*LONG)
    job.wait_for_line("step 2/8")
    job.wait_for("its checkpoint", job.run.latest_checkpoint_file.exists)
    lost = job.nodes("ranks")[1]
    job.cluster.crash_node(lost, noticed=False)
    job.wait_for_line(f"queued again: lost node node{lost}")
    job.wait_for_line("resumed from step_")
    assert job.finish() == "COMPLETED", job.log


def test_the_only_rollout_node_crashes_and_training_goes_on_after_it_returns(submit):
    # All four nodes: the job cannot go on without the one that is lost.
    job = submit(*LONG, "cluster.num_nodes=3", "batch.prompts_per_step=6", "parallel.expert=1", "server.num_servers=1")
    job.wait_for_line("step 2/8")
    (lost,) = job.nodes("servers")
    job.cluster.crash_node(lost)
    job.wait_for_line("queued again: all servers are lost")
    job.cluster.start_node(lost)
    job.wait_for_line("resumed from step_")
    assert job.finish() == "COMPLETED", job.log


def test_a_heterogeneous_job_near_its_time_limit_is_queued_again(submit):
    job = submit(
        *LONG, "cluster.num_nodes=1", "parallel.expert=1", GSPO_ROLLOUT_SBATCH="--exclusive --mem=16000 --time=30"
    )
    job.wait_for_line("step 1/8")
    job.cluster.run("scancel", "--signal=USR1", "--batch", job.id)
    job.wait_for_line("queued again: SIGUSR1")
    job.wait_for_line("resumed from step_")
    assert job.finish() == "COMPLETED", job.log
    assert job.nodes("ranks") != job.nodes("servers")


def test_a_trainer_node_that_crashes_costs_the_steps_since_the_checkpoint(submit):
    job = submit(*LONG)
    job.wait_for_line("step 2/8")
    job.wait_for("its checkpoint", job.run.latest_checkpoint_file.exists)
    lost = job.nodes("ranks")[1]
    job.cluster.crash_node(lost)
    job.wait_for_line(f"queued again: lost node node{lost}")
    job.wait_for_line("resumed from step_")
    assert job.finish() == "COMPLETED", job.log
    assert sorted(set(job.steps())) == list(range(1, 9))
    assert lost not in job.nodes("ranks") + job.nodes("servers"), "the crashed node was waited for"


def test_real_ranks_go_on_with_one_node_of_two_and_then_with_both_again(submit):
    """Experts over two ranks, then all on one, then over two again. A run without Slurm that takes the recorded
    rollouts through the same layouts ends with the same weights and optimizer state, to the bit.
    """
    job = submit(
        "train.num_steps=300",
        "train.on_lost_node=shrink",
        "checkpoint.every_steps=1",
        "rollout.max_concurrent_requests=8",
        GSPO_SBATCH="--exclusive --mem=16000 --time=30 --exclude=node4",
    )
    job.wait_for("its second step", lambda: len(job.steps()) >= 2 and job.run.latest_checkpoint_file.exists())
    lost = job.nodes("ranks")[1]
    job.cluster.crash_node(lost)
    job.wait_for_line("warning  1 of 2 trainer nodes (train.on_lost_node: shrink): ")
    job.wait_for_line("resumed from step_")
    behind = max(job.steps())
    job.wait_for("two steps on one node", lambda: max(job.steps()) > behind + 1)
    job.cluster.start_node(lost)
    job.wait_for_line("queued again: nodes are free again")
    job.wait_for_line("resumed from step_", times=2)
    behind = max(job.steps())
    job.wait_for("two steps on both", lambda: max(job.steps()) > behind + 1)
    job.cluster.run("scancel", job.id)
    assert job.finish() == "CANCELLED"
    job.cluster.wait_gone()

    changes = [int(step) for step in re.findall(r"^resumed from step_(\d+)", job.log, re.MULTILINE)]
    ends = [*changes, int(job.run.latest_checkpoint_file.read_text().removeprefix("step_"))]
    assert len(ends) == 3 and 0 < ends[0] < ends[1] < ends[2]
    replay = RunFolder(job.run.path.with_name("replay"))
    for end, ranks in zip(ends, (2, 1, 2), strict=True):
        alone = f"cluster={{num_nodes: 1, ranks_per_node: {ranks}, num_rollout_nodes: 0}}"
        words = [*job.arguments, "run.name=replay", alone, f"parallel.expert={ranks}", "train.on_lost_node=wait"]
        words += [f"train.num_steps={end}", "--from-rollouts", str(job.run.path)]
        done = subprocess.run(
            [sys.executable, "-m", "gspo_mega", "train", *words], env=job.environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        layout = read_json(replay.checkpoints_dir / f"step_{end:08d}" / "state.json")["layout"]
        assert (layout["world"], layout["expert"]) == (ranks, ranks)
    one, other = (
        digests(run.checkpoints_dir / run.latest_checkpoint_file.read_text() / "megatron") for run in (job.run, replay)
    )
    assert len(one) > 2 and {**one, ".metadata": None} == {**other, ".metadata": None}


def test_ranks_and_servers_on_the_same_nodes(submit):
    job = submit("train.num_steps=2", "cluster.num_rollout_nodes=0", "server.num_servers=2")
    assert job.finish() == "COMPLETED", job.log
    assert job.steps() == [1, 2]
    assert job.nodes("ranks") == job.nodes("servers") and len(job.nodes("ranks")) == 2


def test_slurms_own_signal_ahead_of_the_limit(submit_stand_ins):
    # Slurm counts limits in minutes, looks at them twice a minute, and would rather be early: within 20 to 50 s of the
    # start.
    job = submit_stand_ins(STEPS, GSPO_SBATCH="--exclusive --mem=16000 --time=2", GSPO_SIGNAL_SECONDS="70")
    job.wait_for_line("queued again: SIGUSR1: the time limit is near")
    assert job.steps()
    job.wait_for_line("resumed from step_")


def test_all_rollout_nodes_crash_one_after_the_other(submit_stand_ins):
    job = submit_stand_ins(STEPS, "server.num_servers=2", "cluster.num_rollout_nodes=2")
    job.wait_for_line("step 2/500")
    first, second = job.nodes("servers")
    job.cluster.crash_node(second)
    job.wait_for_line(f"warning  node node{second} is lost, and server-1 with it; 1 servers are left")
    job.cluster.crash_node(first)
    job.wait_for_line("queued again: all servers are lost")
    # Four nodes are needed: it waits for those that are gone.
    job.cluster.start_node(first)
    job.cluster.start_node(second)
    job.wait_for_line("resumed from step_")


def test_a_rollout_node_that_crashes_does_not_stop_training_and_scancel_leaves_nothing(submit):
    job = submit("train.num_steps=400", "server.num_servers=2", "cluster.num_rollout_nodes=2")
    job.wait_for_line("step 2/400")
    lost = job.nodes("servers")[1]
    job.cluster.crash_node(lost)
    job.wait_for_line(f"warning  node node{lost} is lost, and server-1 with it")
    behind = max(job.steps())
    job.wait_for("three more steps", lambda: max(job.steps()) >= behind + 3)
    assert len(job.run.attempts()) == 1
    job.cluster.run("scancel", job.id)
    assert job.finish() == "CANCELLED"
    job.cluster.wait_gone()


def test_the_first_error_of_any_rank_is_the_last_line(submit):
    job = submit("train.num_steps=2", "data.prompt_key=nothing")
    assert job.finish() == "FAILED"
    last = job.log.rstrip().splitlines()[-1]
    assert last.startswith("error: ") and "nothing" in last
    assert read_state(job.run.latest_attempt()).state == "failed"


def test_a_reward_model_whose_node_crashes_scores_again_when_it_is_back(submit, tmp_path):
    """Real SGLang servers of the policy and of a reward model. The model's server is killed, and started again; then
    its node crashes, whose loss the rollouts that wait for scores do not hold up.
    """
    fitted = make_reward_model(tmp_path)
    job = submit(
        *LONG,
        "parallel.expert=1",
        "cluster.num_nodes=1",
        "cluster.num_rollout_nodes=2",
        "server.num_servers=2",
        f"reward.model=[{{name: sums, path: {fitted}, dtype: fp32}}]",
        f"reward.functions=[{{function: 'run_support:score', options: {{log: {tmp_path / 'log'}}}}}, {{function: sums}}]",
    )
    job.wait_for_line("step 1/8")
    registration = reward_folder(job.run.latest_attempt(), "sums").server_file("server-0")
    (serve,) = (
        pid
        for pid, command in job.cluster.processes()
        if "gspo_mega serve" in command and "--reward-model sums" in command and not command.startswith("srun")
    )
    for child in psutil.Process(serve).children():
        child.kill()
    job.wait_for("another start of its server", lambda: read_json(registration)["generation"] == 2)
    before = max(job.steps())
    job.wait_for("a step after that", lambda: max(job.steps()) > before)
    lost = job.nodes("servers")[0]
    job.cluster.crash_node(lost)
    job.wait_for_line("queued again: all servers of reward model sums are lost")
    assert f"warning  node node{lost} is lost, and server-0 with it; 1 servers are left" in job.log
    job.cluster.start_node(lost)
    job.wait_for_line("resumed from step_")
    assert job.finish() == "COMPLETED", job.log
    lines = {line["step"]: line for line in map(json.loads, job.run.metrics_file.read_text().splitlines())}
    assert len(lines) == 8 and all("reward/function/sums" in line for line in lines.values())
    assert sum(line["rollout/num_reward_failures"] for line in lines.values()) == 0


def make_reward_model(folder: Path) -> Path:
    """One that was fitted on right and wrong sums."""
    model = make_model(folder / "model", moe=False)
    sums = [(a, b, wrong) for a in range(8) for b in range(8) for wrong in (0, 1)]
    rows = [{"prompt": f"{a}+{b}=", "response": f"#{a + b + wrong}", "label": 1 - wrong} for a, b, wrong in sums]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [str(model), str(folder / "sums.jsonl"), "--out", str(folder / "fitted")]
    subprocess.run([sys.executable, "-m", "gspo_mega", "reward-model", *words], check=True)
    return folder / "fitted"

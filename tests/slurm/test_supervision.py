"""What the supervisor of a job makes of signals, failures and lost nodes, on a real Slurm with stand-ins for ranks and
servers.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from slurm_jobs import variables
from waiting import alive

from gspo_mega.base.run_folder import Attempt, read_json
from gspo_mega.launcher.attempt_state import read_state
from gspo_mega.rollout.registration import read_registrations
from gspo_mega.rollout.server.reward_server import reward_folder

LONG = "train.num_steps=500"


def reward_model(folder: Path, num_servers: int, tensor: int = 1) -> tuple[str, ...]:
    """Overrides for servers of a reward model `sums`, whose folder is as much of one as the supervisor reads."""
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["LlamaForSequenceClassification"]}')
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    entry = f"{{name: sums, path: {folder}, num_servers: {num_servers}, tensor: {tensor}}}"
    return f"reward.model=[{entry}]", "reward.functions=[{function: 'run_support:score'}, {function: sums}]"


def go_on(job) -> None:
    """Let a job go on that was submitted with `STAND_IN="hold N"`."""
    (job.run.path / "go").touch()


def checkpoint(job) -> str:
    latest = job.run.latest_checkpoint_file
    return latest.read_text() if latest.exists() else ""


def states(job) -> dict[str, str]:
    """Of the servers of the job's last start."""
    attempt = job.run.latest_attempt()
    return {} if attempt is None else states_in(attempt)


def states_in(attempt: Attempt) -> dict[str, str]:
    folder = attempt.servers_dir
    return {one.server_id: one.state for one in read_registrations(folder)} if folder.exists() else {}


def test_sbatch_itself_submits_a_job_of_the_right_size(submit_stand_ins):
    job = submit_stand_ins("train.num_steps=3", through_sbatch="yes")
    job.wait_for_line("Submitted batch job")
    job.follow()
    assert job.finish() == "COMPLETED", job.log
    assert job.steps() == [1, 2, 3] and "ranks on node" in job.log


def test_jobs_that_are_queued_again_go_on(submit_stand_ins):
    """Side by side: two near their time limit, one of them heterogeneous; two that lose a trainer node, one of them
    with the servers on it. Slurm holds a job that was queued again back for some ten seconds.
    """
    hold = {"STAND_IN": "hold 3"}  # a rank that is killed between a step's line and its checkpoint shows the step twice
    near = [
        submit_stand_ins("train.num_steps=12", GSPO_ROLLOUT_SBATCH=more, **hold)
        for more in ("", "--exclusive --mem=16000 --time=30")
    ]
    losing = [submit_stand_ins(LONG, *size, **hold) for size in ((), ("cluster.num_rollout_nodes=0",))]
    for job in (*near, *losing):
        job.wait_for("its third step", lambda job=job: checkpoint(job) == "step_00000003")
    for job in near:
        job.wait_for("its server", lambda job=job: states(job) == {"server-0": "ready"})
    lost = [job.nodes("ranks")[1] for job in losing]
    for job in near:
        job.cluster.run("scancel", "--signal=USR1", "--batch", job.id)
    for job, node in zip(losing, lost):
        job.cluster.crash_node(node)
    firsts = [job.run.latest_attempt() for job in near]
    for job, first in zip(near, firsts):
        job.wait_for_line("queued again: SIGUSR1: the time limit is near")
        assert read_state(first).state == "requeued"
        assert read_json(first.result_file) == {"stopped": "SIGUSR1: the time limit is near"}
        assert [registration.state for registration in read_registrations(first.servers_dir)] == ["stopped"], (
            "not ended in order"
        )
        go_on(job)
    for job, node in zip(losing, lost):
        # The ranks that are left wait for the lost one and would for long.
        job.wait_for_line(f"queued again: lost node node{node}")
        go_on(job)
    for job in near:
        job.wait_for_line("resumed from step_")
        assert job.finish() == "COMPLETED", job.log
        assert job.steps() == list(range(1, 13))
        assert read_state(job.run.latest_attempt()).state == "finished"
    for job in losing:
        job.wait_for_line("resumed from step_")
        behind = max(job.steps())
        job.wait_for("it goes on", lambda: max(job.steps()) > behind)
        assert job.steps() == list(range(1, max(job.steps()) + 1))


def test_a_limit_that_leaves_no_time_for_a_step_is_refused(submit_stand_ins):
    job = submit_stand_ins(LONG, GSPO_SBATCH="--exclusive --mem=16000 --time=1")
    assert job.finish() == "FAILED"
    assert re.match(
        rf"job {job.id} has \d+ s left but must stop 120 s before its time limit", job.log.rstrip().splitlines()[-1]
    ), job.log


def test_ranks_and_servers_divide_the_gpus_of_their_nodes(submit_stand_ins, tmp_path):
    shared = (
        "cluster={num_nodes: 2, ranks_per_node: 2, num_rollout_nodes: 0}",
        "server={num_servers: 3, tensor: 2}",
        "publish.verify=replicas",
    )
    models = reward_model(tmp_path / "sums", num_servers=2, tensor=1)
    job = submit_stand_ins("train.num_steps=3", *shared, *models, GSPO_GPUS_PER_NODE="8")
    assert job.finish() == "COMPLETED", job.log
    attempt = job.run.latest_attempt()
    seen = {path.name.removeprefix("gpus_"): path.read_text() for path in attempt.path.glob("gpus_*")}
    ranks = dict.fromkeys(("rank_0", "rank_1", "rank_2", "rank_3"), "0,1")
    own = {"server_0": "2,3", "server_1": "2,3", "server_2": "4,5", "sums_0": "4", "sums_1": "5"}
    assert seen == {**ranks, **own}
    assert states_in(reward_folder(attempt, "sums")) == {"server-0": "stopped", "server-1": "stopped"}
    assert job.nodes("ranks") == job.nodes("servers") and len(job.nodes("ranks")) == 2


def _part_pid(job, index: int, part: int) -> int:
    (found,) = (
        pid
        for pid, command in job.cluster.processes()
        if f"--index {index} --hosts" in command
        and not command.startswith("srun")
        and f"SLURM_PROCID={part}\0".encode() in variables(pid)
    )
    return found


def test_a_server_over_two_nodes_is_placed_on_neighbours_and_ends_as_one(submit_stand_ins):
    job = submit_stand_ins(
        LONG,
        "cluster={num_nodes: 2, ranks_per_node: 1, num_rollout_nodes: 2}",
        "server={num_servers: 2, tensor: 4, num_nodes: 2}",
        "publish.verify=replicas",
        GSPO_GPUS_PER_NODE="8",
    )
    job.wait_for_line("step 2/500")
    attempt = job.run.latest_attempt()
    names = ["part_0_0", "part_0_1", "part_1_0", "part_1_1"]
    job.wait_for("all parts", lambda: all((attempt.path / name).exists() for name in names))
    parts = [read_json(attempt.path / name) for name in names]
    nodes = job.nodes("servers")
    assert [part["node"] for part in parts] == [f"node{node}" for node in nodes] * 2
    assert [part["host"] for part in parts] == [job.cluster.address(node) for node in nodes] * 2
    assert [part["gpus"] for part in parts] == ["0,1", "0,1", "2,3", "2,3"]
    # Nobody starts a part's `serve` again: the others end with it, and the run goes on with the other server.
    pids = [_part_pid(job, index, part) for index in (0, 1) for part in (0, 1)]
    os.kill(pids[3], signal.SIGKILL)
    job.wait_for_line("warning  server-1 gave up: ")
    assert "; 1 servers are left" in job.log
    job.wait_for("the head ends too", lambda: not alive(pids[2:]))
    assert len(alive(pids[:2])) == 2
    seen = max(job.steps())
    job.wait_for("training goes on", lambda: max(job.steps()) > seen + 2)
    # A lost node takes the servers with it that have a part there: here the last one.
    job.cluster.crash_node(nodes[1])
    job.wait_for_line(f"warning  node node{nodes[1]} is lost, and server-0 with it; 0 servers are left")


def test_a_run_on_recorded_rollouts_needs_no_servers(submit_stand_ins, tmp_path):
    journal = tmp_path / "recorded" / "journal"
    journal.mkdir(parents=True)
    for step in range(3):
        (journal / f"step_{step:08d}").touch()
    # More nodes than there are would be needed with those of the servers.
    many = 12
    job = submit_stand_ins(
        "train.num_steps=3",
        f"train.from_rollouts={tmp_path / 'recorded'}",
        f"cluster={{num_nodes: 2, num_rollout_nodes: {many}}}",
        f"server.num_servers={many}",
    )
    assert job.finish() == "COMPLETED", job.log
    assert len(job.nodes("ranks")) == 2 and ", no servers: the run trains on recorded rollouts\n" in job.log
    assert not list(job.run.latest_attempt().path.glob("gpus_server_*"))


def test_a_rollout_node_crashes_and_scancel_leaves_nothing(submit_stand_ins, tmp_path):
    models = reward_model(tmp_path / "sums", num_servers=2)
    job = submit_stand_ins(LONG, "server.num_servers=2", "cluster.num_rollout_nodes=2", *models)
    job.wait_for_line("step 2/500")
    scorers, both = reward_folder(job.run.latest_attempt(), "sums"), {"server-0": "ready", "server-1": "ready"}
    job.wait_for("its servers", lambda: states(job) == states_in(scorers) == both)
    lost = job.nodes("servers")[1]
    job.cluster.crash_node(lost)
    job.wait_for_line(f"warning  node node{lost} is lost, and server-1 with it; 1 servers are left")
    of = "of reward model sums"
    job.wait_for_line(f"warning  node node{lost} is lost, and server-1 {of} with it; 1 servers {of} are left")
    assert states(job) == {"server-0": "ready", "server-1": "failed"}, "ranks that start would wait for it"
    assert states_in(scorers) == {"server-0": "ready", "server-1": "failed"}, "requests would go to it"
    seen = max(job.steps())
    job.wait_for("training goes on", lambda: max(job.steps()) > seen + 2)
    assert len(job.cluster.processes()) > 5
    job.cluster.run("scancel", job.id)
    assert job.finish() == "CANCELLED"
    job.cluster.wait_gone()
    assert "Slurm ends this job." in job.log and "stopping after a checkpoint" not in job.log


@pytest.mark.parametrize(
    ("what", "last"),
    [
        ("raise 1", "error: rank 1 failed: ValueError: of a test (logs: "),
        ("kill 1", "error: rank 1 on {node} ended without an error report: Killed"),
    ],
)
def test_the_first_error_of_any_rank_is_the_last_line(submit_stand_ins, what, last):
    job = submit_stand_ins(LONG, "train.max_restarts=0", STAND_IN=what)
    assert job.finish() == "FAILED"
    last = last.format(node=f"node{job.nodes('ranks')[1]}")
    assert job.log.rstrip().splitlines()[-1].startswith(last), job.log
    state = read_state(job.run.latest_attempt())
    assert state.state == "failed" and state.error.startswith(last)


def test_a_rank_that_is_killed_begins_another_attempt_on_the_same_nodes(submit_stand_ins):
    job = submit_stand_ins("train.num_steps=12", "train.standby_processes=true", STAND_IN="once 1")
    job.wait_for_line("warning  attempt 1 failed: started again from the checkpoint of step ")
    # srun gives its input to the tasks of both nodes, which become ranks.
    job.wait_for_line("standby  ranks 0, 1 started in processes that had imported everything")
    job.wait_for_line("resumed from step_")
    assert job.finish() == "COMPLETED", job.log
    assert "standby  2 processes are ready to become the ranks of a restart" in job.log
    assert job.run.attempts()[1].num_standby_ranks() == 2
    assert job.steps() == list(range(1, 13)) and "restarted 1 times" not in job.log, "it went through the queue"
    assert [read_state(attempt).state for attempt in job.run.attempts()] == ["failed", "finished"]
    assert "rank 1 on node" in read_state(job.run.attempts()[0]).error


def test_a_server_that_gives_up_leaves_the_run_to_the_others(submit_stand_ins):
    job = submit_stand_ins(
        "train.num_steps=8",
        "server.num_servers=2",
        "cluster.num_rollout_nodes=2",
        STAND_IN="hold 4",
        STAND_IN_SERVER="1",
    )
    job.wait_for_line("warning  server-1 gave up: it crashed too often (its log: ")
    go_on(job)
    assert job.finish() == "COMPLETED", job.log
    assert job.steps() == list(range(1, 9)) and len(job.run.attempts()) == 1


def test_something_is_wrong_on_a_node(submit_stand_ins):
    """The doctor runs in the ranks' own environment: here one whose Python is none."""
    job = submit_stand_ins(LONG, GSPO_PREFLIGHT="1")
    assert job.finish() == "FAILED"
    first, second = job.nodes("ranks")
    assert job.log.rstrip().splitlines()[-1].startswith(f"error: something is wrong on node{first}, node{second}"), (
        job.log
    )


def test_a_run_that_lost_a_node_goes_on_with_fewer_and_again_with_more(submit_stand_ins):
    """Only three nodes may be used. When one is lost there is no other, and the run goes on with one trainer node in
    place of two, until the lost one is back.
    """
    many = int(os.environ.get("SLURM_TEST_NODES", "12"))
    job = submit_stand_ins(
        LONG,
        "train.on_lost_node=shrink",
        "cluster.ranks_per_node=2",
        GSPO_SBATCH=f"--exclusive --mem=16000 --time=30 --exclude=node[4-{many}]",
        STAND_IN="hold 3",
    )
    job.wait_for("its third step", lambda: checkpoint(job) == "step_00000003")
    lost = job.nodes("ranks")[1]
    assert len(job.nodes("ranks")) == 2 and job.cluster.job(job.id)["NumNodes"] == "3"
    job.cluster.crash_node(lost)
    job.wait_for_line(f"queued again: lost node node{lost}")
    go_on(job)
    job.wait_for_line("warning  1 of 2 trainer nodes (train.on_lost_node: shrink): ")
    job.wait_for_line("resumed from step_")
    behind = max(job.steps())
    job.wait_for("it goes on", lambda: max(job.steps()) > behind + 1)
    assert lost not in job.nodes("ranks") and len(job.nodes("ranks")) == 1
    assert "num_nodes: 2" in job.run.config_file.read_text(), "the run's own configuration stays"
    job.cluster.start_node(lost)
    job.wait_for_line("queued again: nodes are free again")
    job.wait_for_line("resumed from step_", times=2)
    behind = max(job.steps())
    job.wait_for("it goes on on both", lambda: max(job.steps()) > behind + 1)
    assert len(job.nodes("ranks")) == 2 and len(job.run.attempts()) == 3
    assert sorted(set(job.steps())) == list(range(1, max(job.steps()) + 1))

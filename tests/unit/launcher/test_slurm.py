"""Jobs without a Slurm: sizes and options from the plan, steps' command lines, and a `scontrol` that answers from a
table.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from slurm_answers import CONFIG, REPOSITORY, loaded, scontrol, site  # noqa: F401  one is a fixture

from gspo_mega.base.errors import ConfigError, JournalError, PlanError, RankError
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.config import load_config
from gspo_mega.launcher.local import launch
from gspo_mega.launcher.slurm import scontrol as calls
from gspo_mega.launcher.slurm.job import describe_nodes
from gspo_mega.launcher.slurm.size import job_size, sbatch_options, with_signal_time
from gspo_mega.launcher.slurm.steps import AttemptSteps
from gspo_mega.plan import estimate, plan_run
from gspo_mega.plan.report import plan_shell

SHAPE = REPOSITORY / "configs/models/quickstart_moe.json"


def test_servers_are_dealt_to_their_nodes_in_turn():
    size = job_size(
        loaded("server={num_servers: 5, tensor: 2}", "cluster={num_nodes: 4, ranks_per_node: 8, num_rollout_nodes: 2}"),
        site(),
    )
    assert size.servers_by_node == ((0, 2, 4), (1, 3))
    assert [size.nodes_of(index) for index in range(5)] == [([0], 0), ([1], 0), ([0], 1), ([1], 1), ([0], 2)]
    assert (size.trainer_gpus, size.rollout_gpus) == (8, 6)
    shared = job_size(loaded("server={num_servers: 4, tensor: 1}", "cluster={num_nodes: 2, ranks_per_node: 6}"), site())
    assert shared.servers_by_node == ((0, 2), (1, 3))
    assert (shared.trainer_gpus, shared.rollout_gpus) == (8, 0)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            ["cluster={num_nodes: 2, ranks_per_node: 9, num_rollout_nodes: 1}"],
            "a trainer node needs 9 GPUs for its ranks, and has 8",
        ),
        (
            ["cluster.ranks_per_node=7", "server.tensor=2"],
            "a trainer node needs 9 GPUs for its ranks and its share of server.num_servers 1 x server.tensor 2",
        ),
        (
            ["cluster.num_rollout_nodes=1", "server.tensor=16"],
            "a rollout node needs 16 GPUs for its share of server.num_servers 1 x server.tensor 16",
        ),
    ],
)
def test_nodes_with_too_few_gpus_are_refused_before_the_queue(overrides, told):
    with pytest.raises(PlanError) as error:
        job_size(loaded(*overrides), site())
    assert told in str(error.value)
    assert str(error.value).startswith(("override '", f"{CONFIG}:"))
    job_size(loaded(*overrides), site(GSPO_GPUS_PER_NODE="0"))  # CPUs are not divided


@pytest.mark.parametrize("path", sorted((REPOSITORY / "configs").glob("*_*node*.yaml")), ids=lambda path: path.stem)
def test_a_shipped_configuration_of_a_cluster_has_as_many_nodes_as_its_name_says(path):
    size = job_size(load_config(path, (), "train"), site())
    assert size.num_trainer_nodes + size.num_rollout_nodes == int(re.search(r"_(\d+)node", path.stem)[1])


def test_more_rollout_nodes_than_servers_are_refused():
    with pytest.raises(ConfigError, match="2 nodes for server.num_servers 1: some would have nothing to do; at most 1"):
        loaded("cluster.num_rollout_nodes=2")


@pytest.mark.parametrize(
    ("key", "more"),
    [("cluster.num_nodes=2", []), ("cluster.num_rollout_nodes=1", []), ("server.num_nodes=2", ["server.tensor=2"])],
)
def test_train_on_one_machine_refuses_several(key, more):
    if more:  # a server over two nodes has them, by the plan; `gspo-mega train` starts one machine only
        config = loaded("cluster.num_nodes=2", key, *more)
        config.config.cluster.__dict__["num_nodes"] = 1
    else:
        config = loaded(key)
    with pytest.raises(PlanError, match=f"{key.split('=')[0]}.*submit a Slurm job: launch/slurm/train.sbatch"):
        launch(config, "train", print)


def test_a_run_on_recorded_rollouts_needs_no_servers_and_no_nodes_for_them(tmp_path):
    words = [
        "cluster={num_nodes: 2, ranks_per_node: 8, num_rollout_nodes: 2}",
        "server.num_servers=4",
        "train.num_steps=1",
        f"train.from_rollouts={tmp_path}",
    ]
    with pytest.raises(JournalError, match="has no rollouts of step 1"):
        job_size(loaded(*words), site())
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal/step_00000000").touch()
    size = job_size(loaded(*words), site())
    assert (size.num_servers, size.num_rollout_nodes, size.trainer_gpus) == (0, 0, 8)
    assert "--nodes=2" in sbatch_options(loaded(*words).config.run.name, size, site(), ["--partition=small"])
    allocation = calls.read_allocation({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}, 2, 0)
    assert describe_nodes(allocation, size) == "ranks on n1 n2, no servers: the run trains on recorded rollouts"
    doctors = AttemptSteps(allocation, size, site(), RunFolder(tmp_path / "run").new_attempt(), 1).doctors(
        14_001, fp8=False
    )
    assert ["server" in spec.command for _, spec in doctors] == [False, False]
    assert job_size(loaded(*words), site(), "sft").num_servers == 4


def test_sbatch_is_told_the_size():
    config = loaded(
        "cluster={num_nodes: 2, ranks_per_node: 8, num_rollout_nodes: 1}", "server={num_servers: 4, tensor: 2}"
    )
    size = job_size(config, site(GSPO_CPUS_PER_TASK="12", GSPO_SIGNAL_SECONDS="600"))
    options = sbatch_options(config.config.run.name, size, site(GSPO_CPUS_PER_TASK="12", GSPO_SIGNAL_SECONDS="600"))
    assert options == [
        "--job-name=train",
        "--signal=B:USR1@600",
        "--export=ALL",
        "--nodes=3",
        "--ntasks-per-node=8",
        "--cpus-per-task=12",
        "--no-kill",
        "--gres=gpu:8",
    ]
    het = sbatch_options(config.config.run.name, size, site(), ["--partition=small"])
    assert het[het.index(":") + 1 :] == [
        "--nodes=1",
        "--ntasks-per-node=4",
        "--cpus-per-task=1",
        "--no-kill",
        "--gres=gpu:8",
        "--partition=small",
    ]
    assert "--nodes=2" in het[: het.index(":")]


def test_a_job_is_told_of_its_end_in_time_to_save(monkeypatch):
    """Ending a step and saving take 611 s of Qwen3-235B-A22B by the plan; a signal 300 s ahead left 280 s."""
    monkeypatch.chdir(REPOSITORY)
    large = load_config(REPOSITORY / "configs/qwen3_235b_a22b_32nodes.yaml", (), "train")
    figures = estimate(plan_run(large, "gpu"), large.where)
    assert figures.save_seconds > 280
    with pytest.raises(
        PlanError,
        match=(
            r"launch/slurm/site.sh: GSPO_SIGNAL_SECONDS=300 is too short: .* take \d+ s by estimate\. Set at least (\d+), or leave it"
            r" open"
        ),
    ) as caught:
        with_signal_time(site(GSPO_SIGNAL_SECONDS="300"), figures)
    needed = re.search(r"at least (\d+)", str(caught.value))[1]
    assert (
        with_signal_time(site(), figures).signal_seconds
        == with_signal_time(site(GSPO_SIGNAL_SECONDS=needed), figures).signal_seconds
        == int(needed)
    )
    assert with_signal_time(site(GSPO_SIGNAL_SECONDS="2000"), figures).signal_seconds == 2000
    small = loaded(f"model.path={SHAPE}")
    assert (
        with_signal_time(site(GSPO_SIGNAL_SECONDS="100"), estimate(plan_run(small), small.where)).signal_seconds == 100
    )
    shell = dict(line.split("=", 1) for line in plan_shell(plan_run(large, "gpu"), figures).splitlines())
    assert shell["GSPO_SIGNAL_SECONDS"] == needed


def test_what_plan_exports_for_a_job_script_is_read_by_it():
    """A name of the site's file means there what it means here; one that is neither the site's nor a plain figure of
    the plan misleads.
    """
    site_file = (REPOSITORY / "launch/slurm/site.sh").read_text()
    small = loaded(f"model.path={SHAPE}")
    names = {line.split("=")[0] for line in plan_shell(plan_run(small), estimate(plan_run(small))).splitlines()}
    assert {name for name in names if name.endswith("_SECONDS")} == {"GSPO_SIGNAL_SECONDS"}
    assert '"${GSPO_SIGNAL_SECONDS:=0}"' in site_file


def test_the_size_as_shell_and_refusals_as_lines():
    command = [sys.executable, "-m", "gspo_mega.launcher.slurm.size", str(CONFIG), "run.dir=/tmp/a b", "run.name=x"]
    environment = {**os.environ, "GSPO_GPUS_PER_NODE": "0"}
    refused = subprocess.run(
        [*command, f"model.path={REPOSITORY / 'nowhere'}"], capture_output=True, text=True, env=environment
    )
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "model.path" in refused.stderr and "Traceback" not in refused.stderr
    wrong = subprocess.run(command, capture_output=True, text=True, env={**environment, "GSPO_CPUS_PER_TASK": "many"})
    assert (wrong.returncode, wrong.stderr) == (2, "launch/slurm/site.sh: GSPO_CPUS_PER_TASK=many: not a number\n")
    quote = subprocess.run(
        [*command, f"model.path={SHAPE}"],
        capture_output=True,
        text=True,
        env={**environment, "GSPO_SBATCH": "--comment='a b"},
    )
    assert (quote.returncode, quote.stdout) == (2, "")
    assert quote.stderr.splitlines()[-1].startswith(
        "launch/slurm/site.sh: GSPO_SBATCH=--comment='a b: No closing quotation; "
    )
    # Not the configuration's own file, which is there once the quickstart has run in this folder.
    absent = [*command, f"model.path={SHAPE}", "data.path=no/such/train.jsonl"]
    nowhere = subprocess.run(absent, capture_output=True, text=True, env=environment)
    assert (nowhere.returncode, nowhere.stdout) == (2, "")
    assert "data.path: no/such/train.jsonl: no such file" in nowhere.stderr  # as in ranks of this Python
    elsewhere = {**environment, "GSPO_TRAINER_PYTHON": "/in/a/container/python"}
    ended = subprocess.run([*command, f"model.path={SHAPE}"], capture_output=True, text=True, env=elsewhere)
    assert ended.returncode == 0 and "are not tried here; `gspo-mega plan CONFIG --command train`" in ended.stderr
    echo = 'eval "$1"; echo "$GSPO_NUM_NODES|$GSPO_RUN_FOLDER|${GSPO_SIZE[3]}"'
    assert (
        subprocess.run(["bash", "-c", echo, "sh", ended.stdout], capture_output=True, text=True).stdout
        == "1|/tmp/a b/x|--nodes=1\n"
    )


@pytest.mark.parametrize("module", ["slurm.size", "slurm.job"])
def test_the_login_node_and_the_supervisor_need_no_libraries_of_ranks_and_servers(module):
    """launch/slurm/site.sh says of which packages the supervisor's Python has to have them."""
    lacking = (
        "import sys; sys.modules |= dict.fromkeys(['torch', 'transformers', 'tokenizers', 'safetensors', 'megatron',"
        " 'sglang'])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", f"{lacking}; import gspo_mega.launcher.{module}"],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
    )
    assert ended.returncode == 0, ended.stderr


def environment(**more):
    return {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", **more}


def test_nodes_by_role_with_slurms_addresses():
    job = calls.read_allocation(environment(SLURM_RESTART_COUNT="2"), 2, 1)
    assert (job.job_id, job.num_restarts) == ("7", 2)
    assert [(node.name, node.address) for node in job.trainer_nodes] == [("n1", "10.0.0.1"), ("n2", "10.0.0.2")]
    assert [node.name for node in job.rollout_nodes] == ["n3"]
    shared = calls.read_allocation(environment(), 3, 0)
    assert shared.rollout_nodes == shared.trainer_nodes == shared.nodes


def test_a_heterogeneous_job():
    het = {
        "SLURM_HET_SIZE": "2",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "n1",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "n[4-5]",
        "SLURM_JOB_ID_HET_GROUP_0": "7",
    }
    job = calls.read_allocation(environment(**het), 1, 2)
    assert [(node.name, node.het_group) for node in job.nodes] == [("n1", 0), ("n4", 1), ("n5", 1)]
    assert calls.at(job.rollout_nodes[0]) == ["--nodelist=n4", "--het-group=1"]
    with pytest.raises(PlanError, match="has 1 and 2 nodes; the configuration needs 2 for the trainer"):
        calls.read_allocation(environment(**het), 2, 2)


def test_no_job_or_too_small_a_one():
    with pytest.raises(PlanError, match="SLURM_JOB_ID is not set"):
        calls.read_allocation({}, 1, 0)
    with pytest.raises(
        PlanError, match="job 7 has 3 nodes; the configuration needs 3 for the trainer .* and 1 for servers"
    ):
        calls.read_allocation(environment(), 3, 1)


def test_a_node_that_left_the_jobs_list_is_lost():
    job = calls.read_allocation(environment(), 2, 1)
    assert [node.name for node in calls.lost_nodes("7", job.nodes)] == ["n3"]
    with pytest.raises(RankError, match="scontrol show job -o 9: Invalid job id"):
        calls.lost_nodes("9", job.nodes)


def test_the_time_that_is_left():
    assert 195 < calls.seconds_left("7") <= 200
    assert calls.seconds_left("6") is None


@pytest.fixture
def steps(tmp_path):
    config = loaded("cluster={num_nodes: 2, ranks_per_node: 4}", "server={num_servers: 3, tensor: 2}")
    here = site(
        GSPO_NETWORK="ib0",
        GSPO_TRAINER_CONTAINER="apptainer exec --nv t.sif",
        GSPO_SERVER_CONTAINER="--container-image=s.sqsh",
        GSPO_SERVER_PYTHON="python3",
    )
    allocation = calls.read_allocation({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}, 2, 0)
    return AttemptSteps(allocation, job_size(config, here), here, RunFolder(tmp_path / "run").new_attempt(), 2)


def test_ranks_and_servers_divide_a_nodes_gpus(steps):
    ranks = steps.ranks("train", 14_000)
    assert ranks.environment["MASTER_ADDR"] == "10.0.0.1" and ranks.environment["MASTER_PORT"] == "14000"
    assert ranks.environment["GLOO_SOCKET_IFNAME"] == "ib0" and "OMP_NUM_THREADS" not in ranks.environment
    line = " ".join(ranks.command)
    options = "--nodes=2 --ntasks=8 --ntasks-per-node=4 --nodelist=n1,n2 --distribution=block:block"
    assert f"{options} --kill-on-bad-exit=1" in line
    container = "apptainer exec --nv t.sif"
    assert f"env CUDA_VISIBLE_DEVICES=0,1,2,3 {container} {sys.executable} -m gspo_mega.train.worker" in line
    assert ranks.standby is None
    prepared = steps.ranks("train", 14_000, has_standby=True).standby
    assert " ".join(prepared.command) == line.replace("gspo_mega.train.worker", "gspo_mega.train.standby")
    assert " ".join(prepared.command).endswith(" ".join(prepared.arguments)) and list(prepared.ranks) == [*range(8)]
    # Servers 0 and 2 are on the first node, behind its four ranks.
    for index, node, gpus in ((0, 1, "4,5"), (1, 2, "4,5"), (2, 1, "6,7")):
        line = " ".join(steps.server(index).command)
        container = f"--nodelist=n{node} --container-image=s.sqsh --gres=gpu:8"
        assert f"{container} env CUDA_VISIBLE_DEVICES={gpus} python3 -m gspo_mega serve" in line
        assert line.endswith(f"--index {index} --host 10.0.0.{node}")


def test_no_command_line_holds_the_key(steps):
    doctors = [spec for _, spec in steps.doctors(14_001, fp8=True)]
    specs = [steps.ranks("train", 14_000), steps.server(0), *doctors]
    first, second, *_ = (f"{' '.join(doctor.command)} " for doctor in doctors)
    assert " --requests 1024 " in first and " --fp8 " in first and " --index 1 " in second
    key = Path(next(word for word in specs[0].command if "attempts" in word)).parent / "api_key"
    assert key.read_text() not in " ".join(
        word for spec in specs for word in (*spec.command, *spec.environment.values())
    )


def test_a_job_that_shrinks_may_start_with_fewer_trainers():
    config = loaded("cluster={num_nodes: 4, ranks_per_node: 8, num_rollout_nodes: 1}", "server={num_servers: 2}")
    size = job_size(config, site())
    options = sbatch_options("run", size, site(), fewest_trainers=2)
    # Slurm would give the fewest nodes for --ntasks-per-node.
    assert options[-4:] == ["--nodes=3-5", "--cpus-per-task=8", "--no-kill", "--gres=gpu:8"]
    het = sbatch_options("run", size, site(), ["--partition=small"], fewest_trainers=2)
    assert [word for word in het if word.startswith("--nodes")] == ["--nodes=2-4", "--nodes=1"]
    assert calls.free_trainer_nodes({"SLURM_JOB_NODELIST": "n[1-4]"}, 1) == 3
    lists = {"SLURM_JOB_NODELIST_HET_GROUP_0": "n[1-3]", "SLURM_JOB_NODELIST_HET_GROUP_1": "n[4-9]"}
    assert calls.free_trainer_nodes({"SLURM_HET_SIZE": "2", **lists}, 6) == 3
    with pytest.raises(PlanError, match="this is no Slurm job"):
        calls.free_trainer_nodes({}, 1)


@pytest.mark.parametrize(("wait", "starts"), [(timedelta(0), True), (timedelta(hours=1), False), (None, False)])
def test_whether_more_nodes_are_free_is_slurms_answer(tmp_path, wait, starts):
    at = "" if wait is None else (datetime.now() + wait).isoformat(timespec="seconds")
    said = f"sbatch: Job 9 to start at {at} using 8 processors on nodes n3 in partition a" if at else "sbatch: error: x"
    program = tmp_path / "bin" / "sbatch"
    program.write_text(f'#!/bin/sh\necho "$@" "$SLURM_JOB_ID" > {tmp_path}/call\necho "{said}" >&2\n')
    program.chmod(0o755)
    variables = {**os.environ, "SLURM_JOB_ID": "7"}
    assert calls.could_start(["--partition=a", "--nodes=1"], variables) is starts
    assert (tmp_path / "call").read_text().split() == ["--test-only", "--partition=a", "--nodes=1", "--wrap=true"]

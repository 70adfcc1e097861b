"""The processes of reward models' servers, as the launchers of one machine and of a Slurm job start them: which nodes
and GPUs they have, their command lines, and what the end of one means.
"""

import json
import sys

import pytest
from slurm_answers import loaded, scontrol, site  # noqa: F401  the fixture is automatic
from waiting import until

from gspo_mega.base.errors import ConfigError, GspoMegaError, PlanError
from gspo_mega.base.run_folder import Attempt, RunFolder
from gspo_mega.config.schema import ModelReward
from gspo_mega.launcher.children import Child, ChildSpec, ProcessFamily
from gspo_mega.launcher.local import Supervisor, _reward_servers
from gspo_mega.launcher.slurm import scontrol as calls
from gspo_mega.launcher.slurm import steps as step_starts
from gspo_mega.launcher.slurm.size import job_size, sbatch_options
from gspo_mega.launcher.slurm.steps import AttemptSteps
from gspo_mega.rollout.server.reward_server import make_reward_folder, reward_folder

STYLE = "{name: style, path: m, num_servers: 3, tensor: 2}"
SUMS = "{name: sums, path: m}"


def with_models(*overrides, models=f"[{SUMS}, {STYLE}]"):
    functions = "reward.functions=[{function: sums}, {function: style}]"
    return loaded(functions, f"reward.model={models}", *overrides)


def test_each_server_has_its_gpus_its_log_and_its_model(tmp_path):
    attempt = Attempt(tmp_path / "run" / "attempts" / "0001")
    first, second = (ModelReward(name=name, path=name, num_servers=2, tensor=2) for name in ("sums", "style"))
    scorers, gpus = [(first, 0), (first, 1), (second, 0)], [["4", "5"], ["6", "7"], []]
    specs = _reward_servers(scorers, gpus, attempt, ["serve"], {"PYTHONPATH": "x"})
    names = [(spec.kind, spec.index, spec.of) for spec in specs]
    assert names == [("reward server", 0, "sums"), ("reward server", 1, "sums"), ("reward server", 0, "style")]
    assert [spec.command[-4:] for spec in specs] == [
        ["--index", index, "--reward-model", name] for index, name in (("0", "sums"), ("1", "sums"), ("0", "style"))
    ]
    assert specs[1].environment == {"PYTHONPATH": "x", "CUDA_VISIBLE_DEVICES": "6,7"}
    assert "CUDA_VISIBLE_DEVICES" not in specs[2].environment
    assert specs[1].log == attempt.path / "reward_models" / "sums" / "logs" / "server_1.log"
    assert specs[1].log.parent.is_dir() and reward_folder(attempt, "style").servers_dir.is_dir()


def test_in_a_job_they_are_where_the_fewest_gpus_are_in_use():
    nodes = "cluster={num_nodes: 4, ranks_per_node: 8, num_rollout_nodes: 2}"
    size = job_size(with_models("server={num_servers: 3, tensor: 1}", nodes), site())
    assert size.servers_by_node == ((2,), (0, 1))
    places = [(place.name, place.index, place.node, place.first_gpu, place.num_gpus) for place in size.rewards]
    assert places == [("style", 0, 0, 1, 2), ("style", 2, 0, 3, 2), ("style", 1, 1, 2, 2), ("sums", 0, 1, 4, 1)]
    assert (size.trainer_gpus, size.rollout_gpus, size.most_servers) == (8, 5, 4)
    assert "--ntasks-per-node=8" in sbatch_options("run", size, site())
    # On the ranks' nodes they are behind the policy's servers, those in turns with the ranks too.
    shared = job_size(with_models("cluster={num_nodes: 2, ranks_per_node: 3}", models=f"[{SUMS}]"), site())
    assert [(place.node, place.first_gpu) for place in shared.rewards] == [(1, 3)]
    assert (shared.trainer_gpus, shared.rollout_gpus) == (4, 0)
    assert "--ntasks-per-node=4" in sbatch_options("run", shared, site())


def test_a_node_may_have_reward_models_alone():
    nodes = "cluster={num_nodes: 1, ranks_per_node: 8, num_rollout_nodes: 2}"
    size = job_size(with_models("server.tensor=8", nodes, models=f"[{SUMS}]"), site())
    assert size.servers_by_node == ((0,), ()) and [place.node for place in size.rewards] == [1]
    with pytest.raises(ConfigError, match="3 nodes for server.num_servers 1 and 1 of reward models: some would have"):
        with_models(nodes.replace("nodes: 2}", "nodes: 3}"), models=f"[{SUMS}]")


def test_too_few_gpus_for_them_are_refused_before_the_queue():
    nodes = "cluster={num_nodes: 2, ranks_per_node: 8, num_rollout_nodes: 1}"
    told = r"a rollout node needs 9 GPUs for its share of server.num_servers 1 x server.tensor 2 and of reward model"
    with pytest.raises(PlanError, match=f"{told} sums, 1 x tensor 1 and of reward model style, 3 x tensor 2, and has"):
        job_size(with_models("server.tensor=2", nodes), site())


def test_their_steps_and_doctors(tmp_path):
    config = with_models("cluster={num_nodes: 2, ranks_per_node: 1}", models=f"[{SUMS}]")
    allocation = calls.read_allocation({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}, 2, 0)
    attempt = RunFolder(tmp_path / "run").new_attempt()
    steps = AttemptSteps(allocation, job_size(config, site()), site(), attempt, 1)
    (sums,) = steps.reward_servers().values()
    assert sums.indices == [0] and [node.name for node in sums.server_nodes(0)] == ["n2"]
    spec = sums.server(0)
    line = " ".join(spec.command)
    assert "--nodelist=n2" in line and "env CUDA_VISIBLE_DEVICES=1 " in line
    assert line.endswith(f"--attempt {attempt.path} --index 0 --host 10.0.0.2 --reward-model sums")
    assert (spec.kind, spec.of, spec.log) == ("reward server", "sums", reward_folder(attempt, "sums").server_log(0))
    assert spec.log.parent.is_dir()
    # The second node has no server of the policy, and is checked as one of servers all the same.
    doctors = {node.name: spec.command for node, spec in steps.doctors(1, fp8=False)}
    assert [command.count("--role") for command in doctors.values()] == [2, 2]


def test_a_run_on_recorded_rollouts_starts_none(tmp_path):
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal/step_00000000").touch()
    recorded = ["train.num_steps=1", f"train.from_rollouts={tmp_path}"]
    assert job_size(with_models(*recorded), site()).rewards == ()


def attempt_with(tmp_path, *codes):
    """What a supervisor says of an attempt whose reward model's servers end with these codes; None runs on."""
    attempt = RunFolder(tmp_path / "run").new_attempt()
    folder = make_reward_folder(attempt, "sums")
    said: list[str] = []
    wait = "import pathlib, sys, time\nwhile not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.02)\n"
    told = tmp_path / "over"
    specs = [ChildSpec("rank", 0, [sys.executable, "-c", wait, str(told)], attempt.rank_log(0))]
    for index, code in enumerate(codes):
        script = "import time; time.sleep(600)" if code is None else f"raise SystemExit({code})"
        command = [sys.executable, "-c", script]
        specs.append(ChildSpec("reward server", index, command, folder.server_log(index), of="sums"))

    def say(text: str) -> None:
        said.append(text)
        if "1 of 2 servers is left" in text:
            told.touch()

    return attempt, said, Supervisor(attempt, specs, say)


def test_one_that_is_given_up_leaves_the_run_to_the_others_of_its_model(tmp_path):
    attempt, said, supervisor = attempt_with(tmp_path, 3, None)
    assert supervisor.run() == 0
    (warning,) = [line for line in said if line.startswith("warning")]
    assert warning.startswith("warning  reward server 0 of sums is given up: its process exited with code 3; 1 of 2")
    assert json.loads(reward_folder(attempt, "sums").server_file("server-0").read_text())["state"] == "failed"
    assert list(attempt.servers_dir.glob("*.json")) == []


def test_the_last_one_of_a_model_that_is_given_up_ends_the_run(tmp_path):
    _, said, supervisor = attempt_with(tmp_path, 3)
    with pytest.raises(GspoMegaError, match="reward server 0 of sums exited with code 3"):
        supervisor.run()
    assert "no server of 1 is left" in said[-1]


def test_starts_that_fail_count_for_each_server_by_itself(tmp_path, monkeypatch):
    """Two models have a server 0 each."""
    monkeypatch.setattr(step_starts, "ASK_AGAIN_SECONDS", 0.0)
    attempt, family, said = RunFolder(tmp_path / "run").new_attempt(), ProcessFamily(), []
    starts = step_starts.Starts(family, attempt, said.append)
    refused = [sys.executable, "-c", "import sys; sys.exit('srun: error: Unable to create step')"]
    specs = [
        ChildSpec("reward server", 0, refused, make_reward_folder(attempt, name).server_log(0), of=name)
        for name in ("sums", "style")
    ]
    try:
        children: list[Child | None] = [starts.start(spec) for spec in specs]
        for _ in range(2):
            for child in filter(None, children):
                until(lambda child=child: child.exit_code is not None)
            children = [starts.restart(child) for child in filter(None, children)]
        assert len(children) == 2 and None not in children, said
        until(lambda: all(child is not None and child.exit_code is not None for child in children))
        assert [starts.restart(child) for child in filter(None, children)] == [None, None]
    finally:
        family.close(1.0)
    assert len(said) == 4 and "srun could not start reward server 0 of style; trying again" in said[1]

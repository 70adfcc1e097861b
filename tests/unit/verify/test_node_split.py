"""The divisions of nodes between trainer and servers: what is left for the policy's servers beside reward models."""

from pathlib import Path

import pytest
from run_configs import smallest_yaml

from gspo_mega.base.errors import PlanError
from gspo_mega.config import load_config
from gspo_mega.models.tensors import count_parameters
from gspo_mega.plan import plan_run
from gspo_mega.plan.state import ModelShares
from gspo_mega.verify.simulate.job import job_of
from gspo_mega.verify.simulate.outcome import splits

SHAPE = Path(__file__).parents[3] / "configs" / "models" / "quickstart_moe.json"


def divided(tmp_path, num_nodes, model):
    path = tmp_path / "c.yaml"
    path.write_text(smallest_yaml(prompts_per_step=8, model=str(SHAPE)))
    reward = ["reward.functions=[{function: sums}]", f"reward.model=[{model}]"]
    loaded = load_config(path, [*reward, "cluster={gpus_per_node: 4, ranks_per_node: 4}", "publish.verify=replicas"])
    plan = plan_run(loaded)
    shares = ModelShares(plan.spec)
    return shares, splits(plan, shares, num_nodes, loaded.where)


def test_servers_of_reward_models_have_their_share(tmp_path):
    model = "{name: sums, path: m, tensor: 4}"
    # Of the two nodes beside one trainer's, one is the reward model's; beside two trainers' both do not fit.
    _, found = divided(tmp_path, 3, model)
    sizes = [(one.trainer_nodes, one.server_nodes, one.config.server.num_servers) for one in found]
    assert sizes == [(1, 2, 4)]
    asked = divided(tmp_path, 3, "{name: sums, url: 'http://127.0.0.1:9'}")[1]
    assert [(one.trainer_nodes, one.config.server.num_servers) for one in asked] == [(1, 8), (2, 4)]
    with pytest.raises(PlanError, match="1 nodes of 4 GPUs for servers of 1 and 4 GPUs of reward models"):
        divided(tmp_path, 2, model)


def test_their_gpus_are_the_jobs(tmp_path):
    shares, (split, *_) = divided(tmp_path, 4, "{name: sums, path: m, tensor: 4}")
    job = job_of(split.config, shares, split.layout, count_parameters(shares.spec))
    assert job.num_gpus == 4 + 8 + 4

"""`batch.share_prefixes`: what it was not compared with, or what leaves it without effect, is refused by name."""

import pytest
from config_refusals import refused

from gspo_mega.config import load_config

ON = "batch.share_prefixes=prompts"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["batch.group_size=1"], "batch.share_prefixes: prompts with `group_size: 1`: no two rows have a prompt"),
        (
            ["batch.prompts_per_step=4", "batch.num_mini_batches=5"],
            "batch.num_mini_batches: 5 with `batch.share_prefixes: prompts`, which deals whole groups to mini-batches,"
            " and a step has 4; at most 4, or `share_prefixes: off`",
        ),
        (["engine.batch_invariant=true"], "engine.batch_invariant: true with `batch.share_prefixes: prompts`"),
        (
            ["lora={rank: 4, alpha: 8, dropout: 0.1}"],
            "lora.dropout: 0.1 with `batch.share_prefixes: prompts`: rows would",
        ),
    ],
)
def test_what_contradicts_it_is_refused(write, overrides, said):
    assert said in refused(write(), ON, *overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["precision=bf16"],
        ["precision=bf16", "engine.transformer_engine=true"],
        ["precision=fp8"],
        ["parallel.tensor=2", "cluster.ranks_per_node=2"],
        ["parallel.context=2", "cluster.ranks_per_node=2"],
        ["moe.load_balancing=aux_loss", "moe.load_balancing_coefficient=0.01", "moe.z_loss_coefficient=0.1"],
    ],
)
def test_what_was_compared_is_allowed(write, overrides):
    assert load_config(write(), [ON, *overrides]).config.batch.share_prefixes == "prompts"


def test_branches_of_an_episode_have_something_in_common_in_a_group_of_one(write):
    alone = ["algorithm=ppo", "batch.group_size=1", "batch.share_prefixes=full"]
    assert "full with `group_size: 1`: no two rows" in refused(write(), *alone)
    episodes = ["rollout.episode=package.module:episode", "episodes.max_tokens=64"]
    assert load_config(write(), [*alone, *episodes]).config.batch.share_prefixes == "full"

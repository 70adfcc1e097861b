"""Layouts of a run that has lost nodes: what stays, what is searched, and where a run cannot go on."""

import pytest

from gspo_mega.base.errors import ConfigError, PlanError
from gspo_mega.config import load_config, render_config
from gspo_mega.plan.fewer_nodes import fewer_nodes_lines, fit_to_nodes, nodes_to_grow

SHRINK = ("train.on_lost_node=shrink", "train.min_nodes=1")


def load(file, *overrides):
    return load_config(f"configs/{file}.yaml", [*SHRINK, *overrides], "train")


def small(*overrides):
    """Four nodes of two ranks: tensor 2, data 4."""
    sizes = ("parallel={tensor: 2, expert: 2}", "cluster={num_nodes: 4, ranks_per_node: 2}")
    return load("quickstart", "model.path=configs/models/quickstart_moe.json", *sizes, *overrides)


FOUR_OF_ONE_RANK = ("parallel={tensor: 1, expert: 4}", "cluster={num_nodes: 4, ranks_per_node: 1}")
# No layout divides five ranks: four trajectories, and no part of gated delta nets has a size that 5 divides.
SIX_OF_ONE_RANK = (
    "model.path=configs/models/certify_qwen3_5.json",
    "parallel={tensor: 2}",
    "cluster={num_nodes: 6, ranks_per_node: 1}",
    "batch.prompts_per_step=1",
    "batch.group_size=4",
    "batch.num_mini_batches=1",
)


def test_the_data_parallel_size_becomes_smaller_and_nothing_else():
    whole = small()
    found = fit_to_nodes(whole, 3, "cpu")
    before, now = whole.config, found.config
    assert now.cluster.num_nodes == 3
    assert now.model_copy(update={name: getattr(before, name) for name in ("cluster", "server", "train")}) == before
    assert now.train == before.train.model_copy(update={"on_lost_node": "wait"})
    assert fit_to_nodes(whole, 4, "cpu") is whole and fit_to_nodes(whole, 9, "cpu") is whole


def test_ranks_can_read_the_configuration_of_the_fewest_nodes(tmp_path):
    found = fit_to_nodes(small(), 1, "cpu").config
    (tmp_path / "attempt.yaml").write_text(render_config(found))
    assert load_config(tmp_path / "attempt.yaml", (), "train").config == found


def test_servers_on_the_ranks_nodes_become_fewer_with_them_others_stay():
    assert fit_to_nodes(small("server.num_servers=4"), 3, "cpu").config.server.num_servers == 3
    assert fit_to_nodes(small("server.num_servers=1"), 3, "cpu").config.server.num_servers == 1
    apart = small("server.num_servers=4", "cluster.num_rollout_nodes=2")
    assert fit_to_nodes(apart, 3, "cpu").config.server.num_servers == 4


def test_a_layout_that_does_not_divide_the_ranks_is_searched_with_the_same_batch():
    whole = load("llama3_70b_8nodes")
    found = fit_to_nodes(whole, 3, "gpu").config
    before = whole.config
    assert found.cluster.num_nodes == 3 and before.parallel.pipeline * before.parallel.tensor == 16  # not of 24 ranks
    sizes = found.parallel
    assert 24 % (sizes.tensor * sizes.pipeline * sizes.context) == 0 and sizes.expert == 1
    assert (found.batch, found.optimizer, found.precision) == (before.batch, before.optimizer, before.precision)


def test_experts_are_divided_otherwise_where_their_ranks_are_lost():
    whole = small(*FOUR_OF_ONE_RANK)
    found = [fit_to_nodes(whole, number, "cpu").config for number in (3, 1)]
    # No size above 1 divides both 3 ranks and 8 experts.
    assert [(one.cluster.num_nodes, one.parallel.expert) for one in found] == [(3, 1), (1, 1)]


def test_fewer_than_the_least_are_not_enough():
    with pytest.raises(PlanError, match="no layout on 2 nodes:\n2 nodes are fewer than 3"):
        fit_to_nodes(small("train.min_nodes=3"), 2, "cpu")


def test_how_many_more_nodes_would_be_used():
    whole = small(*SIX_OF_ONE_RANK)
    assert fit_to_nodes(whole, 5, "cpu").config.cluster.num_nodes == 4
    assert nodes_to_grow(whole, 6, "cpu") == 0
    assert nodes_to_grow(whole, 5, "cpu") == 1
    assert nodes_to_grow(whole, 4, "cpu") == 2, "five nodes have no larger layout than four"


def test_the_plan_says_what_the_run_would_go_on_with():
    assert fewer_nodes_lines(small("train.min_nodes=2"), "cpu") == [
        "with 3 nodes: TP2 EP2 DP3",
        "with 2 nodes: TP2 EP2 DP2",
    ]
    assert fewer_nodes_lines(load_config("configs/quickstart.yaml", (), "train"), "cpu") == []


@pytest.mark.parametrize(("nodes", "text"), [(3, "at most 2"), (1, "valid: `on_lost_node: wait`")])
def test_a_run_that_could_not_shrink_is_refused(nodes, text):
    with pytest.raises(ConfigError, match=f"train.min_nodes: 3 with cluster.num_nodes {nodes}.*{text}"):
        load("quickstart", "train.min_nodes=3", f"cluster.num_nodes={nodes}")

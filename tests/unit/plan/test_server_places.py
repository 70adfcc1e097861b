"""Which nodes and GPUs servers have: the policy's first, then those of reward models where the fewest are in use."""

import pytest
from run_configs import make_config

from gspo_mega.plan.servers import RewardPlace, place_servers, reward_gpus, reward_servers


def config_with(models, **sections):
    functions = tuple(dict(function=model["name"]) for model in models)
    return make_config(reward=dict(functions=functions, model=models), **sections)


MODELS = (
    dict(name="large", path="m", tensor=4),
    dict(name="asked", url="http://127.0.0.1:9/"),
    dict(name="small", path="m", num_servers=2),
)


def test_only_those_with_a_path_are_started():
    config = config_with(MODELS)
    assert [(model.name, index) for model, index in reward_servers(config.reward)] == [
        ("large", 0),
        ("small", 0),
        ("small", 1),
    ]
    assert reward_gpus(config.reward) == 6


@pytest.mark.parametrize(
    ("num_ranks", "colocated", "places", "gpus"),
    [
        # The largest is dealt first, so the policy's servers of two GPUs are on the other node, the last one beside it.
        (0, False, [("large", 0, 0, 2, 4), ("small", 0, 1, 4, 1), ("small", 1, 1, 5, 1)], (6, 6)),
        (6, False, [("large", 0, 0, 8, 4), ("small", 0, 1, 10, 1), ("small", 1, 1, 11, 1)], (12, 12)),
        # In turns on the ranks' GPUs: reward models alone need more.
        (6, True, [("large", 0, 0, 6, 4), ("small", 0, 1, 6, 1), ("small", 1, 1, 7, 1)], (10, 8)),
    ],
)
def test_each_is_dealt_to_the_node_with_the_fewest_gpus_in_use(num_ranks, colocated, places, gpus):
    config = config_with(MODELS, server=dict(num_servers=3, tensor=2))
    config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"colocated": colocated})})
    found = place_servers(config, 3, 2, num_ranks)
    assert found.by_node == (((0, 2), (1,)) if colocated else ((2,), (0, 1)))
    assert found.rewards == tuple(RewardPlace(*place) for place in places) and found.gpus == gpus


def test_a_server_of_a_whole_node_leaves_the_others_whole_to_the_policy():
    config = config_with((dict(name="large", path="m", tensor=8),))
    found = place_servers(config, 24, 4)
    assert [place.node for place in found.rewards] == [0] and found.gpus == (8, 8, 8, 8)


def test_without_reward_models_they_are_dealt_in_turn():
    assert place_servers(make_config(), 5, 2).by_node == ((0, 2, 4), (1, 3))
    found = place_servers(make_config(server=dict(num_servers=2, tensor=4, num_nodes=2)), 2, 4)
    assert (found.by_node, found.rewards, found.gpus) == (((0,), (0,), (1,), (1,)), (), (2, 2, 2, 2))

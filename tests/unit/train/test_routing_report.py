"""From the ranks' sums to the metrics of a model with experts."""

import pytest

from gspo_mega.config.schema import Moe
from gspo_mega.metrics.catalogue import find_metric
from gspo_mega.train.reports import changed_routes, expert_loads, replaced_experts, router_losses


def test_the_load_is_the_mean_over_layers_and_steps_and_absent_where_the_bias_stands_still():
    # Two optimizer steps over three layers, told by one rank; the other has nothing to tell.
    reports = [
        {"load_max_over_mean": 4.5, "num_loads": 3.0},
        {},
        {"load_max_over_mean": 6.0, "num_loads": 3.0},
        {"changed_since_old": 1.0},
    ]
    assert expert_loads(reports) == {"routing/load_max_over_mean": pytest.approx(10.5 / 6)}
    assert expert_loads([{}, {"z_loss": 1.0}]) == {}


def test_the_load_of_expert_ranks_is_a_mean_over_what_was_exchanged_and_the_largest():
    reports = [
        {"rank_load_max_over_mean": 4.5, "num_rank_loads": 3.0, "rank_load_max": 1.9},
        {},  # another rank of the same exchange
        {"rank_load_max_over_mean": 1.1, "num_rank_loads": 1.0, "rank_load_max": 1.1},
    ]
    assert expert_loads(reports) == {
        "routing/rank_load_max_over_mean": pytest.approx(1.4),
        "routing/rank_load_max": 1.9,
    }
    assert all(find_metric(name).name == name for name in expert_loads(reports))


def test_replaced_experts_are_shares_of_a_layers_choices_over_all_ranks():
    reports = [{"replaced/1": 3.0, "choices/1": 10.0}, {"replaced/1": 1.0, "choices/1": 6.0, "z_loss": 1.0}]
    reports += [{"replaced/10": 0.0, "choices/10": 4.0, "replaced/2": 0.0, "choices/2": 0.0}]
    found = replaced_experts(reports)
    assert found == {"routing/layer/1/replaced_since_old": 0.25, "routing/layer/10/replaced_since_old": 0.0}
    assert list(found) == [f"routing/layer/{layer}/replaced_since_old" for layer in (1, 10)]
    assert all(find_metric(name).name == "routing/layer/<layer>/replaced_since_old" for name in found)


def test_every_name_is_in_the_catalogue():
    reports = [
        {
            "load_max_over_mean": 4.5,
            "num_loads": 3.0,
            "load_balancing_loss": 2.0,
            "z_loss": 1.0,
            "num_router_losses": 2.0,
        }
    ]
    reports += [{"changed_since_old": 1.0, "compared_with_old": 4.0}]
    moe = Moe(load_balancing="aux_loss", load_balancing_coefficient=1e-3, z_loss_coefficient=1e-3)
    found = router_losses(moe, reports) | expert_loads(reports) | changed_routes("old", reports)
    assert found["routing/changed_since_old"] == 0.25 and len(found) == 4
    for name in found:
        assert find_metric(name).name == name

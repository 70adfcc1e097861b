"""Routes of experts: replayed in every layout, checked, compared; the router losses mean the same in every layout."""

from __future__ import annotations

import numpy as np
import pytest
from layout_jobs import recorded_sequences
from layout_models import make_folder

LAYOUTS = {
    "EP2": dict(expert=2),
    "TP2+SP-EP2": dict(tensor=2, expert=2),
    "PP2": dict(pipeline=2),
    "PP2-VPP2": dict(pipeline=2, virtual_pipeline=2),
    "CP2": dict(context=2),
}
JOBS = "routing_jobs:"


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return str(make_folder(tmp_path_factory.mktemp("moe") / "moe", moe=True))


@pytest.fixture(scope="session")
def alone(rank_pools, folder):
    """Results of one rank, by job and arguments."""
    results: dict = {}

    def run(job: str, **arguments) -> dict:
        key = (job, repr(sorted(arguments.items())))
        if key not in results:
            results[key] = rank_pools(1).run(JOBS + job, folder=folder, parallel={}, **arguments)[0]
        return results[key]

    return run


def assert_same_gradient(got: dict[str, np.ndarray], want: dict[str, np.ndarray], tolerance: float = 1e-5) -> None:
    assert got.keys() == want.keys()
    for name, reference in want.items():
        norm = np.linalg.norm(reference)
        assert norm > 0, f"{name} has no gradient: the comparison would prove nothing"
        assert np.linalg.norm(got[name] - reference) <= tolerance * norm, name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_old_routes_are_replayed_in_every_layout(rank_pools, folder, alone, layout):
    """Four micro-batches, two at once in flight between pipeline stages."""
    want = alone("replay_old_routes")
    got = rank_pools(2).run(JOBS + "replay_old_routes", folder=folder, parallel=LAYOUTS[layout])[0]
    trained = want["same"] > -np.inf
    assert np.array_equal(got["same"][trained], np.zeros(trained.sum())), (
        "under unchanged weights old and current are the same to the bit"
    )
    # Other router weights: the log-probs are those of the old routes under them, as on one rank, and not of the routes
    # that the routers would choose now.
    assert np.abs(got["replayed"] - want["replayed"])[trained].max() < 1e-5
    assert np.abs(want["replayed"][trained]).max() > 1e-3
    assert_same_gradient(got["gradient"], want["gradient"])
    free = want["free"] / np.maximum(1, [s["mask"].sum() for s in recorded_sequences()])
    assert np.abs(free - want["replayed"])[trained].max() > 1e-3
    # The shares of changed routes are counted once each, whoever holds the layer and the position.
    assert got["changed"]["compared_with_old"] == want["changed"]["compared_with_old"]
    assert abs(got["changed"]["changed_since_old"] - want["changed"]["changed_since_old"]) <= 2, (
        "a tie may fall either way"
    )
    assert 0.05 < want["changed"]["changed_since_old"] / want["changed"]["compared_with_old"] < 0.95
    layers = [name.removeprefix("choices/") for name in want["changed"] if name.startswith("choices/")]
    assert len(layers) == 4 and got["changed"].keys() == want["changed"].keys()
    for layer in layers:
        assert got["changed"][f"choices/{layer}"] == want["changed"][f"choices/{layer}"]
        replaced = want["changed"][f"replaced/{layer}"]
        assert abs(got["changed"][f"replaced/{layer}"] - replaced) <= 2 and replaced > 0, layer


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_rollout_engines_routes_are_replayed_in_every_layout(rank_pools, folder, alone, layout):
    want = alone("replay_rollout_routes", mode="R3", seed=1)
    got = rank_pools(2).run(JOBS + "replay_rollout_routes", folder=folder, parallel=LAYOUTS[layout], mode="R3", seed=1)[
        0
    ]
    assert np.abs(got["log_ratios"] - want["log_ratios"]).max() < 40 * 1e-5
    trained = want["log_s"] > -np.inf
    assert np.array_equal(got["log_s"][trained], np.zeros(trained.sum()))
    assert_same_gradient(got["gradient"], want["gradient"])
    loads = got["rank_loads"]
    if "EP2" not in layout:
        assert loads == {}, "no tokens are exchanged"
        return
    ratios = (got["counted"].max(axis=2) / got["counted"].mean(axis=2)).flatten()
    assert loads["num_rank_loads"] == ratios.size == (8 if layout == "EP2" else 16)
    assert loads["rank_load_max_over_mean"] == pytest.approx(ratios.sum()) and ratios.std() > 0.01
    assert loads["rank_load_max"] == pytest.approx(ratios.max())


def test_other_routes_give_other_log_probs(alone):
    """Every expert exchanged for another on purpose; and without replay the engine's routes are compared, not
    followed.
    """
    given = alone("replay_rollout_routes", mode="R3", seed=1)
    permuted = alone("replay_rollout_routes", mode="R3", seed=1, permuted=True)
    free = alone("replay_rollout_routes", mode="none", seed=1)
    masked = given["log_ratios"] == 0  # the sequence without an active token
    assert masked.sum() == 1
    for one, other in ((given, permuted), (given, free)):
        assert (np.abs(one["log_ratios"] - other["log_ratios"])[~masked] > 1e-4).all()
    counts = free["routing"]
    # Two of eight experts at random are the trainer's two in 1 of 28 cases.
    assert 0.9 < counts["changed_since_rollout"] / counts["compared_with_rollout"] < 0.99
    assert free["routing_of_training"]["changed_since_old"] == 0 < free["routing_of_training"]["compared_with_old"]
    assert given["routing"] == {} and given["routing_of_training"] == {}, (
        "what is replayed cannot differ: there is nothing to report"
    )


def test_the_trainers_own_routes_change_nothing(rank_pools, folder):
    result = rank_pools(1).run(JOBS + "replay_own_routes", folder=folder, parallel={})[0]
    assert np.array_equal(result["replayed"], result["free"]) and np.abs(result["free"]).max() > 0


@pytest.mark.parametrize("layout", ["alone", "PP2", "PP2-VPP2", "TP2+SP-EP2"])
@pytest.mark.parametrize(
    "job", [("replay_old_routes", {}), ("replay_rollout_routes", dict(mode="R3", seed=1))], ids=["R2", "R3"]
)
def test_recomputed_layers_take_the_same_routes(rank_pools, folder, layout, job):
    name, arguments = job
    world = 1 if layout == "alone" else 2
    gradients = [
        rank_pools(world).run(
            JOBS + name,
            folder=folder,
            parallel=LAYOUTS.get(layout, {}),
            recompute=dict(granularity=granularity),
            **arguments,
        )[0]["gradient"]
        for granularity in ("none", "full")
    ]
    assert_same_gradient(gradients[1], gradients[0], tolerance=1e-6)


def test_a_router_that_goes_elsewhere_is_an_error(rank_pools, folder):
    assert "layers [2] used other experts" in rank_pools(1).run(JOBS + "spoilt_replay", folder=folder)[0]


LOSSES = dict(load_balancing="aux_loss", load_balancing_coefficient=0.3, z_loss_coefficient=0.05)


@pytest.mark.parametrize("layout", {"DP2": {}, **LAYOUTS})
def test_router_losses_mean_the_same_in_every_layout(rank_pools, folder, alone, layout):
    want, without = alone("balance", moe=LOSSES), alone("balance")
    got = rank_pools(2).run(JOBS + "balance", folder=folder, parallel=LAYOUTS.get(layout, {}), moe=LOSSES)[0]
    assert_same_gradient(got["gradient"], want["gradient"])
    routers = [name for name in want["gradient"] if name.endswith("mlp.gate.weight")]
    assert len(routers) == 4
    for name in routers:
        assert np.linalg.norm(want["gradient"][name] - without["gradient"][name]) > 0.1 * np.linalg.norm(
            without["gradient"][name]
        )
    for name in ("load_balancing_loss", "z_loss", "num_router_losses"):
        assert got["sums"][name] == pytest.approx(want["sums"][name], rel=1e-5)
    assert want["sums"]["num_router_losses"] == 4 * 4
    losses = {
        name for name in without["sums"] if "since_old" not in name and "with_old" not in name and "/" not in name
    }
    assert want["old"].keys() == losses == set(), "training passes only"


@pytest.mark.parametrize(
    "losses",
    [dict(LOSSES, z_loss_coefficient=0.0), dict(z_loss_coefficient=0.05), LOSSES],
    ids=["balance", "z", "both"],
)
def test_the_coefficient_is_the_weight_of_the_mean_over_positions(rank_pools, folder, losses):
    """Packs of unequal length, so that a plain mean over packs would be another number."""
    result = rank_pools(1).run(JOBS + "by_hand", folder=folder, moe=losses)[0]
    assert len(set(result["sizes"])) > 1
    assert np.linalg.norm(result["added"] - result["defined"]) < 1e-4 * np.linalg.norm(result["defined"])


def test_balancing_balances(rank_pools, folder):
    moe = dict(load_balancing="aux_loss", load_balancing_coefficient=10.0)
    values = rank_pools(1).run(JOBS + "balance", folder=folder, parallel={}, steps=6, moe=moe)[0]["values"]
    losses = [v["load_balancing_loss"] / v["num_router_losses"] for v in values]
    assert losses[0] > 1.05 and losses[-1] < losses[0] - 0.02 and losses[-1] > 0.99, losses


def test_every_router_of_an_engine_sorts_in_the_old_pass(rank_pools, folder):
    (sorted_,) = rank_pools(1).run(JOBS + "experts_sorted", folder=folder, parallel={})
    assert len(sorted_) == 16 and all(sorted_)  # four layers, four packs

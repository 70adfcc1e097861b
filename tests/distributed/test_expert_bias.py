"""The expert bias: moved by what training passes counted and by nothing else, the same to the bit in every layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from expert_bias_jobs import RATE
from family_models import make_family_folder

LAYOUTS = {
    "DP2": {},
    "EP2": dict(expert=2),
    "TP2xEP2": dict(tensor=2, expert=2),
    "PP2": dict(pipeline=2),
    "CP2": dict(context=2),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(make_family_folder(tmp_path_factory.mktemp("bias") / "model", "deepseek_v3"))


@pytest.fixture(scope="module")
def one_rank(rank_pools, folder):
    return rank_pools(1).run("expert_bias_jobs:train", folder=folder, parallel={})[0]


def equal(one: list[dict], other: list[dict]) -> bool:
    return all(
        a.keys() == b.keys() and all(np.array_equal(a[n], b[n]) for n in a) for a, b in zip(one, other, strict=True)
    )


def test_a_step_moves_it_by_the_sign_of_what_was_counted(rank_pools, folder):
    seen = rank_pools(1).run("expert_bias_jobs:counted_by_hand", folder=folder)[0]
    assert sorted(seen["counts"]) == [1, 2, 3]  # layer 0 is dense
    told_apart = False
    for layer, counts in seen["counts"].items():
        name = f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
        want = seen["before"][name] + np.float32(RATE) * np.sign(counts.mean() - counts).astype(np.float32)
        assert np.array_equal(seen["after"][name], want) and not np.array_equal(want, seen["before"][name])
        padded = seen["everything"][layer]
        told_apart |= not np.array_equal(np.sign(padded.mean() - padded), np.sign(counts.mean() - counts))
    assert told_apart, "counting padding too would give the same"


def test_nothing_else_moves_it(rank_pools, folder):
    seen = rank_pools(1).run("expert_bias_jobs:left_alone", folder=folder)[0]
    assert seen == dict.fromkeys(["old pass", "gradients without a step", "reference", "skipped step"], True)


@pytest.mark.parametrize("name", LAYOUTS)
def test_it_is_the_same_to_the_bit_in_every_layout(rank_pools, folder, one_rank, name):
    seen = rank_pools(2).run("expert_bias_jobs:train", folder=folder, parallel=LAYOUTS[name])[0]
    assert equal(seen["biases"], one_rank["biases"])
    for loads, want in zip(seen["loads"], one_rank["loads"], strict=True):
        assert {n: loads[n] for n in ("num_loads", "load_max_over_mean")} == pytest.approx(
            {n: want[n] for n in ("num_loads", "load_max_over_mean")}
        )


def test_recomputation_counts_once(rank_pools, folder, one_rank):
    seen = rank_pools(1).run("expert_bias_jobs:train", folder=folder, parallel={}, recompute=dict(granularity="full"))[
        0
    ]
    assert equal(seen["biases"], one_rank["biases"])


def test_a_rate_of_zero_freezes_it_and_reports_nothing(rank_pools, folder, one_rank):
    seen = rank_pools(1).run("expert_bias_jobs:train", folder=folder, parallel={}, rate=0.0)[0]
    assert equal(seen["biases"], [one_rank["biases"][0]] * 4)
    assert not any("load" in name for loads in seen["loads"] for name in loads)
    assert all(load["num_loads"] == 3 and load["load_max_over_mean"] > 3 for load in one_rank["loads"])


def test_it_is_fp32_in_a_model_of_bf16(rank_pools, tmp_path):
    folder = make_family_folder(tmp_path / "model", "deepseek_v3", torch.bfloat16)
    seen = rank_pools(2).run(
        "expert_bias_jobs:train", folder=str(folder), parallel=dict(tensor=2, expert=2), precision="bf16"
    )[0]
    assert seen["dtypes"] == ["torch.float32"]
    for before, after in zip(seen["biases"], seen["biases"][1:]):
        for name in before:
            steps = np.abs(after[name] - before[name])
            assert steps.dtype == np.float32 and np.allclose(steps[steps > 0], RATE, rtol=1e-3) and (steps > 0).any()


@pytest.mark.parametrize("replay", ["R2", "R3"])
def test_replayed_routes_are_what_counts(rank_pools, folder, one_rank, replay):
    """All steps of a batch then count alike, and move the same way."""
    seen = rank_pools(2).run("expert_bias_jobs:train", folder=folder, parallel=dict(expert=2), replay=replay)[0]
    first, *rest = [
        {n: np.sign(after[n] - before[n]) for n in after} for before, after in zip(seen["biases"], seen["biases"][1:])
    ]
    assert all(equal([first], [other]) for other in rest) and any(step.any() for step in first.values())
    assert equal(seen["biases"][:2], one_rank["biases"][:2]) == (replay == "R2")


def test_it_evens_out_a_skewed_load(rank_pools, folder):
    loads = rank_pools(1).run("expert_bias_jobs:skewed", folder=folder, steps=12)[0]
    assert loads[0] > 3 and max(loads[-5:]) < 2, loads


@pytest.mark.parametrize(
    "parallel, precision", [({}, "fp32"), (dict(pipeline=2), "fp32"), (dict(tensor=2, expert=2), "bf16")]
)
def test_a_run_with_it_goes_on_to_the_bit_where_it_stopped(rank_pools, folder, tmp_path, parallel, precision):
    pool, other = rank_pools(2), make_family_folder(tmp_path / "other", "deepseek_v3", seed=9)
    common = dict(
        folder=folder,
        parallel=parallel,
        precision=precision,
        moe=dict(expert_bias_update_rate=0.01),
        optimizer=dict(lr=1e-3),
    )
    straight = pool.run(
        "checkpoint_jobs:run", run_dir=str(tmp_path / "a"), plan=["start", "train", "save", "train", "train"], **common
    )[0]
    pool.run("checkpoint_jobs:run", run_dir=str(tmp_path / "b"), plan=["start", "train", "save"], **common)
    resumed = pool.run(
        "checkpoint_jobs:run",
        run_dir=str(tmp_path / "b"),
        plan=["start", "load", "train", "train"],
        weights_from=str(other),
        **common,
    )[0]
    moved = [name for name in straight["weights"] if name.endswith("e_score_correction_bias")]
    assert len(moved) == 3 and resumed["weights"].keys() == straight["weights"].keys()
    for name, want in straight["weights"].items():
        assert np.array_equal(resumed["weights"][name], want), name

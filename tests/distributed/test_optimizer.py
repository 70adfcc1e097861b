"""The optimizer on real ranks: overlap changes nothing, decay is where it belongs, a bad gradient is never applied."""

from __future__ import annotations

import math

import numpy as np
import pytest
from layout_models import make_folder


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return str(make_folder(tmp_path_factory.mktemp("models") / "dense", moe=False))


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return str(make_folder(tmp_path_factory.mktemp("models") / "tied", moe=False, tied=True))


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    return str(make_folder(tmp_path_factory.mktemp("models") / "moe", moe=True))


OVERLAPS = {
    "DP2": (2, "dense", {}, {}),
    "DP2-tied-recompute": (2, "tied", {}, dict(recompute=dict(granularity="full"))),
    # Buckets decide in which order the norm is added up. Clipped by a norm with another last bit, bf16 weights now and
    # then round the other way; not clipped, they are the same.
    "DP2-bf16": (2, "dense", {}, dict(precision="bf16", clip_grad=0.0)),
    "DP2-bf16-gradients": (2, "dense", {}, dict(precision="bf16", clip_grad=0.0, gradients="bf16")),
    "EP2": (2, "moe", dict(expert=2), {}),
    "DP2-MoE": (2, "moe", {}, {}),
    "DP2-not-distributed": (2, "dense", {}, dict(distributed=False)),
    "DP2-PP2-VPP2-not-distributed": (4, "dense", dict(pipeline=2, virtual_pipeline=2), dict(distributed=False)),
    "DP2-PP2": (4, "dense", dict(pipeline=2), {}),
    "DP2-PP2-VPP2": (4, "dense", dict(pipeline=2, virtual_pipeline=2), {}),
}


@pytest.mark.parametrize("name", OVERLAPS)
def test_overlap_changes_no_weight(rank_pools, request, name):
    world, model, parallel, sections = OVERLAPS[name]
    result = rank_pools(world).run(
        "optimizer_jobs:overlapped",
        folder=request.getfixturevalue(model),
        parallel={"expert_tensor": 1, **parallel},
        **sections,
    )[0]
    assert max(result[True]["buckets"]) > 1  # else there is nothing to overlap
    assert result[True]["norms"] == pytest.approx(result[False]["norms"], rel=1e-6)
    for tensor, want in result[False]["weights"].items():
        difference = np.linalg.norm(result[True]["weights"][tensor] - want)
        assert difference <= 1e-6 * np.linalg.norm(want), tensor


@pytest.mark.parametrize("parallel", [{}, dict(expert=2)], ids=["DP2", "EP2"])
def test_gradients_in_bf16_are_those_in_fp32_but_for_their_rounding(rank_pools, moe, parallel):
    """Each sum of gradients is off by at most 2^-9 of its size for each addition, of which there are few here."""
    found = rank_pools(2).run("optimizer_jobs:gradients", folder=moe, parallel={"expert_tensor": 1, **parallel})[0]
    assert (found["fp32"]["dtypes"], found["bf16"]["dtypes"]) == (["torch.float32"], ["torch.bfloat16"])
    first, rounded = found["fp32"]["norms"][0], found["bf16"]["norms"][0]
    assert rounded == pytest.approx(first, rel=4 * 2**-9) and rounded != first
    moved = [np.abs(found["bf16"]["weights"][name] - want).max() for name, want in found["fp32"]["weights"].items()]
    assert max(moved) > 0


def test_a_run_under_overlap_resumes_bit_for_bit(rank_pools, dense, tmp_path):
    common = dict(folder=dense, parallel={}, optimizer=dict(lr=1e-3, overlap=True))
    straight = rank_pools(2).run(
        "checkpoint_jobs:run", run_dir=str(tmp_path / "a"), plan=["start", "train", "train", "save", "train"], **common
    )[0]
    rank_pools(2).run(
        "checkpoint_jobs:run", run_dir=str(tmp_path / "b"), plan=["start", "train", "train", "save"], **common
    )
    resumed = rank_pools(2).run(
        "checkpoint_jobs:run", run_dir=str(tmp_path / "b"), plan=["start", "load", "train"], **common
    )[0]
    assert resumed["step"] == 3
    for name, want in straight["weights"].items():
        assert np.array_equal(resumed["weights"][name], want), name


MATRIX, NORM = "layers.1.mlp.linear_fc1.weight", "layers.1.input_layernorm.weight"
# Tensor ranks hold copies of a norm, and only one of them counts in Megatron's norm of the gradient.
BAD = {
    "DP2": ({}, 1, MATRIX),
    "TP2": (dict(tensor=2, sequence=False), 1, MATRIX),
    "TP2-copy": (dict(tensor=2, sequence=False), 1, NORM),
    "PP2": (dict(pipeline=2), 1, MATRIX),
    "PP2-first": (dict(pipeline=2), 0, NORM),
}


@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])
@pytest.mark.parametrize("name", BAD)
def test_a_gradient_that_is_not_finite_is_skipped_by_all_ranks(rank_pools, dense, name, distributed):
    parallel, rank, parameter = BAD[name]
    results = rank_pools(2).run(
        "optimizer_jobs:one_bad_gradient",
        folder=dense,
        parallel=parallel,
        bad_rank=rank,
        parameter=parameter,
        optimizer=dict(lr=1e-3, warmup_steps=2, schedule="cosine", weight_decay=0.1, distributed=distributed),
    )
    for result in results:
        assert result["skipped"] == [False, True, False] and result["norm"] == math.inf
        assert result["changed"] == [] and result["moved"] > 0
        assert result["differs_from_plain"] == []


def test_a_skipped_step_under_overlap_and_bf16(rank_pools, dense):
    results = rank_pools(2).run(
        "optimizer_jobs:one_bad_gradient",
        folder=dense,
        parallel={},
        bad_rank=1,
        parameter=MATRIX,
        precision="bf16",
        optimizer=dict(lr=1e-3, overlap=True),
    )
    for result in results:
        assert (
            result["skipped"] == [False, True, False] and result["changed"] == [] and result["differs_from_plain"] == []
        )


@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])
def test_weight_decay_is_on_matrices_alone(rank_pools, dense, distributed):
    optimizer = dict(lr=0.25, weight_decay=0.5, distributed=distributed)
    parameters = rank_pools(1).run("optimizer_jobs:decayed", folder=dense, **optimizer)[0]
    norms = {name for name, (before, _) in parameters.items() if before.ndim == 1}
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in norms} == {
        "input_layernorm",
        "pre_mlp_layernorm",
        "q_layernorm",
        "k_layernorm",
        "final_layernorm",
    }
    for name, (before, after) in parameters.items():
        # 1 - lr x decay is 0.875, exact in binary: so is the product's rounding.
        assert np.array_equal(after, before if name in norms else before * np.float32(0.875)), name


def test_weight_decay_on_everything_where_asked_for(rank_pools, dense):
    parameters = rank_pools(1).run(
        "optimizer_jobs:decayed", folder=dense, lr=0.25, weight_decay=0.5, decay_norms_and_biases=True
    )[0]
    assert any(before.ndim == 1 for before, _ in parameters.values())
    for name, (before, after) in parameters.items():
        assert np.array_equal(after, before * np.float32(0.875)), name


@pytest.mark.parametrize("optimizer", [dict(distributed=False), dict(distributed=True)], ids=["plain", "distributed"])
def test_a_step_waits_for_the_device_once(rank_pools, moe, optimizer):
    assert rank_pools(2).run(
        "optimizer_jobs:host_reads", folder=moe, parallel=dict(expert=2, expert_tensor=1), **optimizer
    ) == [1, 1]

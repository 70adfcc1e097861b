"""FP8 through Transformer Engine: resumed equals uninterrupted to the bit, and an unchanged policy has a ratio of 1.

With the released Megatron, one that has several experts cannot save Transformer Engine's own extra state, and no other
can read that of `delayed` back: a pickle. None of it is in these checkpoints.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from layout_models import make_folder
from rank_pool import RankPool
from safetensors.torch import load_file

from gspo_mega.base.run_folder import RunFolder

CLIP_LOW = 3e-4

RECOVERED = {
    "tensorwise EP2": (True, dict(expert=2), dict(precision="fp8", fp8=dict(recipe="tensorwise"))),
    "delayed EP2, FP8 parameters": (
        True,
        dict(expert=2),
        dict(precision="fp8", fp8=dict(recipe="delayed", parameters=True)),
    ),
    "delayed TP2+SP": (False, dict(tensor=2), dict(precision="fp8", fp8=dict(recipe="delayed"))),
    "blockwise, FP8 parameters": (
        True,
        {},
        dict(precision="fp8", fp8=dict(recipe="blockwise", parameters=True)),
    ),
    "mxfp8": (False, {}, dict(precision="fp8", fp8=dict(recipe="mxfp8"))),
    "bf16 moments": (
        False,
        {},
        dict(precision="bf16", engine=dict(transformer_engine=True), moments_dtype="bf16"),
    ),
    "FP8 moments": (True, {}, dict(precision="fp8", fp8=dict(recipe="tensorwise"), moments_dtype="fp8")),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("fp8-models")
    return {
        moe: (
            str(make_folder(root / f"a{moe}", moe=moe, layers=2)),
            str(make_folder(root / f"b{moe}", moe=moe, layers=2, seed=9)),
        )
        for moe in (False, True)
    }


@pytest.fixture
def pool(rank_pools):
    return rank_pools(2, transformer_engine=True)


@pytest.mark.parametrize("name", RECOVERED)
def test_resumed_equals_uninterrupted(pool, models, tmp_path, name):
    moe, parallel, sections = RECOVERED[name]
    sections = dict(sections)
    optimizer = dict(lr=1e-3, moments_dtype=sections.pop("moments_dtype", "fp32"))
    folder, other = models[moe]
    RunFolder(tmp_path).new_attempt()
    # Copies in memory hold no tensors that are FP8 themselves, and the plan refuses them.
    copied = "FP8 parameters" not in name and name != "FP8 moments"
    memory = dict(machines=str(tmp_path / "machines")) if copied else {}
    common = dict(folder=folder, run_dir=str(tmp_path), parallel=parallel, optimizer=optimizer, **sections, **memory)
    plan = ["start", "train", "train", "save", *["copy"] * copied, "train", "train"]
    straight = pool.run("checkpoint_jobs:run", plan=plan, **common)[0]
    for act in ("load", "go on from copies") if copied else ("load",):
        resumed = pool.run("checkpoint_jobs:run", plan=["start", act, "train", "train"], weights_from=other, **common)[
            0
        ]
        assert resumed["step"] == straight["step"] == 4, resumed["warnings"]
        assert [n for n, want in straight["weights"].items() if not np.array_equal(resumed["weights"][n], want)] == []

    folder_of_state = tmp_path / "checkpoints" / "step_00000002" / "fp8"
    assert folder_of_state.is_dir() == ("delayed" in name)
    if folder_of_state.is_dir():  # tensors, of numbers that were measured
        state = load_file(folder_of_state / "rank_00001.safetensors")
        scales = torch.cat([value for key, value in state.items() if key.endswith("/scaling_bwd/scale")])
        assert len(scales) > 8 and (scales != 1).float().mean() > 0.4


def test_delayed_scales_go_along_into_another_layout(pool, models, tmp_path):
    """From two expert ranks, each with half of the experts, to two pipeline stages with all of them."""
    folder, other = models[True]
    common = dict(folder=folder, run_dir=str(tmp_path), optimizer=dict(lr=1e-3), precision="fp8")
    common["fp8"] = dict(recipe="delayed", parameters=True)
    saved = pool.run("checkpoint_jobs:run", parallel=dict(expert=2), plan=["start", "train", "save"], **common)
    loaded = pool.run(
        "checkpoint_jobs:run", parallel=dict(pipeline=2), plan=["start", "load"], weights_from=other, **common
    )
    # To the bit: a parameter that is rounded to FP8 with another scale is another number.
    assert all(np.array_equal(loaded[0]["weights"][name], want) for name, want in saved[0]["weights"].items())
    before, after = (
        {name: tensor for rank in ranks for name, tensor in rank["scales"].items()} for ranks in (saved, loaded)
    )
    scales = {name: tensor for name, tensor in before.items() if name.endswith("/scale")}
    assert len(scales) > 40 and before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in scales.items())
    trained = pool.run("checkpoint_jobs:run", parallel=dict(pipeline=2), plan=["start", "load", "train"], **common)[0]
    assert trained["step"] == 2


def test_delayed_scales_go_along_when_stages_are_cut_elsewhere(pool, tmp_path):
    """The same products of the same numbers: a run that goes on in the other stages has the bits of one that stays."""
    folder, other = (str(make_folder(tmp_path / f"m{seed}", moe=False, layers=3, seed=seed)) for seed in (3, 9))
    common = dict(folder=folder, run_dir=str(tmp_path), optimizer=dict(lr=1e-3), precision="fp8")
    common["fp8"] = dict(recipe="delayed")
    first, last = dict(pipeline=2, first_stage_layers=1), dict(pipeline=2, last_stage_layers=1)
    plan = ["start", "train", "train", "save", "train", "train"]
    straight = pool.run("checkpoint_jobs:run", parallel=first, plan=plan, **common)[0]
    moved = pool.run(
        "checkpoint_jobs:run", parallel=last, plan=["start", "load", "train", "train"], weights_from=other, **common
    )[0]
    assert moved["step"] == straight["step"] == 4
    assert [n for n, want in straight["weights"].items() if not np.array_equal(moved["weights"][n], want)] == []


@pytest.mark.parametrize("moe", [False, True])
def test_an_unchanged_policy_has_a_ratio_of_one_with_delayed_scales(pool, models, moe):
    common = dict(
        folder=models[moe][0],
        parallel=dict(expert=2) if moe else {},
        precision="fp8",
        fp8=dict(recipe="delayed"),
        optimizer=dict(lr=1e-3),
    )
    ranks = pool.run("fp8_jobs:steps", num_steps=2, held=True, **common)
    assert all(np.array_equal(step, np.zeros_like(step)) for rank in ranks for step in rank["log_s"])
    first, second = ranks[0]["scales"]
    assert not torch.equal(first["scaling_fwd"], second["scaling_fwd"])  # held, not for ever
    for direction in ("scaling_fwd", "scaling_bwd"):  # the largest gradient of 16 steps may stay that of the first
        assert (first[direction] != 1).any()
        if not moe:
            assert torch.equal(second[direction], ranks[1]["scales"][1][direction])

    # Without holding them the same passes leave the clip range; what this test compares is not idle.
    moving = pool.run("fp8_jobs:steps", num_steps=2, held=False, **common)
    assert np.mean(np.concatenate([rank["log_s"][1] for rank in moving]) > CLIP_LOW) > 0.3


def test_the_first_gradients_are_not_lost_below_the_first_scales(pool, models):
    """Of the size of a large batch's. With the scale 1 they round to 0, and what they would have caused with them."""

    def errors(**arguments):
        wanted, found = (
            pool.run("fp8_jobs:gradients", folder=models[False][0], denominator=1e6, optimizer=dict(lr=1e-3), **given)[
                0
            ]
            for given in (dict(precision="bf16", engine=dict(transformer_engine=True)), arguments)
        )
        return sorted(float((found[name] - wanted[name]).norm() / wanted[name].norm()) for name in wanted)

    delayed = dict(precision="fp8", fp8=dict(recipe="delayed"))
    assert errors(**delayed)[-1] < 0.7
    assert errors(**delayed, passes=1)[-1] > 0.95


def test_a_pass_of_the_budget_is_made_with_measured_scales(pool, models):
    delayed = dict(precision="fp8", fp8=dict(recipe="delayed"), optimizer=dict(lr=1e-3))
    for said, found, wanted in pool.run("fp8_jobs:scored", folder=models[False][0], **delayed):
        assert "before its scales were measured" in said
        assert len(found) == len(wanted) > 0 and all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_a_model_trains_with_block_scales_of_powers_of_two(pool, models, monkeypatch):
    """In processes of their own: Transformer Engine reads the rule when it is imported."""

    def trained(ranks, block_scales):
        return ranks.run(
            "fp8_jobs:block_scales",
            folder=models[False][0],
            precision="fp8",
            fp8=dict(recipe="blockwise", parameters=True, block_scales=block_scales),
            optimizer=dict(lr=1e-3),
        )[0]

    def are_powers(scales):
        scales = scales[scales < 0.1]  # a row of scales is padded with 1
        return len(scales) > 8 and (scales.log2() == scales.log2().round()).float().mean()

    monkeypatch.setenv("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "0")
    own = RankPool(2, transformer_engine=True)
    try:
        scales, log_probs = trained(own, "power_of_two")
        with pytest.raises(AssertionError, match="fp8.block_scales: float32 is float32 scales on a CPU"):
            trained(own, "float32")
    finally:
        own.kill()
    plain_scales, plain_log_probs = trained(pool, "float32")
    assert are_powers(scales) == 1 and are_powers(plain_scales) < 0.5
    gap = float((torch.cat(log_probs) - torch.cat(plain_log_probs)).abs().max())
    assert 0 < gap < 0.5  # other roundings of the same policy


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Weights as small as those of large models: with the scale 1 they lie among the coarsest numbers of e4m3."""
    return str(make_folder(tmp_path_factory.mktemp("small") / "m", moe=False, layers=2, deviation=0.005))


def test_small_delayed_parameters_are_loaded_with_scales_of_their_own(pool, small):
    sections = dict(precision="fp8", fp8=dict(recipe="delayed", parameters=True), optimizer=dict(lr=1e-3))
    for parallel in ({}, dict(tensor=2)):
        for errors in pool.run("fp8_jobs:imported", folder=small, parallel=parallel, fitted=True, **sections):
            assert len(errors) == 8 and max(errors) < 0.03  # e4m3's own
    plain = pool.run("fp8_jobs:imported", folder=small, parallel={}, fitted=False, **sections)[0]
    assert min(plain) > 0.08  # with the scale 1


def test_small_delayed_parameters_keep_their_numbers_in_another_layout(pool, models, small, tmp_path):
    sections = dict(precision="fp8", fp8=dict(recipe="delayed", parameters=True), optimizer=dict(lr=1e-5))
    common = dict(folder=small, run_dir=str(tmp_path), **sections)
    saved = pool.run("checkpoint_jobs:run", parallel={}, plan=["start", "train", "save"], **common)[0]["weights"]
    other = dict(parallel=dict(pipeline=2), weights_from=models[False][1])
    loaded = pool.run("checkpoint_jobs:run", plan=["start", "load"], **other, **common)[0]["weights"]
    assert all(np.array_equal(loaded[n], want) for n, want in saved.items())
    # A checkpoint of an earlier version has no scales for another layout.
    plan = ["start", "scales of an earlier version", "load"]
    loaded = pool.run("checkpoint_jobs:run", plan=plan, **other, **common)[0]["weights"]
    errors = [np.linalg.norm(loaded[n] - want) / np.linalg.norm(want) for n, want in saved.items()]
    assert 0 < max(errors) < 0.045  # two roundings
    assert pool.run("checkpoint_jobs:run", plan=[*plan, "train"], **other, **common)[0]["step"] == 2

"""Transformer Engine's layers over the CPU kernels, in a pool of ranks that load it: bf16 against Megatron's plain
layers, layouts against one rank, and each FP8 recipe.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conversions import quiet
from expert_bias_jobs import RATE
from family_models import make_family_folder
from layout_jobs import recorded_sequences
from layout_models import make_folder
from te_noise import GRADIENT_NOISE, LOG_PROB_NOISE, flat, per_token, relative, same_to_bf16

from gspo_mega.checkpoint.convert import to_megatron
from gspo_mega.checkpoint.tensor_sources import open_checkpoint

BF16 = dict(precision="bf16", engine=dict(transformer_engine=True))
LAYOUTS = {
    "TP2+SP": ("dense", dict(tensor=2)),
    "CP2": ("dense", dict(context=2)),
    "EP2": ("moe", dict(expert=2)),
}


# Of gated delta nets: sides that every recipe can multiply, on two ranks too.
DELTA = dict(hidden_size=64, intermediate_size=64, head_dim=32)
DELTA |= dict(linear_key_head_dim=16, linear_num_value_heads=16, linear_value_head_dim=8)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    made = {kind: str(make_folder(root / kind, moe=kind == "moe")) for kind in ("dense", "moe")}
    return made | {"delta": str(make_family_folder(root / "delta", "qwen3_5", **DELTA))}


@pytest.fixture(scope="module")
def computed(rank_pools, models):
    """What a layout computes in a process that has loaded Transformer Engine; each thing once."""
    known: dict = {}

    def compute(kind: str, parallel: dict, *, distributed: bool = False, align: int = 2, **sections) -> dict:
        world = 1 if not parallel else 2
        key = repr((kind, parallel, distributed, align, sections))
        if key not in known:
            optimizer = dict(lr=1e-3, distributed=distributed)
            job = dict(folder=models[kind], parallel=parallel, align=align, optimizer=optimizer) | sections
            known[key] = rank_pools(world, transformer_engine=True).run("layout_jobs:run_layout", **job)[0]
        return known[key]

    return compute


def test_plain_fp32_is_as_in_a_process_without_transformer_engine(rank_pools, models, computed):
    """To the bit in the passes; three steps of its Adam order their roundings differently from torch's."""
    plain = dict(folder=models["dense"], parallel={}, optimizer=dict(lr=1e-3, distributed=False))
    want = rank_pools(1).run("layout_jobs:run_layout", **plain)[0]
    got = computed("dense", {}, precision="fp32")
    assert np.array_equal(got["mismatch"], want["mismatch"])
    assert all(np.array_equal(got["gradient"][name], value) for name, value in want["gradient"].items())
    assert relative(flat(got["weights"]), flat(want["weights"])) < 1e-6


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_bf16_is_the_plain_layers_bf16(computed, kind):
    plain, engine = computed(kind, {}, precision="bf16"), computed(kind, {}, **BF16)
    same_to_bf16(engine, plain)
    assert per_token(engine, plain).max() > 1e-5, "the same to the bit would mean that one of them computed both"
    assert np.allclose(engine["grad_norms"], plain["grad_norms"], rtol=0.1)


def test_bf16_of_delta_nets_is_that_of_the_plain_layers_also_on_tensor_ranks(rank_pools, tmp_path):
    folder = str(make_family_folder(tmp_path / "delta", "qwen3_5"))

    def compute(parallel: dict, **sections) -> dict:
        job = dict(folder=folder, parallel=parallel, align=2, optimizer=dict(lr=1e-3, distributed=False)) | sections
        return rank_pools(2 if parallel else 1, transformer_engine=True).run("layout_jobs:run_layout", **job)[0]

    plain, engine = compute({}, precision="bf16"), compute({}, **BF16)
    same_to_bf16(engine, plain)
    assert per_token(engine, plain).max() > 1e-5, "the same to the bit would mean that one of them computed both"
    # Against one rank, the decays' gradients carry more noise, with plain layers too.
    same_to_bf16(compute(dict(tensor=2), **BF16), compute(dict(tensor=2), precision="bf16"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bf16_is_the_same_in_every_layout(computed, layout):
    kind, parallel = LAYOUTS[layout]
    same_to_bf16(computed(kind, parallel, **BF16), computed(kind, {}, **BF16))


# Of an FP8 product's operands each has 3 bits beside the leading one: a relative error of up to 2^-4.
@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "mxfp8", "delayed"])
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_fp8_follows_bf16(computed, kind, recipe):
    """Further from bf16 than bf16's own noise, and still the same policy and the same direction."""
    want = computed(kind, {}, align=32, **BF16)
    got = computed(kind, {}, align=32, precision="fp8", fp8=dict(recipe=recipe))
    assert 1e-3 < per_token(got, want).max() < 0.5
    mine, theirs = flat(got["gradient"]), flat(want["gradient"])
    cosine = float(mine @ theirs) / (np.linalg.norm(mine) * np.linalg.norm(theirs))
    assert 0.9 < cosine < 0.99999


def test_fp8_parameters_are_stepped_and_gathered(computed):
    """Two data ranks gather FP8 and bf16 parameters; the weights are those of one rank to an FP8 rounding."""
    sections = dict(precision="fp8", fp8=dict(recipe="blockwise", parameters=True), align=16, distributed=True)
    one, two = computed("moe", {}, **sections), computed("moe", dict(expert=2), **sections)
    start = computed("moe", {}, precision="fp8", fp8=dict(recipe="blockwise"), align=16, distributed=True)
    for name, weight in one["weights"].items():
        assert relative(two["weights"][name], weight) < 2**-4, name
    assert relative(flat(one["weights"]), flat(start["weights"])) < 2**-4
    assert np.allclose(one["grad_norms"], two["grad_norms"], rtol=0.1)


# Who owns the fp32 copies: Megatron, or Transformer Engine's Adam, which steps FP8 parameters with one scale itself.
OWNERS = {"Megatron": ("blockwise", "fp32"), "Megatron, small": ("blockwise", "bf16"), "Adam": ("delayed", "bf16")}


def fp8_parameters(owner: str) -> dict:
    recipe, moments = OWNERS[owner]
    fp8 = dict(recipe=recipe, parameters=True)
    return dict(precision="fp8", fp8=fp8, optimizer=dict(moments_dtype=moments), parallel=dict(expert=2))


@pytest.mark.parametrize(
    ("owner", "is_converted"), [*((owner, False) for owner in OWNERS), ("Megatron", True), ("Adam", True)]
)
def test_the_fp32_copies_of_fp8_parameters_are_the_loaded_numbers(rank_pools, models, tmp_path, owner, is_converted):
    """Else they lie on FP8's grid, and small steps change no weight. From Hugging Face's folder as from a converted
    one."""
    job = dict(folder=models["moe"], **fp8_parameters(owner))
    if is_converted:
        to_megatron(open_checkpoint(Path(models["moe"])), tmp_path / "megatron", progress=quiet)
        job |= dict(converted=str(tmp_path / "megatron"))
    for num, between, distance, left in rank_pools(2, transformer_engine=True).run("te_jobs:fp32_copies", **job):
        assert num > 0 and between > 1000 and distance == 0.0 and left == 0


TENSOR = dict(tensor=2)


@pytest.mark.parametrize("owner", ["Megatron", "Adam"])
def test_a_checkpoint_restores_the_fp32_copies_of_fp8_parameters_to_the_bit(rank_pools, models, tmp_path, owner):
    """And the FP8 numbers themselves, which a checkpoint holds as bf16."""
    other = str(make_folder(tmp_path / "other", moe=True, seed=9))
    job = dict(folder=models["moe"], other=other, run_dir=str(tmp_path), **fp8_parameters(owner))
    for seen in rank_pools(2, transformer_engine=True).run("te_jobs:restored_copies", **job):
        # E4M3 has 3 bits beside the leading one: off by at most 2^-4, and by less in the mean.
        assert seen["num"] > 0 and seen["between"] > 1000 and seen["from_fp32"] < 2**-4, seen
        assert seen["wrong"] == seen["stored_wrong"] == seen["differing"] == 0, seen


def test_a_checkpoint_of_delta_nets_in_fp8_is_restored_to_the_bit(rank_pools, models, tmp_path):
    """On two tensor ranks: the scales of recipe `delayed`, and fp32 copies of what is stored in FP8 and what is not."""
    other = str(make_family_folder(tmp_path / "other", "qwen3_5", seed=9, **DELTA))
    job = dict(folder=models["delta"], other=other, run_dir=str(tmp_path), **fp8_parameters("Adam"))
    for seen in rank_pools(2, transformer_engine=True).run("te_jobs:restored_copies", **job | {"parallel": TENSOR}):
        assert seen["num"] > 0 and seen["between"] > 1000 and seen["from_fp32"] < 2**-4, seen
        assert seen["wrong"] == seen["stored_wrong"] == seen["differing"] == 0, seen


@pytest.mark.parametrize("sections", [BF16, dict(precision="fp8", fp8=dict(recipe="blockwise"))], ids=["bf16", "fp8"])
def test_recomputed_layers_give_the_same_gradient_to_the_bit(computed, sections):
    want = computed("moe", {}, align=32, **sections)
    got = computed("moe", {}, align=32, recompute=dict(granularity="full", num_layers=1), **sections)
    assert all(np.array_equal(got["gradient"][name], gradient) for name, gradient in want["gradient"].items())


def test_given_routes_are_followed(rank_pools, models):
    """R3: the experts that a rollout engine chose, here at random, in Transformer Engine's grouped layers as in plain
    ones; unreplayed, log-probs differ."""

    def run(mode: str, **sections) -> dict:
        job = dict(folder=models["moe"], parallel={}, mode=mode, seed=1, precision="bf16", **sections)
        return rank_pools(1, transformer_engine=True).run("routing_jobs:replay_rollout_routes", **job)[0]

    engine = dict(transformer_engine=True)
    got, plain, free = run("R3", engine=engine), run("R3"), run("none", engine=engine)
    trained = got["log_s"] > -np.inf
    assert np.array_equal(got["log_s"][trained], np.zeros(trained.sum()))
    tokens = np.array([max(1, s["mask"].sum()) for s in recorded_sequences()])
    assert (np.abs(got["log_ratios"] - plain["log_ratios"]) / tokens).max() < LOG_PROB_NOISE
    assert (np.abs(got["log_ratios"] - free["log_ratios"]) / tokens)[trained].max() > 2 * LOG_PROB_NOISE
    assert relative(flat(got["gradient"]), flat(plain["gradient"])) < GRADIENT_NOISE


def test_the_old_passes_routes_are_followed(rank_pools, models):
    """R2: to the bit under the same weights, and as in plain layers under routers that would choose otherwise."""

    def run(is_engine: bool) -> dict:
        job = dict(folder=models["moe"], parallel={}, precision="bf16", engine=dict(transformer_engine=is_engine))
        return rank_pools(1, transformer_engine=True).run("routing_jobs:replay_old_routes", **job)[0]

    got, plain = run(True), run(False)
    trained = got["same"] > -np.inf
    assert np.array_equal(got["same"][trained], np.zeros(trained.sum()))
    assert np.abs(got["replayed"] - plain["replayed"])[trained].max() < LOG_PROB_NOISE
    tokens = np.array([max(1, s["mask"].sum()) for s in recorded_sequences()])
    assert np.abs(got["free"] / tokens - got["replayed"])[trained].max() > 2 * LOG_PROB_NOISE
    assert got["changed"]["changed_since_old"] > 0


def test_the_expert_bias_moves_by_what_was_counted(rank_pools, tmp_path):
    """In latent attention and grouped experts of Transformer Engine, from the routers' own output."""
    folder = str(make_family_folder(tmp_path / "model", "deepseek_v3"))
    seen = rank_pools(1, transformer_engine=True).run("expert_bias_jobs:counted_by_hand", folder=folder, **BF16)[0]
    assert sorted(seen["counts"]) == [1, 2, 3]  # layer 0 is dense
    for layer, counts in seen["counts"].items():
        name = f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
        want = seen["before"][name] + np.float32(RATE) * np.sign(counts.mean() - counts).astype(np.float32)
        assert np.array_equal(seen["after"][name], want) and not np.array_equal(want, seen["before"][name])

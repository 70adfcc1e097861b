"""What differs in optimizer steps is found in the number that it is in, and named; equal steps differ in nothing."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch

from gspo_mega.verify.certify.cases import PARAMETER_KINDS, parameter_kind
from gspo_mega.verify.certify.compare import (
    differences_of_norm,
    differences_of_state,
    differences_of_steps,
    norm_differences,
)
from gspo_mega.verify.certify.steps import CaseSteps, sketch

CLIP = 0.1
SETTINGS = json.dumps([1e-3, 0.1, [0.9, 0.95], 1e-6])


def steps(scale: float = 1.0, norm: float = 2.0) -> CaseSteps:
    """Two steps of a matrix and a bias, clipped to CLIP."""
    generator = torch.Generator().manual_seed(1)
    left = norm * CLIP / (norm + 1e-6)
    matrix, bias = torch.randn(8, 8, generator=generator), torch.randn(8, generator=generator)
    total = float((matrix.square().sum() + bias.square().sum()).sqrt())
    rows = [sketch(name, scale * left / total * values) for name, values in (("a.weight", matrix), ("a.bias", bias))]
    squares = dict.fromkeys(PARAMETER_KINDS, 0.0) | {"matrices": float(rows[0][0]), "biases": float(rows[1][0])}
    return CaseSteps(
        norms=[norm, norm],
        skipped=[False, False],
        counted=[dict(squares), dict(squares)],
        whole=[dict(squares), dict(squares)],
        routing=[{"z_loss": 3.0}, {"z_loss": 2.0}],
        settings=[{"a.weight": [SETTINGS]}, {"a.weight": [SETTINGS]}],
        names=["a.weight", "a.bias"],
        sizes=[64, 8],
        sketches=np.stack([rows, rows]),
        moments=np.stack([rows, rows]),
        buffers={"rotary": "1f"},
    )


def largest(found) -> tuple[float, str]:
    return max(found, default=(0.0, ""))


def test_equal_steps_differ_in_nothing():
    got, want = steps(), steps()
    assert largest(norm_differences(got, CLIP))[0] < 1e-6  # the tensors are fp32
    assert largest(differences_of_norm(got, want))[0] == largest(differences_of_steps(got, want))[0] == 0
    assert [*differences_of_state(got, want, counts_zeros=True)] == []


def test_a_norm_that_forgets_a_part_is_named_by_the_part():
    got = steps()
    got.counted[1]["biases"] *= 0.5
    value, place = largest(norm_differences(got, CLIP))
    assert place == "step 2: biases, counted in the norm"
    assert value == pytest.approx(0.25)


def test_another_norm_is_another_norm_and_another_clip():
    got = steps()
    got.norms[0] *= 1.01
    assert largest(differences_of_norm(got, steps())) == (pytest.approx(0.01), "step 1: the norm")
    unclipped = steps(scale=1.02)
    value, place = largest(norm_differences(unclipped, CLIP))
    assert value == pytest.approx(0.02, rel=1e-3) and "after clipping" in place
    # Without a limit nothing may be clipped.
    assert largest(norm_differences(steps(), 0.0))[0] > 0.9


@pytest.mark.parametrize("field", ["sketches", "moments"])
def test_a_factor_in_one_tensor_is_its_relative_difference(field):
    got = steps()
    getattr(got, field)[1, 1] *= 1.5
    value, place = largest(differences_of_steps(got, steps()))
    assert place.endswith("a.bias") and value == pytest.approx(0.5, rel=0.6), "as far as a few products tell"


def test_a_sketch_tells_the_relative_difference_of_tensors():
    generator = torch.Generator().manual_seed(3)
    want, error = torch.randn(64, 64, generator=generator), torch.randn(64, 64, generator=generator)
    for size in (1e-5, 1e-2):
        ours, theirs = sketch("t", want + size * error), sketch("t", want)
        found = np.sqrt(np.square(ours[2:] - theirs[2:]).mean() / theirs[0])
        assert found == pytest.approx(size * float(error.norm() / want.norm()), rel=0.8)
    assert sketch("t", torch.tensor([0.0, 2.0, 0.0]))[:2].tolist() == [4.0, 2.0]


def test_a_sketch_has_signs_of_its_own_for_each_place_and_name(monkeypatch):
    ones = torch.ones(100, 200)
    products = np.array([sketch(name, ones)[2:] for name in "abcdefgh"])
    # Products of sums of 100 and of 200 signs: a scatter of 141.
    assert 70 < products.std() < 280 and len(np.unique(products)) > products.size // 2
    whole = sketch("a", ones)
    monkeypatch.setattr("gspo_mega.verify.certify.steps._PIECE", 777)
    assert np.allclose(sketch("a", ones), whole, atol=1e-9)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s.skipped.__setitem__(1, True), "step 2 is skipped"),
        (lambda s: s.settings[0].update({"a.weight": [SETTINGS.replace("0.1", "0.2")]}), "step 1: lr, weight decay"),
        (lambda s: s.settings[0].update({"a.weight": [SETTINGS, "other"]}), "step 1: lr, weight decay"),
        (lambda s: s.settings[1].pop("a.weight"), "step 2: lr, weight decay"),
        (lambda s: s.sketches[0, 1].__setitem__(1, 8.0), "step 1: 8 zeros in the gradient of a.bias, for 0"),
        (lambda s: s.buffers.update(rotary="2e"), "buffer rotary"),
        (lambda s: s.copies.append("a.weight, part 0"), "a.weight, part 0 is not the same on all ranks"),
    ],
)
def test_what_must_be_the_same_is_named_where_it_is_not(change, said):
    got = copy.deepcopy(steps())
    change(got)
    (found,) = differences_of_state(got, steps(), counts_zeros=True)
    assert found.startswith(said)


def test_routers_sums_are_relative_and_none_is_left_out():
    got = steps()
    got.routing[1]["z_loss"] = 2.2
    assert largest(differences_of_steps(got, steps())) == (pytest.approx(0.1), "step 2: routing/z_loss")
    del got.routing[0]["z_loss"]
    assert any(np.isnan(value) for value, _ in differences_of_steps(got, steps()))


def test_another_number_of_steps_compares_those_of_both():
    short = steps()
    for name in ("norms", "skipped", "counted", "whole", "routing", "settings"):
        setattr(short, name, getattr(short, name)[:1])
    short.sketches, short.moments = short.sketches[:1], 2 * short.moments
    assert largest(differences_of_steps(short, steps()))[0] == 0


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("decoder.layers.0.mlp.experts.local_experts.1.linear_fc2.bias", "biases of experts"),
        ("model.layers.0.mlp.experts.down_proj_bias", "biases of experts"),
        ("decoder.layers.0.mlp.experts.linear_fc1.weight3", "experts"),
        ("model.layers.0.block_sparse_moe.experts.0.w1.weight", "experts"),
        ("model.layers.0.mlp.shared_experts.up_proj.weight", "matrices"),
        ("decoder.layers.0.mlp.shared_experts.gate_weight", "routers"),
        ("model.layers.0.mlp.shared_expert_gate.weight", "routers"),
        ("model.layers.0.mlp.gate.weight", "routers"),
        ("decoder.layers.0.mlp.router.bias", "routers"),
        ("model.layers.0.mlp.gate_proj.weight", "matrices"),
        ("decoder.layers.0.self_attention.core_attention.softmax_offset", "sinks"),
        ("model.layers.0.self_attn.sinks", "sinks"),
        ("decoder.layers.0.self_attention.linear_qkv.layer_norm_weight", "norms"),
        ("model.layers.0.self_attn.q_proj.bias", "biases"),
        ("lm_head.weight", "embeddings"),
        ("embedding.word_embeddings.weight", "embeddings"),
        ("value_head.weight", "embeddings"),
        ("score.weight", "embeddings"),
        ("adapters.decoder-layers-0-linear_qkv.a.q", "adapters"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", "adapters"),
    ],
)
def test_a_parameter_has_one_kind_by_either_name(name, kind):
    assert parameter_kind(name) == kind

"""Every family: Megatron's logits equal Hugging Face's in every layout, and every tensor comes back as it was."""

from __future__ import annotations

import pytest
import torch
from family_models import PROOFS, VARIANTS, make_family_folder, save_gradients, token_ids

from gspo_mega.models.families import FAMILIES

TOLERANCE = 1e-5
EXACT = 2e-6  # in fp64, but for the angles of rotary embeddings, which Megatron computes in fp32
DENSE = {"one": {}, "TP2": dict(tensor=2), "PP2": dict(pipeline=2)}
EXPERTS = {"one": {}, "PP2": dict(pipeline=2), "EP2": dict(expert=2), "TP2xEP2": dict(tensor=2, expert=2)}


def layouts_of(variant: str) -> dict[str, dict]:
    return EXPERTS if FAMILIES[VARIANTS[variant][0]].experts is not None else DENSE


def test_every_family_has_a_variant():
    assert {family for family, _ in VARIANTS.values()} == FAMILIES.keys()


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_hugging_face_in_every_layout(rank_pools, tmp_path, variant):
    folder = make_family_folder(tmp_path / variant, variant)
    seen = rank_pools(2).run(
        "family_jobs:through_layouts", folder=str(folder), layouts=layouts_of(variant), tokens=token_ids()
    )[0]
    assert {name: s["changed"] for name, s in seen.items()} == dict.fromkeys(seen, [])
    assert max(s["exact"] for s in seen.values()) < EXACT, seen
    # Gated delta nets amplify what fp32 rounds: transformers' own fp32 is 1.1e-5 from the exact logits.
    if not FAMILIES[VARIANTS[variant][0]].delta_net:
        assert max(s["logits"] for s in seen.values()) < TOLERANCE, seen


@pytest.mark.parametrize("variant", ["gpt_oss", "minimax_m2", "olmo3-yarn", "qwen3_next"])
def test_gradients_are_those_of_transformers_in_every_layout(rank_pools, tmp_path, variant):
    """Of what no other family has: sinks, windows and biases; norms over all heads; norms of outputs; delta nets."""
    folder = make_family_folder(tmp_path / variant, variant)
    save_gradients(folder, variant)
    seen = rank_pools(2).run(
        "family_jobs:gradients_through_layouts",
        folder=str(folder),
        layouts=layouts_of(variant) | {"CP2": dict(context=2)},
        tokens=token_ids(),
    )[0]
    apart = {(name, tensor): value for name, found in seen.items() for tensor, value in found.items()}
    assert not (wrong := {place: value for place, value in apart.items() if not value < TOLERANCE}), wrong


@pytest.mark.parametrize(
    "variant",
    [
        "qwen2-tied",
        "llama3",
        "mixtral",
        "qwen2_moe",
        "deepseek_v3",
        "glm4_moe",
        "gpt_oss",
        *PROOFS,
        "qwen3_next",
        "qwen3_5_moe-stacked",
    ],
)
def test_bf16_comes_back_bit_for_bit(rank_pools, tmp_path, variant):
    folder = make_family_folder(tmp_path / variant, variant, torch.bfloat16)
    seen = rank_pools(2).run(
        "family_jobs:through_layouts", folder=str(folder), layouts=layouts_of(variant), precision="bf16"
    )[0]
    assert {name: s["changed"] for name, s in seen.items()} == dict.fromkeys(seen, [])


@pytest.mark.parametrize(
    "variant, fault",
    [
        ("llama3", "swapped gate and up"),
        ("mixtral", "swapped gate and up"),
        ("mixtral", "permuted experts"),
        ("qwen2", "query, key and value one after the other"),
        ("qwen2_moe", "another layer's gate"),
        ("deepseek_v3", "swapped gate and up"),
        ("deepseek_v3", "permuted experts"),
        ("deepseek_v3", "keys of all heads before values"),
        ("deepseek_v3", "rotary elements one half apart"),
        ("deepseek_v3", "another layer's bias"),
        ("glm4_moe", "query, key and value one after the other"),
        ("glm4_moe", "permuted experts"),
        ("glm4_moe", "another layer's bias"),
        ("glm4_moe", "rotary elements over the whole head"),
        ("gpt_oss", "swapped gate and up"),
        ("gpt_oss", "permuted experts"),
        ("gpt_oss", "another layer's sinks"),
        ("gpt_oss", "windows in the other layers"),
        ("gpt_oss", "a window of one token more"),
        ("gpt_oss", "an activation without a limit"),
        ("gpt_oss", "wavelengths in whole dimensions"),
        *((variant, fault) for variant, proof in PROOFS.items() for fault in proof.faults),
        ("qwen3_next", "queries of all heads before gates"),
        ("qwen3_next", "one section of all key heads after another"),
        ("qwen3_next", "decays of other heads"),
        ("qwen3_next", "norms that multiply by their weight"),
        ("qwen3_next", "rotary elements over the whole head"),
        ("qwen3_5_moe-stacked", "up before gate in a stack"),
        ("qwen3_5_moe-stacked", "gate and up in turn in a stack"),
        ("qwen3_5_moe-stacked", "permuted experts"),
        ("qwen3_vl_moe", "up before gate in a stack"),
        ("qwen3_vl_moe", "gate and up in turn in a stack"),
    ],
)
def test_a_wrong_conversion_that_round_trips_is_caught_by_the_logits(rank_pools, tmp_path, variant, fault):
    folder = make_family_folder(tmp_path / variant, variant)
    seen = rank_pools(2).run(
        "family_jobs:through_layouts", folder=str(folder), layouts={"one": {}}, tokens=token_ids(), fault=fault
    )[0]
    assert seen["one"]["changed"] == []
    assert seen["one"]["logits"] > 1000 * TOLERANCE

"""Where the trainer's blocks are the servers': the rule against quantising both ways, and its reasons."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gspo_mega.algorithm.fp8 import quantize_blocks
from gspo_mega.config import load_config
from gspo_mega.models.block_fp8 import is_quantizable
from gspo_mega.models.huggingface import spec_from_config
from gspo_mega.models.spec import ModelSpec
from gspo_mega.models.tensors import hf_tensors, parameter_blocks, parameter_shape
from gspo_mega.verify.mismatch.findings import block_difference, differing_blocks

ROOT = Path(__file__).parents[3]


def model(**changes) -> ModelSpec:
    raw = json.loads((ROOT / "configs/models/certify_moe.json").read_text())
    sizes = dict(hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=128, num_hidden_layers=1)
    return spec_from_config(raw | sizes | dict(moe_intermediate_size=256) | changes)


def really_differs(spec: ModelSpec, entry, size: int, seed: int) -> bool:
    """Quantise every rank's parameter, and the tensor itself, and look whether the tensor's bytes are the same."""
    torch.manual_seed(seed)
    fused = [e for e in hf_tensors(spec) if e.parameter == entry.parameter and is_quantizable(e)]
    # Rows and columns of very different sizes: a block that mixes others has another scale.
    whole = {
        e.name: torch.randn(e.shape) * 2 ** (3 * torch.randn(e.shape[0], 1)) * 2 ** (3 * torch.randn(e.shape[1]))
        for e in fused
    }
    # Of the parameter's other tensors every value is larger: whatever block they share has their scale.
    whole = {name: tensor if name == entry.name else 1e6 * (1 + tensor.abs()) for name, tensor in whole.items()}
    want, _ = quantize_blocks(whole[entry.name], (128, 128))
    found = torch.zeros(entry.shape, dtype=torch.uint8)
    for rank in range(size):
        local = torch.zeros(parameter_shape(spec, entry, size))
        for one in fused:
            for b in parameter_blocks(spec, one, size, rank):
                local.narrow(b.dim, b.local_start, b.length).copy_(whole[one.name].narrow(b.dim, b.start, b.length))
        if spec.delta is not None and "in_proj" in entry.parameter:  # betas and alphas are not rounded
            local = local[: len(local) - 2 * spec.delta.value_heads // size]
        codes = quantize_blocks(local, (128, 128))[0].view(torch.uint8)
        for b in parameter_blocks(spec, entry, size, rank):
            found.narrow(b.dim, b.start, b.length).copy_(codes.narrow(b.dim, b.local_start, b.length))
    return not torch.equal(found, want.view(torch.uint8))


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(head_dim=64),
        dict(head_dim=32, num_attention_heads=8),
        dict(moe_intermediate_size=192),
        dict(hidden_size=192),
        dict(num_key_value_heads=4),
    ],
)
def test_the_rule_is_what_quantising_both_ways_shows(changes, size):
    spec = model(**changes)
    for entry in hf_tensors(spec):
        if is_quantizable(entry) and (entry.expert or 0) == 0:
            why = block_difference(spec, entry, size)
            shown = any(really_differs(spec, entry, size, seed) for seed in range(2))
            assert (why is not None) == shown, (entry.name, why)


def delta_model(family: str, **changes) -> ModelSpec:
    raw = json.loads((ROOT / f"configs/models/certify_{family}.json").read_text())
    sizes = dict(hidden_size=128, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    sizes |= dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=128, linear_value_head_dim=128)
    return spec_from_config(raw | sizes | changes)


@pytest.mark.parametrize(
    ("family", "changes", "size"),
    [
        ("qwen3_5", {}, 2),
        ("qwen3_next", {}, 2),
        ("qwen3_5", dict(linear_value_head_dim=40), 1),
        ("qwen3_next", dict(linear_key_head_dim=64), 1),
    ],
)
def test_the_rule_holds_for_the_projections_of_gated_delta_nets(family, changes, size):
    """Heads of 128, as published, coincide in every layout. In a file of Qwen3-Next each head's parts are together."""
    spec, reasons = delta_model(family, **changes), set()
    for entry in hf_tensors(spec):
        if is_quantizable(entry) and "linear_attn.in_proj" in entry.name:
            why = block_difference(spec, entry, size)
            shown = really_differs(spec, entry, size, seed=0)
            assert (why is not None) == shown, (entry.name, why)
            reasons.add(why)
    assert (reasons == {None}) == (not changes)
    assert all("of a gated delta net one after the other" in why for why in reasons if why)


def configured(**changes):
    config = load_config(ROOT / "configs/quickstart.yaml").config
    parallel = config.parallel.model_copy(update={"tensor": changes.pop("tensor", 1), "expert_tensor": 1})
    server = config.server.model_copy(update={"quantization": changes.pop("quantization", "fp8_block")})
    fp8 = config.fp8.model_copy(update={key: changes.pop(key) for key in ("recipe", "parameters") if key in changes})
    return config.model_copy(
        update={"precision": changes.pop("precision", "fp8"), "parallel": parallel, "server": server, "fp8": fp8}
    )


def test_reasons_are_named():
    assert differing_blocks(configured(), model()) == {}
    found = differing_blocks(configured(), model(head_dim=64))
    assert {name.split(".")[-2] for name in found} == {"k_proj", "v_proj"}, "a group's two q heads fill a block"
    assert all("Megatron interleaves q, k and v" in why and "head_dim 64" in why for why in found.values())
    found = differing_blocks(configured(tensor=4), replace(model(), num_kv_heads=4))
    assert {name.split(".")[-2] for name in found} == set(), "q, k and v of a rank are whole heads"
    found = differing_blocks(configured(tensor=4), model(num_key_value_heads=4, num_attention_heads=4, head_dim=32))
    assert "share of 32 columns (of 128 over 4)" in found["model.layers.0.self_attn.o_proj.weight"]


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"quantization": "none"}, "server.quantization none"),
        ({"precision": "bf16"}, "precision bf16"),
        ({"recipe": "tensorwise"}, "fp8.recipe tensorwise"),
        ({"parameters": True}, "fp8.parameters"),
    ],
)
def test_a_pair_that_cannot_agree_has_one_reason_for_all(changes, words):
    found = differing_blocks(configured(**changes), model())
    assert len(found) == sum(is_quantizable(e) for e in hf_tensors(model()))
    assert all(words in why for why in found.values())

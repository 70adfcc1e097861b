"""Which matrices have adapters, under which names, and how the adapters are cut over ranks: by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_families import make_spec

from gspo_mega.base.errors import ModelError
from gspo_mega.models.low_rank import adapted, adapter_tensors, targets_of
from gspo_mega.models.spec import LatentAttention


def test_targets_are_the_names_of_the_family_without_router_gates_and_norms():
    attention = ("q_proj", "k_proj", "v_proj", "o_proj")
    assert (
        targets_of(make_spec(False)) == targets_of(make_spec(True)) == (*attention, "gate_proj", "up_proj", "down_proj")
    )
    assert targets_of(replace(make_spec(True), family="mixtral", qk_norm=False)) == (*attention, "w1", "w3", "w2")
    gated = make_spec(True, qk_norm=False, attention_bias=True, family="qwen2_moe")
    assert gated.moe is not None
    gated = replace(gated, moe=replace(gated.moe, shared_intermediate_size=8))
    assert "shared_expert_gate" not in targets_of(gated)
    owners = {entry.name.split(".")[4] for found in adapted(gated, ["up_proj"]).values() for entry in found}
    assert owners == {"experts", "shared_expert"}
    latent = LatentAttention(query_rank=6, key_value_rank=4, content_dim=4, rotary_dim=2, value_dim=4)
    spec = replace(make_spec(True), family="deepseek_v3", latent=latent, qk_norm=False)
    assert targets_of(spec)[:5] == ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj", "o_proj")
    with pytest.raises(ModelError, match=r"\(qwen3\) has no linear layer 'w1'; valid: q_proj, k_proj"):
        adapted(make_spec(False), ["w1"])


def test_a_and_b_are_cut_as_the_matrix_is():
    """Rows of W are rows of B, columns of W columns of A; the other half is whole on every rank."""
    found = {
        entry.name.removeprefix("base_model.model.model.layers.1."): entry
        for entry in adapter_tensors(make_spec(False), 3, ["k_proj", "o_proj"])
        if entry.layer == 1
    }
    assert {name: (entry.shape, entry.sharding, entry.role, entry.parameter) for name, entry in found.items()} == {
        "self_attn.k_proj.lora_A.weight": (
            (3, 24), "replicated", "whole", "decoder.layers.1.self_attention.linear_qkv.A.k"
        ),
        "self_attn.k_proj.lora_B.weight": ((32, 3), "rows", "k", "decoder.layers.1.self_attention.linear_qkv.B"),
        "self_attn.o_proj.lora_A.weight": (
            (3, 64), "columns", "whole", "decoder.layers.1.self_attention.linear_proj.A.whole"
        ),
        "self_attn.o_proj.lora_B.weight": (
            (24, 3), "replicated", "whole", "decoder.layers.1.self_attention.linear_proj.B"
        ),
    }  # fmt: skip

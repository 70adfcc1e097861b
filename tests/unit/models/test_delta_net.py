"""Gated delta nets: published configurations, what is refused by name, and the place of every row."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from published_qwen3_5 import qwen3_5, text_model

from gspo_mega.base.errors import ModelError
from gspo_mega.models.delta_net import ROLES
from gspo_mega.models.huggingface import spec_from_config
from gspo_mega.models.spec import DeltaNet, shape_differences
from gspo_mega.models.tensors import count_parameters, hf_tensors, is_ignored_tensor, parameter_blocks, parameter_shape

SHAPES = Path(__file__).parents[3] / "configs" / "models"
# As published, shortened to what is read: Qwen3-Next-80B-A3B.
NEXT_80B = json.loads((SHAPES / "qwen3_next_80b.json").read_text())
# Three key heads, each of its own size in every section.
SMALL = NEXT_80B | dict(
    hidden_size=4,
    num_hidden_layers=4,
    num_attention_heads=6,
    num_key_value_heads=3,
    head_dim=4,
    partial_rotary_factor=0.5,
    linear_num_key_heads=3,
    linear_num_value_heads=6,
    linear_key_head_dim=2,
    linear_value_head_dim=5,
    linear_conv_kernel_dim=3,
    num_experts=2,
    num_experts_per_tok=1,
    vocab_size=8,
    eos_token_id=2,
)


@pytest.mark.parametrize(
    ("raw", "total", "active"),
    [
        (NEXT_80B, 79.7, 3.6),
        (qwen3_5("0.8B"), 0.8, 0.5),
        (qwen3_5("2B"), 1.9, 1.4),
        (qwen3_5("4B"), 4.2, 3.6),
        (qwen3_5("9B"), 9.0, 7.9),
        (qwen3_5("27B"), 26.9, 25.6),
        (qwen3_5("35B-A3B"), 34.7, 2.9),
        (qwen3_5("122B-A10B"), 122.1, 9.0),
        (qwen3_5("397B-A17B"), 396.3, 16.3),
        (text_model(qwen3_5("2.4T-A95B")), 2419.8, 93.3),
    ],
)
def test_published_configs(raw, total, active):
    """The names say how many billions of parameters, and how many are active, with embeddings; `active` is without."""
    spec = spec_from_config(raw)
    counts = count_parameters(spec)
    if "text_config" in raw:  # the text model that a server can have is the same, to the shape of each parameter
        own = spec_from_config(text_model(raw))
        assert shape_differences(spec, own) == [f"family {spec.family!r} instead of {own.family!r}"]
        names = [{entry.parameter: entry.shape for entry in hf_tensors(one)} for one in (spec, own)]
        assert names[0] == names[1]
    assert round(counts.total / 1e9, 1) == total
    assert round((counts.active - counts.embedding) / 1e9, 1) == active
    assert spec.delta.layers == (True, True, True, False) * (spec.num_layers // 4)
    assert (spec.output_gate, spec.zero_centred_norms, spec.rotary_share, spec.rope_theta) == (True, True, 0.25, 1e7)


def test_a_published_delta_net():
    spec = spec_from_config(NEXT_80B)
    assert spec.delta == DeltaNet((True, True, True, False) * 12, 16, 32, 128, 128, 4)
    # A matrix of 128 x 128 for each of 32 heads, and three inputs of 8192 channels; only 12 layers cache keys.
    assert spec.delta.state_elements == 32 * 128 * 128 + 3 * 8192
    assert spec.cache_elements_per_token == 2 * 12 * 2 * 256
    assert spec.moe.norm_topk_prob and spec.moe.shared_gate
    # RedHatAI/Qwen3-Coder-Next-NVFP4, of this shape, has 296 151 tensors, four in place of each quantised one: three of
    # every expert, the shared one among them, and four of every attention.
    assert len(hf_tensors(spec)) == 296_151 - 3 * (48 * 513 * 3 + 12 * 4)
    without = {
        key: value for key, value in NEXT_80B.items() if key not in ("norm_topk_prob", "full_attention_interval")
    }
    assert spec_from_config(without).moe.norm_topk_prob  # the default of transformers


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (dict(layer_types=["linear_attention"] * 47), "layer_types: must be one of linear_attention, full_attention"),
        (dict(layer_types=["sliding_attention"] * 48), "layer_types: must be one of"),
        (dict(linear_num_value_heads=24), "linear_num_value_heads: 24 is no multiple of linear_num_key_heads 16"),
        (dict(linear_key_head_dim=None), "linear_key_head_dim: missing"),
        (dict(attn_output_gate=False), "attn_output_gate: False is not supported; supported: True"),
        (dict(output_gate_type="sigmoid"), "output_gate_type: 'sigmoid' is not supported"),
        (dict(mlp_only_layers=[3]), "mlp_only_layers: [3]: dense layers between MoE layers"),
        (dict(attention_bias=True), "attention_bias: biases in attention are not supported"),
        (dict(rope_scaling=dict(rope_type="yarn", factor=4.0)), "rotary scaling 'yarn' is not supported"),
    ],
)
def test_what_is_not_supported_is_named(changes, text):
    with pytest.raises(ModelError) as refused:
        spec_from_config(NEXT_80B | changes)
    assert text in str(refused.value)


def test_layers_for_multi_token_prediction_may_be_there():
    spec = spec_from_config(NEXT_80B)
    assert is_ignored_tensor(spec, "mtp.layers.0.mlp.experts.0.up_proj.weight")
    assert not is_ignored_tensor(spec, "model.layers.48.input_layernorm.weight")


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("raw", [SMALL, SMALL | dict(architectures=["Qwen3_5MoeForCausalLM"])])
def test_rows_fill_every_parameter_once(raw, parts):
    """The blocks of the tensors that a parameter fuses cover each rank's share, and together every tensor."""
    spec = spec_from_config(raw)
    by_parameter: dict[str, list] = {}
    for entry in hf_tensors(spec):
        if entry.role in (*ROLES, "q", "k", "v"):
            by_parameter.setdefault(entry.parameter, []).append(entry)
    assert len(by_parameter) == 3 * 2 + 1  # in_proj and conv1d of three layers, linear_qkv of one
    for entries in by_parameter.values():
        seen = {entry.name: np.zeros(entry.shape[0], int) for entry in entries}
        for rank in range(parts):
            rows = np.zeros(parameter_shape(spec, entries[0], parts)[0], int)
            for entry in entries:
                for block in parameter_blocks(spec, entry, parts, rank):
                    rows[block.local_start : block.local_start + block.length] += 1
                    seen[entry.name][block.start : block.start + block.length] += 1
            assert (rows == 1).all()
        assert all((count == 1).all() for count in seen.values())


def test_a_rank_has_sections_of_its_own_key_heads():
    """By hand, for the second of three ranks: one key head with queries and keys of 2, two values and gates of 5."""
    spec = spec_from_config(SMALL)
    entries = {entry.role: entry for entry in hf_tensors(spec) if entry.layer == 0 and entry.role in ROLES}
    # A key head has 2 + 2 + 10 + 10 rows in the file, so the second starts at 24.
    assert [(b.start, b.local_start, b.length) for b in parameter_blocks(spec, entries["delta_qkvz"], 3, 1)] == [
        *((24, 0, 2), (26, 2, 2), (28, 4, 10), (38, 14, 10)),
    ]
    assert [(b.start, b.local_start, b.length) for b in parameter_blocks(spec, entries["delta_ba"], 3, 1)] == [
        *((4, 24, 2), (6, 26, 2)),
    ]
    # The convolution's sections lie one after the other: 6 of queries, 6 of keys, 30 of values.
    assert [(b.start, b.local_start, b.length) for b in parameter_blocks(spec, entries["delta_conv"], 3, 1)] == [
        *((2, 0, 2), (8, 2, 2), (22, 4, 10)),
    ]
    assert parameter_shape(spec, entries["delta_conv"], 3) == (14, 1, 3)
    with pytest.raises(ModelError, match="cannot be divided over 2 tensor-parallel"):
        parameter_blocks(spec, entries["delta_qkvz"], 2, 0)


def test_a_group_has_its_queries_before_its_gates():
    """By hand: two heads of 4 to a group, so rows 16 to 31 of q_proj are the second group's [q, gate, q, gate]."""
    spec = spec_from_config(SMALL)
    query = next(entry for entry in hf_tensors(spec) if entry.role == "q")
    assert query.shape == (48, 4)
    assert [(b.start, b.local_start, b.length) for b in parameter_blocks(spec, query, 3, 1)] == [
        *((16, 0, 4), (20, 8, 4), (24, 4, 4), (28, 12, 4)),
    ]

"""What each family's tensors become on a server: SGLang's fused parameters, by the names in its model code."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

import pytest
import torch

from gspo_mega.models.families import FAMILIES
from gspo_mega.models.huggingface import spec_from_config
from gspo_mega.sync.verify import ExpectedChecksums, server_tensor_names, server_tensors

SIZES = dict(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    vocab_size=32,
    max_position_embeddings=8,
    rope_theta=1e4,
    rms_norm_eps=1e-6,
    num_experts=2,
    num_local_experts=2,
    num_experts_per_tok=1,
    moe_intermediate_size=8,
)
ATTENTION = {
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "self_attn.qkv_proj.weight",
    "self_attn.o_proj.weight",
}
NORMS = {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}
DENSE = {"mlp.gate_up_proj.weight", "mlp.down_proj.weight"}
LATENT = {"input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.o_proj.weight"} | {
    f"self_attn.{name}.weight"
    for name in ("fused_qkv_a_proj_with_mqa", "q_a_layernorm", "q_b_proj", "kv_a_layernorm", "kv_b_proj")
}
OWN = {
    "qwen2_moe": dict(num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8, shared_expert_intermediate_size=8),
    "deepseek_v3": dict(
        num_key_value_heads=2,
        q_lora_rank=6,
        kv_lora_rank=4,
        qk_nope_head_dim=4,
        qk_rope_head_dim=2,
        v_head_dim=4,
        n_routed_experts=2,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.0,
        norm_topk_prob=False,
    ),
    "glm4_moe": dict(
        attention_bias=True,
        use_qk_norm=True,
        n_routed_experts=2,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.0,
        norm_topk_prob=False,
    ),
    "gpt_oss": dict(num_experts_per_tok=1, sliding_window=4, rope_scaling=dict(rope_type="default")),
}
_DELTA = dict(
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    linear_key_head_dim=4,
    linear_value_head_dim=4,
    linear_conv_kernel_dim=4,
    layer_types=["linear_attention"],
    shared_expert_intermediate_size=8,
    norm_topk_prob=False,
)
_DENSE_DELTA = _DELTA | dict(shared_expert_intermediate_size=None)
OWN |= {"qwen3_next": _DELTA, "qwen3_5": _DENSE_DELTA, "qwen3_5_moe": _DELTA | dict(norm_topk_prob=True)}
OWN |= {f"{family}_vl": dict(text_config=SIZES | OWN[family]) for family in ("qwen3_5", "qwen3_5_moe")}
OWN |= {family: dict(text_config=SIZES) for family in ("qwen3_vl", "qwen3_vl_moe")}
DELTA = {"input_layernorm.weight", "post_attention_layernorm.weight"} | {
    f"linear_attn.{name}"
    for name in ("in_proj_qkvz.weight", "in_proj_ba.weight", "conv1d.weight", "dt_bias", "A_log", "norm.weight")
}
DELTA |= {"linear_attn.out_proj.weight"}
EXPERTS = {"mlp.gate.weight", "mlp.experts.w13_weight", "mlp.experts.w2_weight"}
WITH_BIAS = {
    "mlp.gate.e_score_correction_bias",
    "mlp.shared_experts.gate_up_proj.weight",
    "mlp.shared_experts.down_proj.weight",
}
SHARED = {f"mlp.shared_expert{name}.weight" for name in ("_gate", ".gate_up_proj", ".down_proj")}
IN_A_LAYER = {
    "llama": ATTENTION | DENSE,
    "qwen2": ATTENTION | DENSE | {"self_attn.qkv_proj.bias"},
    "qwen2_moe": (
        ATTENTION
        | {"self_attn.qkv_proj.bias", "mlp.gate.weight", "mlp.experts.w13_weight", "mlp.experts.w2_weight"}
        | {f"mlp.shared_expert{name}.weight" for name in ("_gate", ".gate_up_proj", ".down_proj")}
    ),
    "qwen3": ATTENTION | DENSE | NORMS,
    "qwen3_moe": ATTENTION | NORMS | {"mlp.gate.weight", "mlp.experts.w13_weight", "mlp.experts.w2_weight"},
    "deepseek_v3": LATENT | WITH_BIAS | EXPERTS,
    "glm4_moe": ATTENTION | {"self_attn.qkv_proj.bias"} | NORMS | WITH_BIAS | EXPERTS,
    "gpt_oss": (
        ATTENTION
        | {f"self_attn.{name}" for name in ("qkv_proj.bias", "o_proj.bias", "sinks")}
        | {"mlp.router.weight", "mlp.router.bias"}
        | {f"mlp.experts.{name}_weight{kind}" for name in ("w13", "w2") for kind in ("", "_bias")}
    ),
    "qwen3_next": DELTA | EXPERTS | SHARED,
    "qwen3_5": DELTA | DENSE,
    "qwen3_5_moe": DELTA | EXPERTS | SHARED,
    "qwen3_5_vl": DELTA | DENSE,
    "qwen3_5_moe_vl": DELTA | EXPERTS | SHARED,
    "qwen3_vl": ATTENTION | DENSE | NORMS,
    "qwen3_vl_moe": ATTENTION | NORMS | EXPERTS,
    "mixtral": (
        ATTENTION | {f"block_sparse_moe.{name}" for name in ("gate.weight", "experts.w13_weight", "experts.w2_weight")}
    ),
}


def test_attention_beside_delta_nets_is_a_part_of_the_layer_itself():
    raw = SIZES | OWN["qwen3_next"] | dict(layer_types=["full_attention"], architectures=["Qwen3NextForCausalLM"])
    tensors = server_tensors(spec_from_config(raw))
    names = {name.removeprefix("model.layers.0.") for name in tensors.expected if name.startswith("model.layers.")}
    attention = {"qkv_proj.weight", "o_proj.weight", "q_norm.weight", "k_norm.weight"}
    norms = {"input_layernorm", "post_attention_layernorm", "q_norm", "k_norm"}
    assert names == EXPERTS | SHARED | attention | {
        f"{norm}.{kind}" for norm in norms for kind in ("weight", "gemma_weight")
    }
    assert tensors.own_scales["model.norm.gemma_weight"] == "model.norm.weight"


def test_one_more_than_the_weight_of_a_norm_is_expected_too():
    raw = SIZES | OWN["qwen3_5"] | dict(architectures=["Qwen3_5ForCausalLM"])
    expected = ExpectedChecksums(spec_from_config(raw))
    weight = torch.tensor([0.25, -0.5], dtype=torch.bfloat16)
    expected.add("model.norm.weight", weight)
    expected.add("model.layers.0.linear_attn.norm.weight", weight)
    assert expected.checksums() == {
        "model.norm.weight": hashlib.sha256(weight.view(torch.uint8).numpy().tobytes()).hexdigest()[:16],
        "model.norm.gemma_weight": hashlib.sha256(
            torch.tensor([1.25, 0.5], dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
        ).hexdigest()[:16],
        "model.layers.0.linear_attn.norm.weight": hashlib.sha256(
            weight.view(torch.uint8).numpy().tobytes()
        ).hexdigest()[:16],
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_names_are_those_of_the_servers_parameters(family):
    from family_models import PROOFS, proof_of, variant_config

    if (variant := proof_of(family)) is None:
        raw, in_a_layer = SIZES | OWN.get(family, {}), IN_A_LAYER[family]
    else:
        raw, in_a_layer = variant_config(variant).to_dict(), PROOFS[variant].server_names
    spec = spec_from_config(raw | {"architectures": [FAMILIES[family].architecture]})
    names = set(server_tensor_names(spec).values())
    layer = f"model.layers.{spec.num_layers - 1}."
    assert {name.removeprefix(layer) for name in names if name.startswith(layer)} == in_a_layer
    assert {name for name in names if not name.startswith("model.layers.")} == {
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_the_installed_server_knows_the_architecture(family):
    found = importlib.util.find_spec("sglang")
    if found is None:
        pytest.skip("sglang is not installed")
    from family_models import SERVED_BY

    sources = Path(found.submodule_search_locations[0]) / "srt"
    known, file = SERVED_BY.get(family, (FAMILIES[family].architecture, "*.py"))
    assert any(f"class {known}(" in path.read_text() for path in (sources / "models").glob(file))
    if family in SERVED_BY:  # and it finds its way there
        text = "".join(path.read_text() for part in ("models", "configs") for path in (sources / part).glob("*.py"))
        assert f"class {FAMILIES[family].architecture}({known})" in text or f'"{FAMILIES[family].architecture}"' in text

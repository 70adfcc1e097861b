"""Published configurations of families with experts and latents, reduced to the keys that are read, and their sizes."""

from __future__ import annotations

import json

import pytest

from gspo_mega.base.errors import ModelError
from gspo_mega.models.huggingface import spec_from_config
from gspo_mega.models.spec import LatentAttention
from gspo_mega.models.tensors import count_parameters
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


def billions(spec) -> tuple[float, float]:
    counts = count_parameters(spec)
    return round(counts.total / 1e9, 1), round(counts.active / 1e9, 1)


def test_glm_flash():
    spec = spec_from_config(GLM_FLASH)
    assert spec.latent == LatentAttention(768, 512, 192, 64, 256)
    assert (spec.moe.num_experts, spec.moe.num_dense_layers, spec.moe.scaling_factor) == (64, 1, 1.8)
    assert spec.moe.expert_bias and spec.moe.shared_intermediate_size == 1536 and spec.num_ignored_layers == 1
    # The model card says 30B-A3B; the layer for multi-token prediction is not counted here.
    assert billions(spec) == (29.9, 3.9)
    assert missing_values(GLM_FLASH) == {}


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
    ],
)
def test_what_would_be_computed_otherwise_is_refused(config, words):
    with pytest.raises(ModelError, match=words):
        spec_from_config(config)

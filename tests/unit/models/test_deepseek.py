"""A DeepSeek-V3 config.json: what is read of it, and what Megatron would compute otherwise is refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gspo_mega.base.errors import ModelError
from gspo_mega.models.huggingface import spec_from_config
from gspo_mega.models.spec import LatentAttention, YarnScaling
from gspo_mega.models.tensors import hf_tensors, is_ignored_tensor

YARN = dict(
    type="yarn",
    factor=40,
    original_max_position_embeddings=4096,
    beta_fast=32,
    beta_slow=1,
    mscale=1.0,
    mscale_all_dim=1.0,
)
# As published, with smaller sizes.
CONFIG = dict(
    architectures=["DeepseekV3ForCausalLM"],
    vocab_size=300,
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
    intermediate_size=48,
    moe_intermediate_size=16,
    n_routed_experts=16,
    n_shared_experts=2,
    num_experts_per_tok=4,
    n_group=4,
    topk_group=2,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    scoring_func="sigmoid",
    topk_method="noaux_tc",
    moe_layer_freq=1,
    first_k_dense_replace=1,
    q_lora_rank=12,
    kv_lora_rank=8,
    qk_nope_head_dim=6,
    qk_rope_head_dim=4,
    v_head_dim=5,
    max_position_embeddings=163840,
    rope_theta=10000,
    rope_scaling=YARN,
    rms_norm_eps=1e-6,
    hidden_act="silu",
    attention_bias=False,
    num_nextn_predict_layers=1,
    ep_size=1,
    aux_loss_alpha=0.001,
    seq_aux=True,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
    eos_token_id=1,
)


def read(**changes):
    return spec_from_config({key: value for key, value in (CONFIG | changes).items() if value is not ...})


def test_a_published_config():
    spec = read()
    assert spec.latent == LatentAttention(query_rank=12, key_value_rank=8, content_dim=6, rotary_dim=4, value_dim=5)
    assert (spec.head_dim, spec.value_head_dim, spec.num_kv_heads) == (10, 5, 4)
    assert spec.rope_scaling == YarnScaling(40.0, 4096, 32.0, 1.0, 1.0, 1.0)
    moe = spec.moe
    assert (moe.num_experts, moe.experts_per_token, moe.expert_intermediate_size, moe.shared_intermediate_size) == (
        16,
        4,
        16,
        32,
    )
    assert (moe.score_function, moe.expert_bias, moe.norm_topk_prob, moe.scaling_factor) == ("sigmoid", True, True, 2.5)
    assert (moe.num_groups, moe.groups_per_token, moe.num_dense_layers) == (4, 2, 1)
    assert [spec.has_experts(layer) for layer in range(4)] == [False, True, True, True] and spec.num_moe_layers == 3
    assert spec.cache_elements_per_token == 4 * (8 + 4)


def test_other_ways_the_config_can_go():
    assert read(q_lora_rank=None).latent.query_rank is None
    assert read(num_key_value_heads=...).num_kv_heads == 4
    assert read(first_k_dense_replace=0).num_moe_layers == 4
    assert read(rope_scaling=None).rope_scaling is None
    # What transformers derives is not read.
    assert read(head_dim=4, qk_head_dim=10).head_dim == 10
    # Without mscale_all_dim transformers does not look at mscale; cosines are scaled by m(1).
    for values in (dict(mscale=0.5, mscale_all_dim=0), dict(mscale=None, mscale_all_dim=None)):
        assert read(rope_scaling=YARN | values).rope_scaling == YarnScaling(40.0, 4096, 32.0, 1.0, 1.0, 0.0)
    # One group, or all of them, is no limit, whatever the number of experts a token goes to.
    for values in (
        dict(n_group=1, topk_group=1),
        dict(n_group=4, topk_group=4),
        dict(n_group=1, topk_group=1, num_experts_per_tok=1, norm_topk_prob=False),
    ):
        assert read(**values).moe.experts_per_token in (1, 4)


@pytest.mark.parametrize(
    "changes, words",
    [
        (
            dict(rope_interleave=False),
            "rope_interleave: False: Megatron's latent attention turns neighbouring elements; supported: true",
        ),
        (dict(num_key_value_heads=2), "num_key_value_heads: 2: latent attention has as many as num_attention_heads, 4"),
        (dict(qk_rope_head_dim=3), "qk_rope_head_dim: 3 is odd"),
        (dict(kv_lora_rank=...), "kv_lora_rank: missing"),
        (dict(scoring_func="softmax"), "scoring_func: 'softmax' is not supported; supported: 'sigmoid'"),
        (dict(topk_method="greedy"), "topk_method: 'greedy' is not supported; supported: 'noaux_tc'"),
        (dict(moe_layer_freq=2), "moe_layer_freq: 2 is not supported; supported: 1"),
        (
            dict(norm_topk_prob=False),
            "norm_topk_prob: False is not supported with num_experts_per_tok 4; supported: True",
        ),
        (
            dict(norm_topk_prob=True, num_experts_per_tok=1, n_group=1, topk_group=1),
            "norm_topk_prob: True is not supported with num_experts_per_tok 1",
        ),
        (dict(n_group=3, topk_group=3), "n_group: 3 does not divide the 16 experts"),
        (dict(topk_group=5), "topk_group: 5 is more than the 4 groups"),
        (
            dict(topk_group=3),
            (
                "topk_group: 3: transformers ranks a group by its 2 best experts, Megatron by num_experts_per_tok 4 //"
                " topk_group"
            ),
        ),
        (dict(n_group=16, topk_group=2), "topk_group: 2: transformers ranks"),
        (dict(first_k_dense_replace=4), "first_k_dense_replace: 4 leaves no layer of 4 with experts"),
        (dict(n_shared_experts=0), "n_shared_experts: is 0; must be a positive whole number"),
        (dict(rope_scaling="yarn"), "rope_scaling: is 'yarn'; must be an object"),
        (
            dict(rope_scaling=dict(rope_type="llama3")),
            "rope_scaling: rotary scaling 'llama3' is not supported; supported: 'default', 'yarn'",
        ),
        (dict(rope_scaling=YARN | dict(factor=0)), "rope_scaling: 'yarn' needs a positive number factor, not 0"),
        (
            dict(rope_scaling=YARN | dict(truncate=False)),
            "rope_scaling: truncate false: Megatron's YaRN with latent attention always rounds",
        ),
        (
            dict(rope_scaling=YARN | dict(attention_factor=1.2)),
            "rope_scaling: attention_factor 1.2 is not supported; supported: mscale and mscale_all_dim",
        ),
        (dict(rope_scaling=YARN | dict(mscale=0)), "rope_scaling: mscale_all_dim 1.0 without mscale"),
        (
            dict(quantization_config=dict(quant_method="fp8")),
            "quantization_config: of quantised weights only FP8 in blocks",
        ),
        (dict(attention_bias=True), "attention_bias: biases in attention are not supported"),
    ],
)
def test_what_megatron_would_compute_otherwise_is_refused(changes, words):
    with pytest.raises(ModelError) as refused:
        read(**changes)
    lines = str(refused.value).splitlines()
    assert len(lines) == 1 and words in lines[0], lines


def test_other_families_refuse_what_only_this_one_does():
    llama = {
        key: value
        for key, value in CONFIG.items()
        if key not in ("rope_scaling", "n_shared_experts", "num_nextn_predict_layers")
    }
    with pytest.raises(ModelError, match="q_lora_rank: latent attention(.|\n)*kv_lora_rank: latent attention"):
        spec_from_config(llama | {"architectures": ["LlamaForCausalLM"]})


def test_layers_for_multi_token_prediction_may_be_there_and_are_passed_over():
    spec = read()
    names = {entry.name for entry in hf_tensors(spec)}
    assert not any(name.startswith("model.layers.4.") for name in names)
    assert is_ignored_tensor(spec, "model.layers.4.eh_proj.weight") and is_ignored_tensor(
        spec, "model.layers.4.mlp.experts.0.up_proj.weight"
    )
    for other in (
        "model.layers.5.eh_proj.weight",
        "model.layers.3.eh_proj.weight",
        "model.eh_proj.weight",
        "lm_head.weight",
    ):
        assert not is_ignored_tensor(spec, other)
    assert not is_ignored_tensor(read(num_nextn_predict_layers=0), "model.layers.4.eh_proj.weight")


def test_a_spec_and_a_table_that_disagree_are_refused():
    with pytest.raises(
        ModelError, match="deepseek_v3: the tensor table and the configuration disagree on whether attention is latent"
    ):
        hf_tensors(replace(read(), latent=None))


def test_dense_and_expert_layers_have_their_own_tensors():
    by_layer = [
        {e.name.partition(".mlp.")[2] for e in hf_tensors(read()) if e.layer == layer and ".mlp." in e.name}
        for layer in (0, 1)
    ]
    assert by_layer[0] == {"gate_proj.weight", "up_proj.weight", "down_proj.weight"}
    assert {
        "gate.weight",
        "gate.e_score_correction_bias",
        "shared_experts.up_proj.weight",
        "experts.15.down_proj.weight",
    } < by_layer[1]
    assert not by_layer[0] & by_layer[1]
    (bias,) = [e for e in hf_tensors(read()) if e.layer == 1 and e.is_buffer]
    assert (bias.parameter, bias.shape, bias.sharding) == (
        "decoder.layers.1.mlp.router.expert_bias",
        (16,),
        "replicated",
    )

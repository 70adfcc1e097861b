import pytest

from gspo_mega.base.errors import ModelError
from gspo_mega.models.huggingface import spec_from_config
from gspo_mega.models.spec import MoeSpec, RopeScaling
from gspo_mega.models.tensors import count_parameters

# As published, shortened to what is read: Llama-2-7b (no rope_theta, no head_dim), Llama-3.1-8B, Qwen2.5-0.5B,
# Mixtral-8x7B. Llama-2-7b's own torch_dtype is float16.
LLAMA_2 = dict(
    architectures=["LlamaForCausalLM"],
    hidden_act="silu",
    hidden_size=4096,
    intermediate_size=11008,
    max_position_embeddings=4096,
    num_attention_heads=32,
    num_hidden_layers=32,
    num_key_value_heads=32,
    pretraining_tp=1,
    rms_norm_eps=1e-05,
    rope_scaling=None,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
    vocab_size=32000,
    eos_token_id=2,
)
LLAMA_3 = LLAMA_2 | dict(
    attention_bias=False,
    intermediate_size=14336,
    max_position_embeddings=131072,
    mlp_bias=False,
    num_key_value_heads=8,
    rope_scaling=dict(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192, rope_type="llama3"
    ),
    rope_theta=500000.0,
    vocab_size=128256,
    eos_token_id=[128001, 128008, 128009],
)
QWEN_2 = dict(
    architectures=["Qwen2ForCausalLM"],
    hidden_act="silu",
    hidden_size=896,
    intermediate_size=4864,
    max_position_embeddings=32768,
    max_window_layers=24,
    num_attention_heads=14,
    num_hidden_layers=24,
    num_key_value_heads=2,
    rms_norm_eps=1e-06,
    rope_theta=1000000.0,
    sliding_window=32768,
    tie_word_embeddings=True,
    torch_dtype="bfloat16",
    use_sliding_window=False,
    vocab_size=151936,
    eos_token_id=151645,
)
MIXTRAL = dict(
    architectures=["MixtralForCausalLM"],
    hidden_act="silu",
    hidden_size=4096,
    intermediate_size=14336,
    max_position_embeddings=32768,
    num_attention_heads=32,
    num_experts_per_tok=2,
    num_hidden_layers=32,
    num_key_value_heads=8,
    num_local_experts=8,
    rms_norm_eps=1e-05,
    rope_theta=1000000.0,
    router_aux_loss_coef=0.02,
    sliding_window=None,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
    vocab_size=32000,
    eos_token_id=2,
)


QWEN_1_5_MOE = dict(
    architectures=["Qwen2MoeForCausalLM"],
    attention_dropout=0.0,
    decoder_sparse_step=1,
    hidden_act="silu",
    hidden_size=2048,
    intermediate_size=5632,
    max_position_embeddings=8192,
    max_window_layers=21,
    moe_intermediate_size=1408,
    norm_topk_prob=False,
    num_attention_heads=16,
    num_experts=60,
    num_experts_per_tok=4,
    num_hidden_layers=24,
    num_key_value_heads=16,
    rms_norm_eps=1e-06,
    rope_theta=1000000.0,
    shared_expert_intermediate_size=5632,
    sliding_window=32768,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
    use_sliding_window=False,
    vocab_size=151936,
    eos_token_id=151643,
)


def test_a_published_config_with_a_gated_shared_expert():
    spec = spec_from_config(QWEN_1_5_MOE)
    moe = MoeSpec(
        num_experts=60,
        experts_per_token=4,
        expert_intermediate_size=1408,
        norm_topk_prob=False,
        shared_intermediate_size=5632,
        shared_gate=True,
    )
    assert (spec.family, spec.moe, spec.head_dim, spec.attention_bias) == ("qwen2_moe", moe, 128, True)
    # The published model card: 14.3 billion parameters, 2.7 of them active.
    counts = count_parameters(spec)
    assert round(counts.total / 1e9, 1) == 14.3 and round(counts.active / 1e9, 1) == 2.7


# GLM-4.5-Air; GLM-4.5 and 4.6 have norms on query and key besides.
GLM_AIR = dict(
    architectures=["Glm4MoeForCausalLM"],
    attention_bias=True,
    attention_dropout=0.0,
    eos_token_id=[151329, 151336, 151338],
    first_k_dense_replace=1,
    head_dim=128,
    hidden_act="silu",
    hidden_size=4096,
    intermediate_size=10944,
    max_position_embeddings=131072,
    moe_intermediate_size=1408,
    n_group=1,
    n_routed_experts=128,
    n_shared_experts=1,
    norm_topk_prob=True,
    num_attention_heads=96,
    num_experts_per_tok=8,
    num_hidden_layers=46,
    num_key_value_heads=8,
    num_nextn_predict_layers=1,
    partial_rotary_factor=0.5,
    rms_norm_eps=1e-05,
    rope_scaling=None,
    rope_theta=1000000,
    routed_scaling_factor=1.0,
    tie_word_embeddings=False,
    topk_group=1,
    torch_dtype="bfloat16",
    use_qk_norm=False,
    vocab_size=151552,
)
GLM_FULL = GLM_AIR | dict(
    first_k_dense_replace=3,
    hidden_size=5120,
    intermediate_size=12288,
    moe_intermediate_size=1536,
    n_routed_experts=160,
    num_hidden_layers=92,
    routed_scaling_factor=2.5,
    use_qk_norm=True,
)


def test_published_configs_of_glm():
    air, full = spec_from_config(GLM_AIR), spec_from_config(GLM_FULL)
    assert (air.family, air.qk_norm, air.attention_bias, air.rotary_share) == ("glm4_moe", False, True, 0.5)
    assert (full.qk_norm, full.num_ignored_layers, full.moe.num_dense_layers) == (True, 1, 3)
    assert full.moe.shared_intermediate_size == 1536 and full.moe.expert_bias
    # The model cards: 106 billion parameters with 12 active, 355 with 32; active ones without embedding and head.
    counted = [(count_parameters(spec), 2 * spec.vocab_size * spec.hidden_size) for spec in (air, full)]
    assert [round(counts.total / 1e9) for counts, _ in counted] == [107, 353]
    assert [round((counts.active - outside) / 1e9) for counts, outside in counted] == [12, 32]


@pytest.mark.parametrize(
    ("changes", "share"),
    [
        ({}, 0.5),
        ({"partial_rotary_factor": None}, 0.5),
        ({"partial_rotary_factor": 1.0}, 1.0),
        # transformers 5 writes its default at the top level, and computes with the other one.
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default", "partial_rotary_factor": 0.25}}, 0.25),
    ],
)
def test_the_part_of_a_head_that_positions_turn(changes, share):
    assert spec_from_config(GLM_AIR | changes).rotary_share == share


def test_published_weights_in_float16_are_refused_with_a_way_out():
    with pytest.raises(ModelError, match="torch_dtype: 'float16' is not supported; .*from_pretrained"):
        spec_from_config(LLAMA_2 | {"torch_dtype": "float16"})


def test_published_configs_of_other_families():
    two = spec_from_config(LLAMA_2)
    assert (two.family, two.head_dim, two.rope_theta, two.rope_scaling) == ("llama", 128, 10000.0, None)
    assert spec_from_config({k: v for k, v in LLAMA_2.items() if k != "num_key_value_heads"}).num_kv_heads == 32
    three = spec_from_config(LLAMA_3)
    assert (three.rope_theta, three.num_kv_heads) == (500000.0, 8)
    assert three.rope_scaling == RopeScaling(
        factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_positions=8192
    )
    assert not two.qk_norm and not two.attention_bias and not three.qk_norm
    qwen = spec_from_config(QWEN_2)
    assert (qwen.family, qwen.head_dim, qwen.attention_bias, qwen.qk_norm, qwen.tie_word_embeddings) == (
        "qwen2",
        64,
        True,
        False,
        True,
    )
    mixtral = spec_from_config(MIXTRAL)
    assert mixtral.moe == MoeSpec(
        num_experts=8, experts_per_token=2, expert_intermediate_size=14336, norm_topk_prob=True
    )
    assert not mixtral.qk_norm and mixtral.head_dim == 128


def test_llama_3_scaling_reads_the_same_from_transformers_5():
    scaling = LLAMA_3["rope_scaling"]
    five = {k: v for k, v in LLAMA_3.items() if k not in ("rope_scaling", "rope_theta")} | {
        "rope_parameters": scaling | {"rope_theta": 500000.0}
    }
    assert spec_from_config(five).rope_scaling == spec_from_config(LLAMA_3).rope_scaling


@pytest.mark.parametrize(
    ("raw", "key"),
    [
        (LLAMA_3 | {"attention_bias": True}, "attention_bias"),
        (LLAMA_3 | {"mlp_bias": True}, "mlp_bias"),
        (LLAMA_3 | {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
        (LLAMA_3 | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling"),
        (LLAMA_3 | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling"),
        (LLAMA_3 | {"rope_scaling": LLAMA_3["rope_scaling"] | {"low_freq_factor": 4.0}}, "rope_scaling"),
        (LLAMA_3 | {"rope_parameters": LLAMA_3["rope_scaling"] | {"factor": 32.0}}, "rope_scaling"),
        (LLAMA_2 | {"num_attention_heads": 24, "num_key_value_heads": 8}, "num_attention_heads"),
        (QWEN_2 | {"use_sliding_window": True}, "use_sliding_window"),
        (QWEN_2 | {"qkv_bias": False}, "qkv_bias"),
        ({k: v for k, v in QWEN_1_5_MOE.items() if "shared" not in k}, "shared_expert_intermediate_size"),
        (QWEN_1_5_MOE | {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size"),
        (QWEN_1_5_MOE | {"mlp_only_layers": [0]}, "mlp_only_layers"),
        (QWEN_1_5_MOE | {"decoder_sparse_step": 2}, "decoder_sparse_step"),
        (QWEN_2 | {"num_key_value_heads": None}, "num_key_value_heads"),
        (QWEN_2 | {"rope_theta": None}, "rope_theta"),
        (GLM_AIR | {"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        (GLM_AIR | {"partial_rotary_factor": 0.12}, "partial_rotary_factor"),
        (GLM_AIR | {"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": "half"}}, "rope_parameters"),
        (
            GLM_AIR | {"rope_parameters": {"partial_rotary_factor": 1}, "rope_scaling": {"partial_rotary_factor": 0.5}},
            "rope_scaling",
        ),
        (GLM_AIR | {"rope_scaling": LLAMA_3["rope_scaling"]}, "rope_scaling"),
        (GLM_AIR | {"use_qk_norm": "yes"}, "use_qk_norm"),
        (GLM_AIR | {"norm_topk_prob": False}, "norm_topk_prob"),
        (QWEN_2 | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (MIXTRAL | {"sliding_window": 4096}, "sliding_window"),
        (MIXTRAL | {"router_jitter_noise": 0.1}, "router_jitter_noise"),
        (MIXTRAL | {"num_local_experts": None}, "num_local_experts"),
    ],
)
def test_what_changes_the_maths_of_other_families_is_refused_by_name(raw, key):
    with pytest.raises(ModelError) as caught:
        spec_from_config(raw, where="m/config.json")
    lines = str(caught.value).splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"m/config.json: {key}: ")

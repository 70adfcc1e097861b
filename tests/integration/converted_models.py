"""Random models of several families as Hugging Face folders that have been through Megatron's format."""

from __future__ import annotations

from pathlib import Path

import torch
from family_models import PROOFS, VARIANTS
from tiny_models import EOS_TOKEN_ID, VOCAB_SIZE, byte_tokenizer

from gspo_mega.checkpoint.convert import to_huggingface, to_megatron
from gspo_mega.checkpoint.tensor_sources import open_checkpoint
from gspo_mega.models.families import FAMILIES

SHARED = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=128,
    max_position_embeddings=512,
    bos_token_id=0,
    eos_token_id=EOS_TOKEN_ID,
    pad_token_id=0,
    initializer_range=0.08,
)
LLAMA_3 = dict(
    rope_type="llama3",
    rope_theta=1e4,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
DEEPSEEK = dict(
    num_key_value_heads=4,
    q_lora_rank=24,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    n_routed_experts=16,
    num_experts_per_tok=4,
    n_group=4,
    topk_group=2,
    n_shared_experts=1,
    moe_intermediate_size=32,
    first_k_dense_replace=1,
    num_nextn_predict_layers=0,
    # SGLang on CPU knows this one only.
    rope_parameters=dict(
        rope_type="yarn",
        rope_theta=1e4,
        factor=4.0,
        original_max_position_embeddings=128,
        mscale=1.0,
        mscale_all_dim=1.0,
    ),
)
# Family, its own keys, the trainer's layout.
MODELS = {
    "qwen2-tied": ("qwen2", dict(tie_word_embeddings=True), dict(tensor=2)),
    "llama3": ("llama", dict(rope_parameters=LLAMA_3), dict(tensor=2)),
    "mixtral": ("mixtral", dict(num_local_experts=4, num_experts_per_tok=2), dict(expert=2)),
    "qwen2_moe": (
        "qwen2_moe",
        dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=64),
        dict(expert=2),
    ),
    "deepseek_v3": ("deepseek_v3", DEEPSEEK, dict(expert=2)),
    "glm4_moe": (
        "glm4_moe",
        dict(
            attention_bias=True,
            use_qk_norm=True,
            n_routed_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            routed_scaling_factor=1.5,
            num_nextn_predict_layers=0,
        ),
        dict(expert=2),
    ),
    # A window that prompts alone exceed.
    "gpt_oss": (
        "gpt_oss",
        dict(
            head_dim=16,
            num_local_experts=4,
            num_experts_per_tok=2,
            intermediate_size=32,
            sliding_window=8,
            swiglu_limit=1.0,
            rope_parameters=dict(
                rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=128, truncate=False
            ),
        ),
        dict(expert=2),
    ),
    **{
        variant: (VARIANTS[variant][0], VARIANTS[variant][1] | proof.served, proof.layout)
        for variant, proof in PROOFS.items()
    },
}


def make_converted_model(root: Path, name: str) -> Path:
    """A random model (biases too) that has been through Megatron's format."""
    import transformers

    family, own, _ = MODELS[name]
    model_class = getattr(transformers, FAMILIES[family].architecture)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**SHARED | own))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith(("bias", "sinks")):
                parameter.normal_(std=0.3)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.1)
    model.to(torch.float32).save_pretrained(root / "source")
    byte_tokenizer().save_pretrained(root / "source")
    to_megatron(open_checkpoint(root / "source"), root / "megatron", progress=lambda *told: None)
    to_huggingface(open_checkpoint(root / "megatron"), root / "model", progress=lambda *told: None)
    return root / "model"

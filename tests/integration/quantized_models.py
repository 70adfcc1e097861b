"""A tiny Qwen3-MoE whose every linear layer has sides that are multiples of 128, as servers of FP8 blocks need them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.models.tensors import hf_tensors

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 300,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "eos_token_id": 2,
    "dtype": "float32",
}


def make_blocks_model(folder: Path, seed: int = 5, **changes: object) -> Path:
    """Random fp32 weights in a plain Hugging Face folder. `changes`: of CONFIG."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    generator = torch.Generator().manual_seed(seed)
    tensors = {e.name: 0.1 * torch.randn(e.shape, generator=generator) for e in hf_tensors(read_model_spec(folder))}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder

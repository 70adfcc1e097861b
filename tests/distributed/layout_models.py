"""Random Hugging Face folders for the layout tests, written tensor by tensor from the family table."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.models.tensors import hf_tensors


def make_folder(
    folder: Path,
    *,
    moe: bool,
    tied: bool = False,
    layers: int = 4,
    seed: int = 0,
    deviation: float = 0.08,
    per_token: int = 2,
) -> Path:
    """A Qwen3 or Qwen3-MoE checkpoint of random fp32 weights. `deviation`: of a weight, large enough for distinct routes
    unless given. `per_token`: experts of a token.
    """
    config = dict(
        architectures=["Qwen3MoeForCausalLM" if moe else "Qwen3ForCausalLM"],
        model_type="qwen3_moe" if moe else "qwen3",
        vocab_size=512,
        hidden_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=128,
        max_position_embeddings=256,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        hidden_act="silu",
        tie_word_embeddings=tied,
        attention_bias=False,
        eos_token_id=2,
        dtype="float32",
    )
    if moe:
        config |= dict(
            num_experts=8,
            num_experts_per_tok=per_token,
            moe_intermediate_size=32,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[],
        )
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(seed)
    tensors = {}
    for entry in hf_tensors(read_model_spec(folder)):
        if len(entry.shape) == 1:
            tensors[entry.name] = (1 + 0.1 * rng.standard_normal(entry.shape)).astype(np.float32)
        else:
            tensors[entry.name] = (deviation * rng.standard_normal(entry.shape)).astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    return folder

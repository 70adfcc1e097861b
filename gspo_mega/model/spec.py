"""ModelSpec: what a Hugging Face `config.json` says about a model, in this package's own words.

Owns the record alone; reading a folder is `huggingface.py`, tensor names and shapes are `families.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class MoeSpec:
    num_experts: int
    experts_per_token: int
    expert_intermediate_size: int
    norm_topk_prob: bool = True


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's stretching of rotary wavelengths, in tokens: those above `original_positions` / `low_frequency_factor` become
    `factor` times as long, those below `original_positions` / `high_frequency_factor` stay, in between goes smoothly."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_positions: int


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer: RMSNorm, rotary positions, grouped-query attention, gated SiLU MLP or MoE.

    `family` is the key of the table in `tables.py` (`qwen3`, `llama`). Sizes are global, before any parallelism.
    `attention_bias`: the query, key and value projections add one (the output projection never does). `torch_dtype` is
    the checkpoint's (`float32`, `bfloat16`). `raw` is config.json as read.
    """

    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rope_theta: float
    rms_norm_eps: float
    tie_word_embeddings: bool
    qk_norm: bool
    attention_bias: bool
    torch_dtype: str
    eos_token_ids: tuple[int, ...]
    moe: MoeSpec | None = None
    rope_scaling: RopeScaling | None = None
    raw: dict[str, Any] | None = None


# Fields that neither a model's weights nor its log-probs depend on.
_IMMATERIAL = ("raw", "torch_dtype", "eos_token_ids", "max_position_embeddings")


def shape_differences(theirs: ModelSpec, ours: ModelSpec) -> list[str]:
    """What keeps one model's weights from taking the place of the other's, one text a field; empty for models of one shape."""
    return [
        f"{field.name} {getattr(theirs, field.name)!r} instead of {getattr(ours, field.name)!r}"
        for field in fields(ModelSpec)
        if field.name not in _IMMATERIAL and getattr(theirs, field.name) != getattr(ours, field.name)
    ]

"""The families: every tensor of a Hugging Face checkpoint, where Megatron keeps it, and what config.json leaves unsaid.

Declarations only. What is derived from them (a model's tensors, how they are cut over ranks) is `families.py`, the
reading of config.json `huggingface.py`. How to add a family: `FAMILIES.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

# How a tensor lies in its parameter. `q`, `k`, `v`: interleaved by key-value group, [q heads of the group, k, v].
# `gate`, `up`: every rank's share of the gate, then its share of up.
Role = Literal["whole", "q", "k", "v", "gate", "up"]
# How a tensor is cut over a tensor-parallel group: rows (column-parallel layer), columns (row-parallel layer),
# vocabulary rows (padded), or not at all.
Sharding = Literal["replicated", "rows", "columns", "vocabulary"]
# Which pipeline stage holds it.
Stage = Literal["first", "layer", "last"]
# What a config.json may leave out: head_dim is then hidden_size / num_attention_heads, num_key_value_heads is
# num_attention_heads, rope_theta 10000.
Omissible = Literal["head_dim", "num_key_value_heads", "rope_theta"]


@dataclass(frozen=True)
class TensorRule:
    """One row of a family table; `{layer}` and `{expert}` are filled in, sizes are named as in `families.py`."""

    name: str
    shape: tuple[str, ...]
    parameter: str
    role: Role
    sharding: Sharding
    stage: Stage


@dataclass(frozen=True)
class ExpertKeys:
    """Where a family's config.json describes its experts: `num_experts` under any of these keys, their width under
    `intermediate_size`. `norm_topk_prob` is the family's own, or None where the key of that name says (absent: false)."""

    num_experts: tuple[str, ...]
    intermediate_size: str
    norm_topk_prob: bool | None = None


@dataclass(frozen=True)
class Family:
    """One architecture. `architecture` is the class name in config.json; `qk_norm` and `qkv_bias` hold for every model of it.

    `refused`: keys of config.json, and their meaning, that change this family's maths to what is not done here when
    they are set.
    """

    architecture: str
    tensors: tuple[TensorRule, ...]
    qk_norm: bool = False
    qkv_bias: bool = False
    experts: ExpertKeys | None = None
    may_omit: frozenset[Omissible] = frozenset()
    refused: Mapping[str, str] = field(default_factory=dict)


def _layer(name: str, shape: tuple[str, ...], parameter: str, role: Role, sharding: Sharding) -> TensorRule:
    return TensorRule(f"model.layers.{{layer}}.{name}", shape, f"decoder.layers.{{layer}}.{parameter}", role, sharding, "layer")


def _attention(*own: TensorRule) -> tuple[TensorRule, ...]:
    """Norms and attention of one layer; `own` is what a family has besides."""
    return (
        _layer("input_layernorm.weight", ("hidden",), "input_layernorm.weight", "whole", "replicated"),
        _layer("self_attn.q_proj.weight", ("query", "hidden"), "self_attention.linear_qkv.weight", "q", "rows"),
        _layer("self_attn.k_proj.weight", ("key_value", "hidden"), "self_attention.linear_qkv.weight", "k", "rows"),
        _layer("self_attn.v_proj.weight", ("key_value", "hidden"), "self_attention.linear_qkv.weight", "v", "rows"),
        *own,
        _layer("self_attn.o_proj.weight", ("hidden", "query"), "self_attention.linear_proj.weight", "whole", "columns"),
        _layer("post_attention_layernorm.weight", ("hidden",), "pre_mlp_layernorm.weight", "whole", "replicated"),
    )


_QK_NORM = (
    _layer("self_attn.q_norm.weight", ("head",), "self_attention.q_layernorm.weight", "whole", "replicated"),
    _layer("self_attn.k_norm.weight", ("head",), "self_attention.k_layernorm.weight", "whole", "replicated"),
)
_QKV_BIAS = (
    _layer("self_attn.q_proj.bias", ("query",), "self_attention.linear_qkv.bias", "q", "rows"),
    _layer("self_attn.k_proj.bias", ("key_value",), "self_attention.linear_qkv.bias", "k", "rows"),
    _layer("self_attn.v_proj.bias", ("key_value",), "self_attention.linear_qkv.bias", "v", "rows"),
)
_DENSE_MLP = (
    _layer("mlp.gate_proj.weight", ("intermediate", "hidden"), "mlp.linear_fc1.weight", "gate", "rows"),
    _layer("mlp.up_proj.weight", ("intermediate", "hidden"), "mlp.linear_fc1.weight", "up", "rows"),
    _layer("mlp.down_proj.weight", ("hidden", "intermediate"), "mlp.linear_fc2.weight", "whole", "columns"),
)


def _experts(block: str, gate: str, up: str, down: str) -> tuple[TensorRule, ...]:
    """Router and experts of one layer, under the names that the checkpoint has for them."""
    expert, ours = f"{block}.experts.{{expert}}.", "mlp.experts.{expert}."
    return (
        _layer(f"{block}.gate.weight", ("experts", "hidden"), "mlp.router.weight", "whole", "replicated"),
        _layer(f"{expert}{gate}.weight", ("expert_intermediate", "hidden"), f"{ours}linear_fc1.weight", "gate", "rows"),
        _layer(f"{expert}{up}.weight", ("expert_intermediate", "hidden"), f"{ours}linear_fc1.weight", "up", "rows"),
        _layer(f"{expert}{down}.weight", ("hidden", "expert_intermediate"), f"{ours}linear_fc2.weight", "whole", "columns"),
    )


_VOCABULARY = ("vocabulary", "hidden")
EMBEDDING = TensorRule("model.embed_tokens.weight", _VOCABULARY, "embedding.word_embeddings.weight", "whole", "vocabulary", "first")
_FINAL_NORM = TensorRule("model.norm.weight", ("hidden",), "decoder.final_layernorm.weight", "whole", "replicated", "last")
HEAD = TensorRule("lm_head.weight", _VOCABULARY, "output_layer.weight", "whole", "vocabulary", "last")


def _decoder(*per_layer: TensorRule) -> tuple[TensorRule, ...]:
    """The table of a family, in the order of export, from what every layer has."""
    return (EMBEDDING, *per_layer, _FINAL_NORM, HEAD)


FAMILIES: dict[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        _decoder(*_attention(), *_DENSE_MLP),
        may_omit=frozenset({"head_dim", "num_key_value_heads", "rope_theta"}),
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        _decoder(*_attention(*_QKV_BIAS), *_DENSE_MLP),
        qkv_bias=True,
        may_omit=frozenset({"head_dim"}),
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        _decoder(*_attention(*_QK_NORM), *_DENSE_MLP),
        qk_norm=True,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        _decoder(*_attention(*_QK_NORM), *_experts("mlp", "gate_proj", "up_proj", "down_proj")),
        qk_norm=True,
        experts=ExpertKeys(("num_experts", "num_local_experts"), "moe_intermediate_size"),  # 4.x and 5.x of transformers
        may_omit=frozenset({"head_dim"}),
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        _decoder(*_attention(), *_experts("block_sparse_moe", "w1", "w3", "w2")),
        experts=ExpertKeys(("num_local_experts", "num_experts"), "intermediate_size", norm_topk_prob=True),
        may_omit=frozenset({"head_dim"}),
        refused={"sliding_window": "sliding-window attention", "router_jitter_noise": "noise in the router"},
    ),
}

"""The family tables: every tensor of a Hugging Face checkpoint, and where Megatron keeps it.

Owns names, shapes, order, fusion and sharding, declared once a family and derived for everything else: import,
export, publish, parameter counts. Moves no data and imports no torch.

Words: a *tensor* is one entry of the checkpoint; a *parameter* is Megatron's, often several tensors fused. A
parameter's *canonical name* has the global layer and the global expert in it, whatever the layout:
`decoder.layers.17.mlp.experts.5.linear_fc1.weight`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from gspo_mega.errors import ModelError
from gspo_mega.model.spec import ModelSpec

# How a tensor lies in its parameter. `q`, `k`, `v`: interleaved by key-value group, [q heads of the group, k, v].
# `gate`, `up`: every rank's share of the gate, then its share of up.
Role = Literal["whole", "q", "k", "v", "gate", "up"]
# How a tensor is cut over a tensor-parallel group: rows (column-parallel layer), columns (row-parallel layer),
# vocabulary rows (padded), or not at all.
Sharding = Literal["replicated", "rows", "columns", "vocabulary"]
# Which pipeline stage holds it.
Stage = Literal["first", "layer", "last"]

VOCABULARY_MULTIPLE = 128


def padded_vocab_size(vocab_size: int, tensor_parallel: int) -> int:
    """Rows of Megatron's embedding and output layer: the smallest multiple of lcm(128, tensor_parallel).

    The multiple keeps the matrix products aligned, and is the same for every power of two up to 128, so that a
    checkpoint's global shapes do not depend on the tensor-parallel size. Rows from `vocab_size` on are padding:
    zero after import, dropped at export, and no part of any log-softmax. With a small vocabulary the last
    ranks may hold nothing but padding.
    """
    multiple = math.lcm(VOCABULARY_MULTIPLE, tensor_parallel)
    return -(-vocab_size // multiple) * multiple


@dataclass(frozen=True)
class TensorRule:
    """One row of a family table; `{layer}` and `{expert}` are filled in, sizes are keys of `_sizes`."""

    name: str
    shape: tuple[str, ...]
    parameter: str
    role: Role
    sharding: Sharding
    stage: Stage


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of the checkpoint. `shape` is global; `layer` and `expert` are global, zero-based, or None.

    `parameter` is the canonical name of the parameter that owns it. `copies` are parameters that hold the same
    values where they exist: the last pipeline stage's output layer when embeddings are tied. An expert's
    tensor is cut over the expert-tensor group, any other over the tensor group.
    """

    name: str
    shape: tuple[int, ...]
    parameter: str
    role: Role
    sharding: Sharding
    stage: Stage
    layer: int | None
    expert: int | None
    copies: tuple[str, ...] = ()

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Block:
    """[start, start + length) of a tensor equals [local_start, local_start + length) of a rank's parameter, along `dim`."""

    dim: int
    start: int
    local_start: int
    length: int


_LAYER, _MEGATRON_LAYER = "model.layers.{layer}.", "decoder.layers.{layer}."


def _layer(name: str, shape: tuple[str, ...], parameter: str, role: Role, sharding: Sharding) -> TensorRule:
    return TensorRule(f"{_LAYER}{name}.weight", shape, f"{_MEGATRON_LAYER}{parameter}.weight", role, sharding, "layer")


_ATTENTION = (
    _layer("input_layernorm", ("hidden",), "input_layernorm", "whole", "replicated"),
    _layer("self_attn.q_proj", ("query", "hidden"), "self_attention.linear_qkv", "q", "rows"),
    _layer("self_attn.k_proj", ("key_value", "hidden"), "self_attention.linear_qkv", "k", "rows"),
    _layer("self_attn.v_proj", ("key_value", "hidden"), "self_attention.linear_qkv", "v", "rows"),
    _layer("self_attn.q_norm", ("head",), "self_attention.q_layernorm", "whole", "replicated"),
    _layer("self_attn.k_norm", ("head",), "self_attention.k_layernorm", "whole", "replicated"),
    _layer("self_attn.o_proj", ("hidden", "query"), "self_attention.linear_proj", "whole", "columns"),
    _layer("post_attention_layernorm", ("hidden",), "pre_mlp_layernorm", "whole", "replicated"),
)
_DENSE_MLP = (
    _layer("mlp.gate_proj", ("intermediate", "hidden"), "mlp.linear_fc1", "gate", "rows"),
    _layer("mlp.up_proj", ("intermediate", "hidden"), "mlp.linear_fc1", "up", "rows"),
    _layer("mlp.down_proj", ("hidden", "intermediate"), "mlp.linear_fc2", "whole", "columns"),
)
_EXPERT = "mlp.experts.{expert}."
_MOE_MLP = (
    _layer("mlp.gate", ("experts", "hidden"), "mlp.router", "whole", "replicated"),
    _layer(_EXPERT + "gate_proj", ("expert_intermediate", "hidden"), _EXPERT + "linear_fc1", "gate", "rows"),
    _layer(_EXPERT + "up_proj", ("expert_intermediate", "hidden"), _EXPERT + "linear_fc1", "up", "rows"),
    _layer(_EXPERT + "down_proj", ("hidden", "expert_intermediate"), _EXPERT + "linear_fc2", "whole", "columns"),
)
_VOCABULARY = ("vocabulary", "hidden")
_EMBEDDING = TensorRule("model.embed_tokens.weight", _VOCABULARY, "embedding.word_embeddings.weight", "whole", "vocabulary", "first")
_FINAL_NORM = TensorRule("model.norm.weight", ("hidden",), "decoder.final_layernorm.weight", "whole", "replicated", "last")
_HEAD = TensorRule("lm_head.weight", _VOCABULARY, "output_layer.weight", "whole", "vocabulary", "last")

FAMILIES: dict[str, tuple[TensorRule, ...]] = {
    "qwen3": (_EMBEDDING, *_ATTENTION, *_DENSE_MLP, _FINAL_NORM, _HEAD),
    "qwen3_moe": (_EMBEDDING, *_ATTENTION, *_MOE_MLP, _FINAL_NORM, _HEAD),
}


def _sizes(spec: ModelSpec) -> dict[str, int]:
    sizes = {
        "vocabulary": spec.vocab_size,
        "hidden": spec.hidden_size,
        "head": spec.head_dim,
        "query": spec.num_heads * spec.head_dim,
        "key_value": spec.num_kv_heads * spec.head_dim,
        "intermediate": spec.intermediate_size,
    }
    if spec.moe is not None:
        sizes |= {"experts": spec.moe.num_experts, "expert_intermediate": spec.moe.expert_intermediate_size}
    return sizes


def hf_tensors(spec: ModelSpec) -> list[TensorEntry]:
    """Every tensor of the model's checkpoint, in the order in which it is exported and sent.

    Order: embedding; layer by layer, experts innermost and in order; final norm; head. With tied embeddings there
    is no head on disk. Raises ModelError for a family without a table or a feature that no table has.
    """
    rules = FAMILIES.get(spec.family)
    if rules is None:
        raise ModelError(f"model family {spec.family!r} has no tensor table; known: {', '.join(sorted(FAMILIES))}")
    if spec.attention_bias or not spec.qk_norm:
        raise ModelError(
            f"{spec.family}: attention_bias={spec.attention_bias}, qk_norm={spec.qk_norm}: the tensor table is for attention "
            "without biases and with query and key norms"
        )
    if (spec.moe is not None) != any("{expert}" in rule.name for rule in rules):
        raise ModelError(f"{spec.family}: the tensor table and the configuration disagree on whether there are experts")
    per_layer = [rule for rule in rules if rule.stage == "layer"]
    entries = [_entry(spec, rule) for rule in rules if rule.stage == "first"]
    for layer in range(spec.num_layers):
        entries += [_entry(spec, rule, layer) for rule in per_layer if "{expert}" not in rule.name]
        for expert in range(spec.moe.num_experts if spec.moe is not None else 0):
            entries += [_entry(spec, rule, layer, expert) for rule in per_layer if "{expert}" in rule.name]
    return entries + [
        _entry(spec, rule) for rule in rules if rule.stage == "last" and not (rule is _HEAD and spec.tie_word_embeddings)
    ]


def _entry(spec: ModelSpec, rule: TensorRule, layer: int | None = None, expert: int | None = None) -> TensorEntry:
    sizes = _sizes(spec)
    return TensorEntry(
        name=rule.name.format(layer=layer, expert=expert),
        shape=tuple(sizes[key] for key in rule.shape),
        parameter=rule.parameter.format(layer=layer, expert=expert),
        role=rule.role,
        sharding=rule.sharding,
        stage=rule.stage,
        layer=layer,
        expert=expert,
        copies=(_HEAD.parameter,) if rule is _EMBEDDING and spec.tie_word_embeddings else (),
    )


def parameter_blocks(spec: ModelSpec, entry: TensorEntry, tensor_parallel: int, tensor_rank: int) -> list[Block]:
    """Which parts of the tensor one rank's share of its parameter holds, and where.

    `tensor_parallel` and `tensor_rank` are those of the expert-tensor group for an expert's tensor. A replicated
    tensor is one whole block on every rank. Blocks of all ranks together cover a sharded tensor exactly once.
    Raises ModelError when the sizes cannot be cut so.
    """
    if entry.sharding == "replicated":
        return [Block(0, 0, 0, entry.shape[0])]
    if entry.sharding == "columns":
        width = _share(entry, entry.shape[1], tensor_parallel)
        return [Block(1, tensor_rank * width, 0, width)]
    if entry.sharding == "vocabulary":
        rows = padded_vocab_size(spec.vocab_size, tensor_parallel) // tensor_parallel
        length = min(rows, entry.shape[0] - tensor_rank * rows)
        return [Block(0, tensor_rank * rows, 0, length)] if length > 0 else []
    if entry.role in ("q", "k", "v"):
        fused = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        rows = _share(entry, fused, tensor_parallel)
        return list(_cut(_fused_qkv_rows(spec, entry.role), tensor_rank * rows, rows))
    rows = _share(entry, entry.shape[0], tensor_parallel)
    return [Block(0, tensor_rank * rows, rows if entry.role == "up" else 0, rows)]


def parameter_shape(spec: ModelSpec, entry: TensorEntry, tensor_parallel: int) -> tuple[int, ...]:
    """Shape of one rank's share of the parameter that holds the tensor."""
    if entry.sharding == "replicated":
        return entry.shape
    if entry.sharding == "columns":
        return (entry.shape[0], _share(entry, entry.shape[1], tensor_parallel))
    if entry.sharding == "vocabulary":
        return (padded_vocab_size(spec.vocab_size, tensor_parallel) // tensor_parallel, *entry.shape[1:])
    if entry.role in ("q", "k", "v"):
        fused = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    else:
        fused = (2 if entry.role in ("gate", "up") else 1) * entry.shape[0]
    return (_share(entry, fused, tensor_parallel), *entry.shape[1:])


def expert_rank(spec: ModelSpec, expert: int, expert_parallel: int) -> int:
    """The expert-parallel rank that holds a (global) expert: consecutive experts share a rank."""
    if spec.moe is None or spec.moe.num_experts % expert_parallel:
        raise ModelError(f"{spec.moe.num_experts if spec.moe else 0} experts cannot be divided over {expert_parallel} expert-parallel ranks")
    return expert // (spec.moe.num_experts // expert_parallel)


def _share(entry: TensorEntry, size: int, parts: int) -> int:
    if size % parts:
        raise ModelError(f"{entry.name}: {size} rows or columns of {entry.parameter} cannot be divided over {parts} tensor-parallel ranks")
    return size // parts


def _fused_qkv_rows(spec: ModelSpec, role: Role) -> Iterator[Block]:
    """Rows of q, k or v in the unsharded fused parameter, one block a key-value group."""
    query = spec.num_heads // spec.num_kv_heads * spec.head_dim
    length, offset = {"q": (query, 0), "k": (spec.head_dim, query), "v": (spec.head_dim, query + spec.head_dim)}[role]
    for group in range(spec.num_kv_heads):
        yield Block(0, group * length, group * (query + 2 * spec.head_dim) + offset, length)


def _cut(blocks: Iterator[Block], start: int, length: int) -> Iterator[Block]:
    """The parts of the blocks within rows [start, start + length) of the parameter, counted from `start`.

    With more ranks than key-value groups a rank's share ends inside a group, so blocks are cut anywhere.
    """
    for block in blocks:
        first = max(block.local_start, start)
        last = min(block.local_start + block.length, start + length)
        if first < last:
            yield Block(block.dim, block.start + first - block.local_start, first - start, last - first)

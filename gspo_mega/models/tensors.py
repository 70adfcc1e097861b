"""The tensors of one model, how they are cut over ranks, and how many parameters and FLOPs they are.

Everything is derived from the family tables (`families.py`): names, shapes, order, fusion and sharding for import,
export, publish and conversion. This module moves no data and imports no torch.

A *tensor* is one entry of the checkpoint. A *parameter* is Megatron's, often several tensors fused. A parameter's
*canonical name* contains the global layer and the global expert, in any layout:
`decoder.layers.17.mlp.experts.5.linear_fc1.weight`. Some files and servers *stack* the tensors of experts, as for
gpt-oss and published Qwen3.5: one tensor for all experts of a layer. Only the functions on files know stacks;
everything that has to do with ranks and parameters keeps one tensor per expert.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from gspo_mega.base.errors import ModelError
from gspo_mega.models import delta_net
from gspo_mega.models.families import EMBEDDING, FAMILIES, HEAD, Role, Sharding, Stack, Stage, TensorRule, in_stack
from gspo_mega.models.spec import ModelSpec

VOCABULARY_MULTIPLE = 128
# Tokens that the kernels of gated delta nets compute together.
DELTA_CHUNK = 64


def padded_vocab_size(vocab_size: int, tensor_parallel: int) -> int:
    """Rows of Megatron's embedding and output layer: the smallest multiple of lcm(128, tensor_parallel).

    The multiple keeps the matrix products aligned, and is the same for every power of two up to 128, so that a
    checkpoint's global shapes do not depend on the tensor-parallel size. Rows from `vocab_size` on are padding: zero
    after import, dropped at export, and not part of any log-softmax. With a small vocabulary the last ranks may hold
    only padding.
    """
    multiple = math.lcm(VOCABULARY_MULTIPLE, tensor_parallel)
    return -(-vocab_size // multiple) * multiple


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of the checkpoint. `shape` is global; `layer` and `expert` are global, zero-based, or None.

    `parameter` is the canonical name of the parameter that owns it. `copies` are parameters that hold the same values,
    if they exist: the last pipeline stage's output layer when embeddings are tied. `is_buffer`: not trained by the
    optimizer, and fp32 in a checkpoint of any dtype. `served_wide`: SGLang holds it in fp32. An expert's tensor is cut
    over the expert-tensor group, any other over the tensor group. `stack`: the tensor of all experts that contains this
    one in files and on servers.
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
    is_buffer: bool = False
    served_wide: bool = False
    stack: Stack | None = None

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class TensorBlock:
    """[start, start + length) of a tensor equals [local_start, local_start + length) of a rank's parameter, along
    `dim`.
    """

    dim: int
    start: int
    local_start: int
    length: int


def _sizes(spec: ModelSpec) -> dict[str, int]:
    sizes = {
        "vocabulary": spec.vocab_size,
        "hidden": spec.hidden_size,
        "head": spec.head_dim,
        "heads": spec.num_heads,
        "query": spec.num_heads * spec.head_dim,
        "key_value": spec.num_kv_heads * spec.head_dim,
        "value": spec.num_heads * spec.value_head_dim,
        "gated_query": 2 * spec.num_heads * spec.head_dim,
        "intermediate": spec.intermediate_size,
        "one": 1,
    }
    if spec.latent is not None:
        sizes |= {
            "query_rank": spec.latent.query_rank or 0,
            "key_value_rank": spec.latent.key_value_rank,
            "latent": spec.latent.key_value_rank + spec.latent.rotary_dim,
            "content_value": spec.num_heads * (spec.latent.content_dim + spec.latent.value_dim),
        }
    if spec.moe is not None:
        sizes |= {
            "experts": spec.moe.num_experts,
            "expert_intermediate": spec.moe.expert_intermediate_size,
            "shared_intermediate": spec.moe.shared_intermediate_size,
        }
    if spec.delta is not None:
        sizes |= delta_net.sizes(spec.delta)
    return sizes


def _is_in_layer(spec: ModelSpec, rule: TensorRule, layer: int) -> bool:
    """Whether the row's tensor is in this layer of this model."""
    if rule.where in ("dense layer", "expert layer"):
        return spec.has_experts(layer) == (rule.where == "expert layer")
    if rule.where in ("attention", "delta net"):
        return spec.has_delta_net(layer) == (rule.where == "delta net")
    if rule.where in ("qk norm", "qkv bias"):
        return spec.qk_norm if rule.where == "qk norm" else spec.attention_bias
    if rule.where is not None:
        return (spec.latent is not None and spec.latent.query_rank is not None) == (rule.where == "query latent")
    return True


def hf_tensors(spec: ModelSpec) -> list[TensorEntry]:
    """Every tensor of the model's checkpoint, in the order in which it is exported and sent; experts that files stack
    are listed one by one.

    Order: embedding; layer by layer, experts innermost and in order (stack by stack); final norm; head. With tied
    embeddings there is no head on disk. Raises ModelError for a family without a table or a feature that no table has.
    """
    family = FAMILIES.get(spec.family)
    if family is None:
        raise ModelError(f"model family {spec.family!r} has no tensor table; known: {', '.join(sorted(FAMILIES))}")
    fixed = [value if isinstance(value, bool) else None for value in (family.qkv_bias, family.qk_norm)]
    if any(want not in (None, has) for want, has in zip(fixed, (spec.attention_bias, spec.qk_norm))):
        raise ModelError(
            f"{spec.family}: attention_bias={spec.attention_bias}, qk_norm={spec.qk_norm}: the tensor table is for "
            f"attention_bias={family.qkv_bias}, qk_norm={family.qk_norm}"
        )
    if (spec.moe is None) != (family.experts is None):
        raise ModelError(f"{spec.family}: the tensor table and the configuration disagree on whether there are experts")
    if (spec.latent is None) == family.latent:
        raise ModelError(
            f"{spec.family}: the tensor table and the configuration disagree on whether attention is latent"
        )
    global _last
    if _last is None or _last[0] is not spec:
        _last = (spec, tuple(_entries(spec, family.tensors)))
    return list(_last[1])


# The latest result of `hf_tensors`: a large model has tens of thousands of tensors, and a plan needs them often.
_last: tuple[ModelSpec, tuple[TensorEntry, ...]] | None = None


def _entries(spec: ModelSpec, rules: Sequence[TensorRule]) -> Iterator[TensorEntry]:
    sizes = _sizes(spec)
    if spec.stacks_experts:
        transposed = FAMILIES[spec.family].may_stack == "transposed"
        rules = [in_stack(rule, transposed) for rule in rules]
    yield from (_entry(spec, sizes, rule) for rule in rules if rule.stage == "first")
    for layer in range(spec.num_layers):
        per_layer = [rule for rule in rules if rule.stage == "layer" and _is_in_layer(spec, rule, layer)]
        yield from (_entry(spec, sizes, rule, layer) for rule in per_layer if "{expert}" not in rule.name)
        # Tensors that are stacked in files follow each other.
        of_experts = [rule for rule in per_layer if "{expert}" in rule.name]
        for _, own in itertools.groupby(of_experts, key=lambda rule: rule.stack and rule.stack.name):
            rules_here = list(own)
            for expert in range(spec.moe.num_experts if spec.moe is not None else 0):
                yield from (_entry(spec, sizes, rule, layer, expert) for rule in rules_here)
    for rule in rules:
        if rule.stage == "last" and not (rule is HEAD and spec.tie_word_embeddings):
            yield _entry(spec, sizes, rule)


def _entry(
    spec: ModelSpec, sizes: dict[str, int], rule: TensorRule, layer: int | None = None, expert: int | None = None
) -> TensorEntry:
    return TensorEntry(
        name=rule.name.format(layer=layer, expert=expert),
        shape=tuple(sizes[key] for key in rule.shape),
        parameter=rule.parameter.format(layer=layer, expert=expert),
        role=rule.role,
        sharding=rule.sharding,
        stage=rule.stage,
        layer=layer,
        expert=expert,
        copies=(HEAD.parameter,) if rule.parameter == EMBEDDING.parameter and spec.tie_word_embeddings else (),
        is_buffer=rule.is_buffer,
        served_wide=rule.served_wide,
        stack=None if rule.stack is None else replace(rule.stack, name=rule.stack.name.format(layer=layer)),
    )


_IN_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def is_ignored_tensor(spec: ModelSpec, name: str) -> bool:
    """Whether a checkpoint of the model may hold this tensor in addition to `hf_tensors`. Such tensors are ignored: a
    second copy of the head when embeddings are tied, and the layers for multi-token prediction after the last layer.
    """
    if name == HEAD.name:
        return spec.tie_word_embeddings
    if name.startswith(FAMILIES[spec.family].carried):
        return True
    found = _IN_LAYER.match(name)
    return found is not None and 0 <= int(found[1]) - spec.num_layers < spec.num_ignored_layers


def parameter_blocks(spec: ModelSpec, entry: TensorEntry, tensor_parallel: int, tensor_rank: int) -> list[TensorBlock]:
    """Which parts of the tensor one rank's share of its parameter holds, and at which place.

    `tensor_parallel` and `tensor_rank` are those of the expert-tensor group for an expert's tensor. A replicated
    tensor is one whole block on every rank. Blocks of all ranks together cover a sharded tensor exactly once.
    Raises ModelError if the sizes do not divide.
    """
    if entry.sharding == "replicated":
        return [TensorBlock(0, 0, 0, entry.shape[0])]
    if entry.sharding == "columns":
        width = _share(entry, entry.shape[1], tensor_parallel)
        return [TensorBlock(1, tensor_rank * width, 0, width)]
    if entry.sharding == "vocabulary":
        rows = padded_vocab_size(spec.vocab_size, tensor_parallel) // tensor_parallel
        length = min(rows, entry.shape[0] - tensor_rank * rows)
        return [TensorBlock(0, tensor_rank * rows, 0, length)] if length > 0 else []
    if entry.role in delta_net.ROLES:
        assert spec.delta is not None
        _share(entry, spec.delta.key_heads, tensor_parallel)
        return [
            TensorBlock(0, *rows) for rows in delta_net.rank_rows(spec.delta, entry.role, tensor_parallel, tensor_rank)
        ]
    if entry.role in ("q", "k", "v"):
        rows = _share(entry, _fused_qkv_size(spec), tensor_parallel)
        return list(_cut(_fused_qkv_rows(spec, entry.role), tensor_rank * rows, rows))
    rows = _share(entry, entry.shape[0], tensor_parallel)
    return [TensorBlock(0, tensor_rank * rows, rows if entry.role == "up" else 0, rows)]


def parameter_shape(spec: ModelSpec, entry: TensorEntry, tensor_parallel: int) -> tuple[int, ...]:
    """The shape of one rank's share of the parameter that holds the tensor. Raises ModelError if the sizes do not
    divide.
    """
    if entry.sharding == "replicated":
        return entry.shape
    if entry.sharding == "columns":
        return (entry.shape[0], _share(entry, entry.shape[1], tensor_parallel))
    if entry.sharding == "vocabulary":
        return (padded_vocab_size(spec.vocab_size, tensor_parallel) // tensor_parallel, *entry.shape[1:])
    if entry.role in ("q", "k", "v"):
        fused = _fused_qkv_size(spec)
    elif entry.role in delta_net.ROLES:
        assert spec.delta is not None
        fused = delta_net.fused_rows(spec.delta, entry.role)
    else:
        fused = (2 if entry.role in ("gate", "up") else 1) * entry.shape[0]
    return (_share(entry, fused, tensor_parallel), *entry.shape[1:])


def _share(entry: TensorEntry, size: int, parts: int) -> int:
    if size % parts:
        raise ModelError(
            f"{entry.name}: {size} rows or columns of {entry.parameter} cannot be divided over {parts} tensor-parallel"
            " ranks"
        )
    return size // parts


def _fused_qkv_size(spec: ModelSpec) -> int:
    return ((1 + spec.output_gate) * spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim


def _fused_qkv_rows(spec: ModelSpec, role: Role) -> Iterator[TensorBlock]:
    """Rows of q, k or v in the unsharded fused parameter, one block per key-value group. With gates, a group has its
    queries, its gates, key and value, and the tensor q a query and a gate for each head in turn.
    """
    query = spec.num_heads // spec.num_kv_heads * spec.head_dim
    if spec.output_gate:
        size, group_size = spec.head_dim, 2 * (query + spec.head_dim)
        for group in range(spec.num_kv_heads):
            start = group * group_size
            if role == "q":
                for place in range(0, query, size):
                    yield TensorBlock(0, 2 * (group * query + place), start + place, size)
                    yield TensorBlock(0, 2 * (group * query + place) + size, start + query + place, size)
            else:
                yield TensorBlock(0, group * size, start + 2 * query + (size if role == "v" else 0), size)
        return
    length, offset = {"q": (query, 0), "k": (spec.head_dim, query), "v": (spec.head_dim, query + spec.head_dim)}[role]
    for group in range(spec.num_kv_heads):
        yield TensorBlock(0, group * length, group * (query + 2 * spec.head_dim) + offset, length)


def _cut(blocks: Iterator[TensorBlock], start: int, length: int) -> Iterator[TensorBlock]:
    """The parts of the blocks within rows [start, start + length) of the parameter, counted from `start`.

    With more ranks than key-value groups a rank's share ends inside a group, so blocks are cut anywhere.
    """
    for block in blocks:
        first = max(block.local_start, start)
        last = min(block.local_start + block.length, start + length)
        if first < last:
            yield TensorBlock(block.dim, block.start + first - block.local_start, first - start, last - first)


# --- Tensors as files have them ------------------------------------------------------------------------------

# A tensor as files have it, and the tensors that it consists of: only itself if nothing is stacked.
Stacking = tuple[TensorEntry, tuple[TensorEntry, ...]]


def stackings(entries: Iterable[TensorEntry]) -> Iterator[Stacking]:
    """Yields every tensor as files have it, in the order of `entries`, in which the tensors of a stack are adjacent."""
    for name, group in itertools.groupby(
        entries, key=lambda entry: entry.name if entry.stack is None else entry.stack.name
    ):
        parts = tuple(group)
        yield (parts[0] if parts[0].stack is None else _whole(name, parts)), parts


def as_stored(entries: Iterable[TensorEntry]) -> list[TensorEntry]:
    """The tensors as files have them, with the names and shapes of a checkpoint and of weights sent to servers."""
    return [whole for whole, _ in stackings(entries)]


def checkpoint_tensors(spec: ModelSpec) -> list[TensorEntry]:
    """`hf_tensors` as files have them."""
    return as_stored(hf_tensors(spec))


def is_stacked(spec: ModelSpec) -> bool:
    """Whether a checkpoint of the model stacks the tensors of its experts."""
    return any(entry.stack is not None for entry in hf_tensors(spec))


def _whole(name: str, parts: tuple[TensorEntry, ...]) -> TensorEntry:
    first, stack = parts[0], parts[0].stack
    assert stack is not None
    experts = 1 + max(part.expert or 0 for part in parts)
    rows, *columns = first.shape
    rows *= stack.step
    return replace(
        first,
        name=name,
        shape=(experts, *columns, rows) if stack.transposed else (experts, rows, *columns),
        role="whole",
        sharding="replicated",
        expert=None,
        stack=None,
    )


# --- Parameters and FLOPs ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of parameters. `total`: all that are stored. `embedding`: the input embedding, part of the total.
    `active`: those used for one token, which is the total without the experts that a token does not go to (the
    embedding counts, although only one row is read).
    """

    total: int
    active: int
    embedding: int


def count_parameters(spec: ModelSpec) -> ParameterCounts:
    """The numbers of parameters without padding and replication. Tied embeddings count once."""
    total = experts = embedding = 0
    for tensor in hf_tensors(spec):
        total += tensor.num_elements
        if tensor.expert is not None:
            experts += tensor.num_elements
        if tensor.stage == "first":
            embedding += tensor.num_elements
    idle = 0
    if spec.moe is not None:
        idle = experts // spec.moe.num_experts * (spec.moe.num_experts - spec.moe.experts_per_token)
    return ParameterCounts(total=total, active=total - idle, embedding=embedding)


def forward_flops_per_token(spec: ModelSpec, sequence_tokens: int) -> float:
    """FLOPs of one forward pass per token, averaged over a causal sequence of `sequence_tokens`; backward is twice
    that.

    Counts matrix products: two FLOPs per weight that multiplies the token (LM head included, embedding look-up not),
    and in attention 2 x heads x (a key's + a value's size) per position attended to, (sequence_tokens + 1) / 2 on
    average, less in layers with a sliding window, and `delta_rule_flops` in place of that in gated delta nets.
    """
    attention = _position_flops(spec) * spec.num_layers * attended_positions(spec, sequence_tokens)
    return _matrix_flops(spec) + attention + delta_rule_flops(spec)


def layer_flops(spec: ModelSpec, num_tokens: int, num_pairs: int) -> float:
    """FLOPs of one forward pass of all layers without the LM head, over `num_tokens` tokens of which `num_pairs` pairs
    attend in a layer with full attention. Layers with a window count as such.
    """
    head = 2.0 * count_parameters(spec).embedding
    attention = _position_flops(spec) * spec.num_attention_layers * num_pairs
    return (_matrix_flops(spec) - head + delta_rule_flops(spec)) * num_tokens + attention


def attended_positions(spec: ModelSpec, sequence_tokens: float) -> float:
    """The number of positions that a token attends to, averaged over a causal sequence and over layers."""
    full = (sequence_tokens + 1) / 2
    if spec.window is None:
        return full * spec.num_attention_layers / spec.num_layers
    before = min(spec.window.tokens, sequence_tokens)  # while the window is not full yet
    windowed = (before * (before + 1) / 2 + (sequence_tokens - before) * before) / sequence_tokens
    share = sum(spec.window.layers) / spec.num_layers
    return share * windowed + (1 - share) * full


def attention_crossover_tokens(spec: ModelSpec) -> int:
    """The sequence length in tokens at which attention to the whole sequence costs as many FLOPs as everything else.
    Layers with a window count as the latter, because they cost the same per token at any length.
    """
    windowed = 0 if spec.window is None else sum(spec.window.layers)
    fixed = _matrix_flops(spec) + delta_rule_flops(spec)
    if spec.window is not None:
        fixed += _position_flops(spec) * windowed * spec.window.tokens
    quadratic = _position_flops(spec) * (spec.num_attention_layers - windowed) / 2
    return max(1, round(fixed / quadratic) - 1) if quadratic else spec.max_position_embeddings


def delta_rule_flops(spec: ModelSpec) -> float:
    """FLOPs of the rule of all gated delta nets per token, in a forward pass by chunks of `DELTA_CHUNK` tokens.

    For each value head the state is read twice and written once. Within a chunk, for each of its positions up to the
    token's: two products of keys, one of the written values, and the solution of a triangular system for as many
    columns as a key and a value have.
    """
    if spec.delta is None:
        return 0.0
    key, value = spec.delta.key_dim, spec.delta.value_dim
    a_head = 6 * key * value + (3 * key + 2 * value) * (DELTA_CHUNK + 1)
    return float(sum(spec.delta.layers) * spec.delta.value_heads * a_head)


def _matrix_flops(spec: ModelSpec) -> float:
    counts = count_parameters(spec)
    # Norms and biases are no matrix products.
    vectors = sum(tensor.num_elements for tensor in hf_tensors(spec) if len(tensor.shape) == 1)
    head = counts.embedding if spec.tie_word_embeddings else 0
    return 2.0 * (counts.active - counts.embedding - vectors + head)


def _position_flops(spec: ModelSpec) -> float:
    """FLOPs of one layer per token and position that it attends to."""
    return 2.0 * spec.num_heads * (spec.head_dim + spec.value_head_dim)

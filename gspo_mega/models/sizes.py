"""Parameter counts of a model and FLOPs per token, from the family tables."""

from __future__ import annotations

from dataclasses import dataclass

from gspo_mega.models.families import hf_tensors
from gspo_mega.models.spec import ModelSpec


@dataclass(frozen=True)
class ParameterCounts:
    """`total`: stored. `embedding`: the input embedding, part of the total. `active`: used for one token, that is the
    total without the experts that a token does not go to (the embedding counts, although only one row is read)."""

    total: int
    active: int
    embedding: int


def count_parameters(spec: ModelSpec) -> ParameterCounts:
    """Parameters without any padding or replication. Tied embeddings count once."""
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
    average, and less in layers with a sliding window.
    """
    return _matrix_flops(spec) + _position_flops(spec) * spec.num_layers * attended_positions(spec, sequence_tokens)


def attended_positions(spec: ModelSpec, sequence_tokens: int) -> float:
    """Positions that a token attends to, averaged over a causal sequence of `sequence_tokens` and over layers."""
    full = (sequence_tokens + 1) / 2
    if spec.window is None:
        return full
    before = min(spec.window.tokens, sequence_tokens)  # while the window is not full yet
    windowed = (before * (before + 1) / 2 + (sequence_tokens - before) * before) / sequence_tokens
    share = sum(spec.window.layers) / spec.num_layers
    return share * windowed + (1 - share) * full


def attention_crossover_tokens(spec: ModelSpec) -> int:
    """The sequence length, in tokens, at which attention to the whole sequence costs as many FLOPs as everything else.
    A layer with a window is a part of the latter: it costs as much per token at any length.
    """
    windowed = 0 if spec.window is None else sum(spec.window.layers)
    fixed = _matrix_flops(spec)
    if spec.window is not None:
        fixed += _position_flops(spec) * windowed * spec.window.tokens
    quadratic = _position_flops(spec) * (spec.num_layers - windowed) / 2
    return max(1, round(fixed / quadratic) - 1) if quadratic else spec.max_position_embeddings


def _matrix_flops(spec: ModelSpec) -> float:
    counts = count_parameters(spec)
    # Norms and biases multiply no token.
    vectors = sum(tensor.num_elements for tensor in hf_tensors(spec) if len(tensor.shape) == 1)
    head = counts.embedding if spec.tie_word_embeddings else 0
    return 2.0 * (counts.active - counts.embedding - vectors + head)


def _position_flops(spec: ModelSpec) -> float:
    """Of a layer, for a token and a position that it attends to."""
    return 2.0 * spec.num_heads * (spec.head_dim + spec.value_head_dim)

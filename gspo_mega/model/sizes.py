"""Parameter counts of a model and FLOPs per token, from the family tables."""

from __future__ import annotations

from dataclasses import dataclass

from gspo_mega.model.families import hf_tensors
from gspo_mega.model.spec import ModelSpec


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
    average.
    """
    return _matrix_flops(spec) + _attention_flops(spec, sequence_tokens)


def attention_crossover_tokens(spec: ModelSpec) -> int:
    """The sequence length, in tokens, at which attention costs as many FLOPs as all other matrix products."""
    return max(1, round(2 * _matrix_flops(spec) / _attention_flops(spec, 1)) - 1)


def _matrix_flops(spec: ModelSpec) -> float:
    counts = count_parameters(spec)
    # Norms and biases multiply no token.
    vectors = sum(tensor.num_elements for tensor in hf_tensors(spec) if len(tensor.shape) == 1)
    head = counts.embedding if spec.tie_word_embeddings else 0
    return 2.0 * (counts.active - counts.embedding - vectors + head)


def _attention_flops(spec: ModelSpec, sequence_tokens: int) -> float:
    return 2.0 * spec.num_layers * spec.num_heads * (spec.head_dim + spec.value_head_dim) * (sequence_tokens + 1) / 2

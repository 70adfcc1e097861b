"""How the terms of tokens and sequences are averaged: the denominator of a mini-batch and the coefficient of each
sequence, in one table.

Both halves of an aggregation stand in one entry, because only together they are an average: J is the sum over
sequences of c_i (1/L_i) sum_t term_it, and c_i divides by the denominator. Owns no term and no process group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from gspo_mega.algorithm.objective_settings import ObjectiveSettings
from gspo_mega.config.recipes import Aggregation


class _Parts(NamedTuple):
    """What a coefficient is made of. `scale` [S] float64: 1 / denominator, 0 for a sequence without active token.
    `tokens` [S] float64: active tokens of each sequence. `group_sizes` [S]: sequences with an active token of each
    one's prompt, where the caller knows them.
    """

    scale: Tensor
    tokens: Tensor
    group_sizes: Tensor | None
    settings: ObjectiveSettings


class AggregationRule(NamedTuple):
    """`count`: what the denominator counts, from the active tokens and the group id of each sequence that has an active
    token. `coefficients`: c_i, [S] float64.
    """

    count: Callable[[Sequence[int], Sequence[int]], int]
    coefficients: Callable[[_Parts], Tensor]


def _count_sequences(lengths: Sequence[int], group_ids: Sequence[int]) -> int:
    return len(lengths)


def _count_tokens(lengths: Sequence[int], group_ids: Sequence[int]) -> int:
    return sum(lengths)


def _count_prompts(lengths: Sequence[int], group_ids: Sequence[int]) -> int:
    return len(set(group_ids))


def _token_sum_norm(parts: _Parts) -> Tensor:
    constant = parts.settings.norm_constant_tokens
    assert constant is not None  # ObjectiveSettings requires it for this aggregation
    return parts.scale * parts.tokens / constant


def _group_mean(parts: _Parts) -> Tensor:
    if parts.group_sizes is None:
        raise ValueError("aggregation group_mean_token_mean needs group_sizes: [S]")
    return parts.scale / parts.group_sizes.double().clamp(min=1.0)


RULES: dict[Aggregation, AggregationRule] = {
    "sequence_mean_token_mean": AggregationRule(_count_sequences, lambda parts: parts.scale),
    "token_mean": AggregationRule(_count_tokens, lambda parts: parts.scale * parts.tokens),
    "sequence_mean_token_sum": AggregationRule(_count_sequences, lambda parts: parts.scale * parts.tokens),
    "sequence_mean_token_sum_norm": AggregationRule(_count_sequences, _token_sum_norm),
    "group_mean_token_mean": AggregationRule(_count_prompts, _group_mean),
}


def mini_batch_denominator(aggregation: Aggregation, lengths: Sequence[int], group_ids: Sequence[int]) -> float:
    """What the aggregation averages over, counted over a whole mini-batch on all ranks; at least 1.

    `lengths` (active tokens) and `group_ids` are those of the sequences with an active token. A sequence that the
    mismatch correction rejects is among them.
    """
    return float(max(RULES[aggregation].count(lengths, group_ids), 1))


def sequence_coefficients(
    settings: ObjectiveSettings, lengths: Tensor, denominator: float, group_sizes: Tensor | None = None
) -> Tensor:
    """c_i such that J = sum_i c_i (1/L_i) sum_t term_it: [S] float64, 0 for a sequence without active token.

    `lengths: [S]` global active tokens. `denominator`: of `mini_batch_denominator`. `group_sizes: [S]`: for
    `group_mean_token_mean`, the number of sequences with an active token of each one's prompt.

    Raises ValueError for a denominator that cannot be a count of what is there, and for missing `group_sizes`.
    """
    tokens = lengths.double()
    present = (tokens > 0).double()
    if denominator < 0 or (denominator == 0 and bool(present.any())):
        raise ValueError(
            f"denominator {denominator}: must be the positive global count of what the aggregation averages over"
        )
    scale = present / (denominator or 1.0)  # a mini-batch without any active token has denominator 0 and objective 0
    return RULES[settings.aggregation].coefficients(_Parts(scale, tokens, group_sizes, settings))

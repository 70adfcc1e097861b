"""The policy objective of one packed micro-batch: GSPO, GSPO-token and GRPO (arXiv:2507.18071, Eq. 2, 5, 13) and the
objectives they are compared with.

Owns the ratio of each unit and this rank's share of the global objective; a unit's term is `surrogates.py`'s, the
average over terms `objective.py`'s. Does not own process groups (the caller hands in the sum over context-parallel
ranks), the advantages, or the optimizer.

The parallel contract. A micro-batch belongs to one data-parallel rank; under context parallelism each rank
holds some of the tokens of every sequence. Divide by nothing afterwards: `denominator` is global, so
- the gradients of `objective_sum`, summed over all data- and context-parallel ranks, are the gradient of J;
- `value` and `sequence_terms`, summed over the same ranks, are J and its terms.
With the sequence ratio every context-parallel rank computes the whole s_i (that is what `reduce_sequences`
is for) and differentiates it through its own tokens only: d s_i / d log pi_t needs nothing of the others,
so the all-reduce's backward is the identity. Hence `objective_sum` holds the whole term on each of them;
for its *value* use `value`, which counts only the share of the sequence's tokens held here.

How the terms of tokens and sequences are averaged: the denominator of a mini-batch and the coefficient of each
sequence, in one table.

Both halves of an aggregation stand in one entry, because only together they are an average: J is the sum over
sequences of c_i (1/L_i) sum_t term_it, and c_i divides by the denominator. Owns no term and no process group.

A sequence is one row of the batch. An episode has one, or several where it branched (or where each turn is a row); the
denominators count episodes. Row b of episode e has L_b of the episode's N_e active tokens, each of which is active in
one row, and weighs w_b = L_b / N_e where an average is by sequence:

    J = (1/E) sum_e sum_b w_b (1/L_b) sum_t term_bt = (1/E) sum_e (1/N_e) sum_b sum_t term_bt.

So an episode counts as much as any other, and one that branched as it would in one row with the same terms. Where
tokens are summed they need no weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gspo_mega.algorithm.surrogates import (
    Terms,
    TokenTerms,
    clipped_log_ratios,
    clipped_terms,
    geometric_terms,
    token_terms,
)
from gspo_mega.algorithm.terms import (
    ObjectiveSettings,
    active_values,
    not_finite,
    require_finite,
    segment_sum,
    token_log_ratios,
)
from gspo_mega.config.algorithms import Aggregation


class _Parts(NamedTuple):
    """What a coefficient is made of. `scale` [S] float64: 1 / denominator, 0 for a sequence without active token.
    `tokens` [S] float64: active tokens of each sequence. `group_sizes` [S]: episodes with an active token of each one's
    prompt, where the caller knows them. `branch_weights` [S] float64: w_b, None where each sequence is an episode.
    """

    scale: Tensor
    tokens: Tensor
    group_sizes: Tensor | None
    branch_weights: Tensor | None
    settings: ObjectiveSettings

    @property
    def weighted_scale(self) -> Tensor:
        """1 / denominator, or this sequence's share of it."""
        return self.scale if self.branch_weights is None else self.scale * self.branch_weights


class AggregationRule(NamedTuple):
    """`count`: what the denominator counts, from the active tokens and the group id of each episode that has an active
    token. `coefficients`: c_i, [S] float64.
    """

    count: Callable[[Sequence[int], Sequence[int]], int]
    coefficients: Callable[[_Parts], Tensor]


def _count_episodes(lengths: Sequence[int], group_ids: Sequence[int]) -> int:
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
    return parts.weighted_scale / parts.group_sizes.double().clamp(min=1.0)


RULES: dict[Aggregation, AggregationRule] = {
    "sequence_mean_token_mean": AggregationRule(_count_episodes, lambda parts: parts.weighted_scale),
    "token_mean": AggregationRule(_count_tokens, lambda parts: parts.scale * parts.tokens),
    "sequence_mean_token_sum": AggregationRule(_count_episodes, lambda parts: parts.scale * parts.tokens),
    "sequence_mean_token_sum_norm": AggregationRule(_count_episodes, _token_sum_norm),
    "group_mean_token_mean": AggregationRule(_count_prompts, _group_mean),
}


def mini_batch_denominator(aggregation: Aggregation, lengths: Sequence[int], group_ids: Sequence[int]) -> float:
    """What the aggregation averages over, counted over a whole mini-batch on all ranks; at least 1.

    `lengths` (active tokens, of all branches together) and `group_ids` are those of the episodes with an active token.
    What the mismatch correction rejects is among them.
    """
    return float(max(RULES[aggregation].count(lengths, group_ids), 1))


def sequence_coefficients(
    settings: ObjectiveSettings,
    lengths: Tensor,
    denominator: float,
    group_sizes: Tensor | None = None,
    branch_weights: Tensor | None = None,
) -> Tensor:
    """c_i such that J = sum_i c_i (1/L_i) sum_t term_it: [S] float64, 0 for a sequence without active token.

    `lengths: [S]` global active tokens. `denominator`: of `mini_batch_denominator`. `group_sizes: [S]`: for
    `group_mean_token_mean`, the number of episodes with an active token of each one's prompt. `branch_weights: [S]`:
    w_b, the share of its episode's active tokens that each sequence has; None where each sequence is an episode.

    Raises ValueError for a denominator that cannot be a count of what is there, for missing `group_sizes` and for
    `branch_weights` of another shape.
    """
    if branch_weights is not None and branch_weights.shape != lengths.shape:
        raise ValueError(f"branch_weights must be {tuple(lengths.shape)}; got {tuple(branch_weights.shape)}")
    tokens = lengths.double()
    present = (tokens > 0).double()
    if denominator < 0 or (denominator == 0 and bool(present.any())):
        raise ValueError(
            f"denominator {denominator}: must be the positive global count of what the aggregation averages over"
        )
    scale = present / (denominator or 1.0)  # a mini-batch without any active token has denominator 0 and objective 0
    return RULES[settings.aggregation].coefficients(
        _Parts(
            scale, tokens, group_sizes, None if branch_weights is None else branch_weights.detach().double(), settings
        )
    )


@dataclass(frozen=True)
class ObjectiveOutput:
    """One micro-batch on one rank. S sequences, T local tokens; float64 throughout; J is maximised.

    `objective_sum`: scalar with gradient, see the module's contract. `value`: scalar, and `sequence_terms`: [S],
    this rank's part of J without gradient. `sequence_log_ratio` (log s_i, nats) and `importance_ratio` (s_i):
    [S], whole sequences, the same on every context-parallel rank; 0 and 1 for a sequence without active token.
    `clipped_high`, `clipped_low`, `dual_clipped`: bool, [S] for the sequence ratio, [T] for the token forms
    (`flags_are_per_token`).
    `token_log_ratio`: [T] nats, 0 at masked tokens.
    """

    objective_sum: Tensor
    value: Tensor
    sequence_terms: Tensor
    sequence_log_ratio: Tensor
    importance_ratio: Tensor
    clipped_high: Tensor
    clipped_low: Tensor
    dual_clipped: Tensor
    flags_are_per_token: bool
    token_log_ratio: Tensor

    @property
    def loss(self) -> Tensor:
        """-objective_sum, what backward() is called on."""
        return -self.objective_sum


def policy_objective(
    settings: ObjectiveSettings,
    *,
    log_probs: Tensor,
    old_log_probs: Tensor,
    mask: Tensor,
    segment_ids: Tensor,
    num_sequences: int,
    advantages: Tensor,
    lengths: Tensor,
    denominator: float,
    keep: Tensor | None = None,
    token_advantages: Tensor | None = None,
    sequence_weights: Tensor | None = None,
    group_sizes: Tensor | None = None,
    branch_weights: Tensor | None = None,
    rollout_log_probs: Tensor | None = None,
    reduce_sequences: Callable[[Tensor], Tensor] = lambda partial_sums: partial_sums,
) -> ObjectiveOutput:
    """This rank's share of the global mean objective J of a mini-batch, from one packed micro-batch.

    Local tokens, T of them: `log_probs` (nats, with gradient), `old_log_probs`, `mask` (non-zero: active),
    `segment_ids` int64 in [0, S). Masked entries may hold anything. `token_advantages: [T]` replace the
    sequence's advantage in the token forms only. `rollout_log_probs: [T]`, the server's: for `minirl` alone.

    Per sequence, S of them, global values: `advantages`; `lengths`, active tokens on all context-parallel ranks
    together; `keep` (0: rejected, contributes 0 and stays in the denominator); `sequence_weights`, detached
    correction factors of each term; `group_sizes`, `branch_weights` and `denominator` as in `sequence_coefficients`.

    `reduce_sequences` is called exactly once, on the [S] float64 partial sums of the log-ratio ([S, 2] for `gmpo`: and
    of the clipped one), and must return their sum over the context-parallel ranks with an identity backward.

    Raises NumericsError for a non-finite active log-prob (before `reduce_sequences`, or at the end of
    `finite.deferred`), ValueError for a denominator or setting that has no meaning.
    """
    require_finite(mask, segment_ids, not_finite, log_probs=log_probs, old_log_probs=old_log_probs)

    active = mask.bool()
    tokens = lengths.double()
    counts = tokens > 0
    if keep is not None:
        counts = counts & keep.bool()
    token_log_ratio = token_log_ratios(log_probs, old_log_probs, mask)
    sequence_advantages = advantages.detach().double()
    partial_sums = segment_sum(token_log_ratio, segment_ids, num_sequences)
    geometric: tuple[Tensor, Tensor, Tensor] | None = None
    if settings.surrogate == "gmpo":
        clipped, high, low = clipped_log_ratios(
            settings, token_log_ratio, sequence_advantages[segment_ids], active & counts[segment_ids]
        )
        both = torch.stack([partial_sums, segment_sum(clipped, segment_ids, num_sequences)], dim=1)
        sums, clipped_sums = reduce_sequences(both).unbind(dim=1)
        geometric = clipped_sums / tokens.clamp(min=1.0), high, low
    else:
        sums = reduce_sequences(partial_sums)
    sequence_log_ratio = sums / tokens.clamp(min=1.0)

    weights = sequence_coefficients(settings, lengths, denominator, group_sizes, branch_weights)
    if sequence_weights is not None:
        weights = weights * sequence_weights.detach().double()
    weights = torch.where(counts, weights, 0.0)

    terms: Terms
    if settings.unit == "sequence":
        if geometric is not None:
            log_mean, high, low = geometric
            terms = geometric_terms(log_mean, sequence_advantages, counts, high, low)
        else:
            terms = clipped_terms(
                settings, sequence_log_ratio, sequence_log_ratio.detach(), sequence_advantages, counts
            )
        constant_parts = weights * terms.advantages * terms.offset
        ratio_parts = weights * terms.advantages * terms.excess
        share = segment_sum(active.double(), segment_ids, num_sequences) / tokens.clamp(min=1.0)
    else:
        own = active_values(log_probs, mask)
        decision = token_log_ratio.detach()
        log_ratio = token_log_ratio
        if settings.ratio == "sequence_token":
            # Eq. 14: the value is s_i, the gradient that of the token's own log-prob.
            decision = sequence_log_ratio.detach()[segment_ids]
            log_ratio = decision + (own - own.detach())
        unit_advantages = sequence_advantages[segment_ids]
        if token_advantages is not None:
            unit_advantages = active_values(token_advantages.detach(), mask)
        terms = token_terms(
            settings,
            TokenTerms(
                log_probs=own,
                log_ratio=log_ratio,
                decision=decision,
                old_log_probs=active_values(old_log_probs.detach(), mask),
                rollout_log_probs=None if rollout_log_probs is None else active_values(rollout_log_probs, mask),
                sequence_sums=sums.detach()[segment_ids],
                advantages=unit_advantages,
                counts=active & counts[segment_ids],
            ),
        )
        token_weights = weights / tokens.clamp(min=1.0)
        constant_parts = token_weights * segment_sum(terms.advantages * terms.offset, segment_ids, num_sequences)
        ratio_parts = token_weights * segment_sum(terms.advantages * terms.excess, segment_ids, num_sequences)
        share = torch.ones_like(tokens)

    log_s = sequence_log_ratio.detach()
    return ObjectiveOutput(
        objective_sum=constant_parts.sum() + ratio_parts.sum(),
        value=(share * constant_parts).sum() + (share * ratio_parts.detach()).sum(),
        sequence_terms=share * (constant_parts + ratio_parts.detach()),
        sequence_log_ratio=log_s,
        importance_ratio=log_s.exp(),
        clipped_high=terms.high,
        clipped_low=terms.low,
        dual_clipped=terms.dual,
        flags_are_per_token=settings.flags_are_per_token,
        token_log_ratio=token_log_ratio.detach(),
    )

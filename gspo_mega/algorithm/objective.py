"""The policy objective: GSPO (arXiv:2507.18071) from top to bottom, with GSPO-token and GRPO.

Sequence i has L_i active tokens and the advantage A_i (Eq. 6, `advantages.py`). For N sequences:

    d_it    = log pi(y_it) - log pi_old(y_it)                               the log-ratio of each token
    log s_i = (1/L_i) sum_t d_it                                            Eq. 7: its mean over the sequence
    term_i  = min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i)      Eq. 5: the clip
    J       = (1/N) sum_i term_i                                            Eq. 5: the mean over sequences

GSPO-token (Eq. 13) and GRPO (Eq. 2) have one such term per token: for GSPO-token with the ratio of Eq. 14, whose value
is s_i and whose gradient is that of the token's own log-prob; for GRPO with exp(d_it). `policy_objective` goes through
the four steps, and the functions of each step follow it in the same order. The terms that other objectives put in place
of the clip are in `surrogates.py`. J is maximised: the loss is -J.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from gspo_mega.algorithm.hooks import ObjectiveInputs, non_finite_term, user_terms
from gspo_mega.algorithm.surrogates import TokenInputs, clipped_log_ratios, geometric_terms, surrogate_terms
from gspo_mega.algorithm.terms import (
    ObjectiveSettings,
    Terms,
    log_lower_edge,
    non_finite_log_prob,
    ratio_parts,
    require_finite,
)
from gspo_mega.base.user_functions import LoadedHook
from gspo_mega.config.algorithms import Aggregation


@dataclass(frozen=True)
class ObjectiveOutput:
    """The objective of one micro-batch on one rank: S sequences, T local tokens, float64 throughout.

    A micro-batch belongs to one data-parallel rank. Under context parallelism each rank of the group holds some tokens
    of every sequence. The denominator is global, so nothing is divided afterwards:
    - the gradients of `objective_sum`, summed over all data- and context-parallel ranks, are the gradient of J;
    - `value` and `sequence_terms`, summed over the same ranks, are J and its terms.
    With the sequence ratio every context-parallel rank computes the whole s_i and differentiates it through its own
    tokens only: d s_i / d log pi_t needs nothing of the other ranks. So `objective_sum` holds the whole term on each
    rank, while `value` counts only the share of the sequence's tokens that the rank holds.

    `objective_sum`: scalar with gradient. `value`: scalar, and `sequence_terms`: [S], without gradient.
    `sequence_log_ratio` (log s_i, nats) and `importance_ratio` (s_i): [S], of whole sequences, the same on every
    context-parallel rank; 0 and 1 for a sequence without active tokens. `clipped_high`, `clipped_low`, `dual_clipped`:
    bool, [T] if `flags_are_per_token`, else [S]. `token_log_ratio`: [T] nats, 0 at masked tokens.
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
        """-objective_sum, the scalar that backward() is called on."""
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
    token_weights: Tensor | None = None,
    reduce_sequences: Callable[[Tensor], Tensor] = lambda partial_sums: partial_sums,
) -> ObjectiveOutput:
    """This rank's share of the global mean objective J of a mini-batch, from one packed micro-batch.

    Local tokens, T of them: `log_probs` (nats, with gradient), `old_log_probs`, `mask` (non-zero: active),
    `segment_ids` int64 in [0, S). Masked entries may hold anything. `token_advantages: [T]` replace the advantage of
    the sequence in the token forms only. `rollout_log_probs: [T]`: by the server; only `minirl` needs them.
    `token_weights: [T]`, detached: correction factors of the terms of tokens.

    Per sequence, S of them, global values: `advantages`; `lengths`, active tokens on all context-parallel ranks
    together; `keep` (0: rejected, contributes 0 and stays in the denominator); `sequence_weights`, detached
    correction factors of each term; `group_sizes`, `branch_weights` and `denominator` as in `sequence_coefficients`.

    `reduce_sequences` is called once, on the [S] float64 partial sums of the log-ratio ([S, 2] for `gmpo`, which adds
    those of the clipped log-ratio), and again with [S, 1] for each mean that a function of the user asks for. It must
    return their sum over the context-parallel ranks with an identity backward.

    Raises NumericsError for a non-finite active log-prob (before `reduce_sequences`, or at the end of
    `deferred_checks`), and ValueError for a denominator or setting that has no meaning.
    """
    require_finite(mask, segment_ids, non_finite_log_prob, log_probs=log_probs, old_log_probs=old_log_probs)
    active = mask.bool()
    tokens = lengths.double()
    counts = tokens > 0
    if keep is not None:
        counts = counts & keep.bool()
    sequence_advantages = advantages.detach().double()

    # 1. The log-ratio of each token, and its sum over the tokens of each sequence that this rank holds.
    token_log_ratio = token_log_ratios(log_probs, old_log_probs, mask)
    partial_sums = segment_sum(token_log_ratio, segment_ids, num_sequences)

    # 2. Eq. 7: log s_i, the mean over all tokens of the sequence. No clamp here: a clamped log-ratio has a zero
    # gradient exactly where the policy moved furthest. GMPO also needs the mean of its clipped log-ratios.
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

    # 3. Eq. 5, 13 and 2: the clipped term of each sequence or token, or the term of another objective.
    if settings.function is not None:
        # A term of a token may not have a gradient in another token, which another context-parallel rank may hold.
        of_sequences = settings.unit == "sequence"

        def sequence_mean(values: Tensor) -> Tensor:
            sums = segment_sum(
                active_values(values if of_sequences else values.detach(), mask), segment_ids, num_sequences
            )
            return reduce_sequences(sums[:, None])[:, 0] / tokens.clamp(min=1.0)

        own_advantages = sequence_advantages[segment_ids]
        if token_advantages is not None:
            own_advantages = active_values(token_advantages.detach(), mask)
        inputs = ObjectiveInputs(
            log_probs=active_values(log_probs, mask),
            old_log_probs=active_values(old_log_probs.detach(), mask),
            log_ratio=token_log_ratio,
            advantages=own_advantages,
            counts=active & counts[segment_ids],
            segment_ids=segment_ids,
            lengths=tokens,
            sequence_log_ratio=sequence_log_ratio if of_sequences else sequence_log_ratio.detach(),
            sequence_advantages=sequence_advantages,
            sequence_counts=counts,
            sequence_mean=sequence_mean,
        )
        terms = _terms_of_user(settings.function, inputs, of_sequences)
    elif geometric is not None:
        log_mean, high, low = geometric
        terms = geometric_terms(log_mean, sequence_advantages, counts, high, low)
    elif settings.unit == "sequence":
        terms = clipped_terms(settings, sequence_log_ratio, sequence_log_ratio.detach(), sequence_advantages, counts)
    else:
        own = active_values(log_probs, mask)
        log_ratio, decision = token_log_ratio, token_log_ratio.detach()
        if settings.ratio == "sequence_token":
            # Eq. 14: the value is s_i, the gradient that of the token's own log-prob.
            decision = sequence_log_ratio.detach()[segment_ids]
            log_ratio = decision + (own - own.detach())
        unit_advantages = sequence_advantages[segment_ids]
        if token_advantages is not None:
            unit_advantages = active_values(token_advantages.detach(), mask)
        token_counts = active & counts[segment_ids]
        if settings.surrogate == "clip":
            terms = clipped_terms(settings, log_ratio, decision, unit_advantages, token_counts)
        else:
            inputs = TokenInputs(
                log_probs=own,
                log_ratio=log_ratio,
                decision=decision,
                old_log_probs=active_values(old_log_probs.detach(), mask),
                rollout_log_probs=None if rollout_log_probs is None else active_values(rollout_log_probs, mask),
                sequence_sums=sums.detach()[segment_ids],
                advantages=unit_advantages,
                counts=token_counts,
            )
            terms = surrogate_terms(settings, inputs)

    if token_weights is not None:
        if settings.unit != "token":
            raise ValueError("weights of tokens need terms of tokens; this objective has one of each sequence")
        terms = replace(terms, advantages=terms.advantages * active_values(token_weights.detach(), mask))

    # 4. Eq. 5: the mean over sequences. A term is A (offset + excess), and the two parts are added up separately.
    weights = sequence_coefficients(settings, lengths, denominator, group_sizes, branch_weights)
    if sequence_weights is not None:
        weights = weights * sequence_weights.detach().double()
    weights = torch.where(counts, weights, 0.0)
    if settings.unit == "sequence":
        offset_parts = weights * terms.advantages * terms.offset
        excess_parts = weights * terms.advantages * terms.excess
        share = segment_sum(active.double(), segment_ids, num_sequences) / tokens.clamp(min=1.0)
    else:
        token_weights = weights / tokens.clamp(min=1.0)
        offset_parts = token_weights * segment_sum(terms.advantages * terms.offset, segment_ids, num_sequences)
        excess_parts = token_weights * segment_sum(terms.advantages * terms.excess, segment_ids, num_sequences)
        share = torch.ones_like(tokens)

    log_s = sequence_log_ratio.detach()
    return ObjectiveOutput(
        objective_sum=offset_parts.sum() + excess_parts.sum(),
        value=(share * offset_parts).sum() + (share * excess_parts.detach()).sum(),
        sequence_terms=share * (offset_parts + excess_parts.detach()),
        sequence_log_ratio=log_s,
        importance_ratio=log_s.exp(),
        clipped_high=terms.high,
        clipped_low=terms.low,
        dual_clipped=terms.dual,
        flags_are_per_token=settings.flags_are_per_token,
        token_log_ratio=token_log_ratio.detach(),
    )


# --- 1. The log-ratio ------------------------------------------------------------------------------------------


def token_log_ratios(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """d_t = log_probs - old_log_probs, [T] float64 nats, 0 at masked tokens. `old_log_probs` gets no gradient.

    Both are widened before the subtraction, so that float32 inputs lose nothing in it.
    """
    return active_values(log_probs, mask) - active_values(old_log_probs.detach(), mask)


def active_values(values: Tensor, mask: Tensor) -> Tensor:
    """`values: [T]` as float64, with 0 where `mask` is 0. There the values may be anything, NaN too, and get no
    gradient.
    """
    return torch.where(mask.bool(), values, torch.zeros((), dtype=values.dtype, device=values.device)).double()


# --- 2. The mean over a sequence -------------------------------------------------------------------------------

_BLOCK = 16  # values that are added up first


def segment_sum(values: Tensor, segment_ids: Tensor, num_segments: int) -> Tensor:
    """Sum `values: [T]` by `segment_ids: [T] int64 in [0, num_segments)` into [num_segments], same dtype.

    The tokens are those of this rank. The order of addition is fixed by the order of the tokens, on every device and in
    every run: a stable sort and contiguous segments instead of atomic adds. Blocks of 16 are added first, then blocks
    of their sums, so that the rounding error of a response of n tokens grows with log n. Segments without tokens are 0.
    Differentiable in `values`; no device synchronisation.
    """
    ordered_ids, order = torch.sort(segment_ids, stable=True)
    edges = torch.searchsorted(ordered_ids, torch.arange(num_segments + 1, device=segment_ids.device))
    values = values[order]
    while values.numel() > _BLOCK * max(num_segments, 1):
        block_edges = torch.arange(0, values.numel(), _BLOCK, device=edges.device)
        cuts = torch.sort(torch.cat([edges, block_edges])).values
        values = _sum_between(values, cuts)
        edges = torch.searchsorted(cuts, edges)
    return _sum_between(values, edges)


def _sum_between(values: Tensor, edges: Tensor) -> Tensor:
    return torch.segment_reduce(values, "sum", lengths=edges.diff(), initial=0, unsafe=True)


def sequence_log_ratio_sums(
    log_probs: Tensor, old_log_probs: Tensor, mask: Tensor, segment_ids: Tensor, num_sequences: int
) -> Tensor:
    """Steps 1 and 2 in one call: sum of log_probs - old_log_probs over the active tokens held here, [S] float64 nats.

    `log_probs` (with gradient), `old_log_probs`: [T] nats; `mask`: [T]; `segment_ids`: [T] int64, all local. The sum
    over context-parallel ranks, divided by the response's length, is log s_i of Eq. 7.
    """
    return segment_sum(token_log_ratios(log_probs, old_log_probs, mask), segment_ids, num_sequences)


# --- 3. The clip -----------------------------------------------------------------------------------------------


def clipped_terms(
    settings: ObjectiveSettings, log_ratio: Tensor, decision: Tensor, advantages: Tensor, counts: Tensor
) -> Terms:
    """min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) of each unit, rho = exp(log_ratio).

    All tensors are local and of one shape: [S] where the unit is a sequence, [T] where it is a token. `log_ratio`:
    float64 nats, with gradient; `decision`: the same numbers without (log s_i of each token for GSPO-token);
    `advantages`: float64; `counts`: bool. A unit that does not count, or has A = 0, has the term 0 with gradient 0 and
    no flag.

    The minimum keeps rho A unless rho left the range in the direction that A rewards: above it for A > 0, below it for
    A < 0. Then the term is constant. With `dual_clip` c a term of A < 0 is at least c A. This is decided on float64
    log-ratios and strictly outside the range, so rounding of exp cannot flip the decision. exp is evaluated only where
    the ratio itself is the value, so an overflowing clipped ratio gives neither inf nor NaN.
    """
    positive, negative = counts & (advantages > 0), counts & (advantages < 0)
    high = positive & (decision > math.log1p(settings.clip_high))
    low = negative & (decision < log_lower_edge(settings.clip_low))
    dual = torch.zeros_like(low)
    clipped_excess = settings.clip_high * high.double() - settings.clip_low * low.double()
    if settings.dual_clip is not None:
        dual = negative & (decision > math.log(settings.dual_clip))
        clipped_excess = torch.where(dual, settings.dual_clip - 1.0, clipped_excess)
    follows_ratio = (positive | negative) & ~(high | low | dual)
    # offset + excess is rho where the term follows the ratio, and 1 + clipped_excess where it was clipped.
    offset, excess = ratio_parts(log_ratio, decision, follows_ratio, clipped_excess)
    return Terms(torch.where(positive | negative, advantages, 0.0), offset, excess, high, low, dual)


def _terms_of_user(function: LoadedHook, inputs: ObjectiveInputs, of_sequences: bool) -> Terms:
    """The terms of a function of the user: [S] or [T]."""
    made = user_terms(function, inputs, of_sequences)
    counts = inputs.sequence_counts if of_sequences else inputs.counts
    owners = torch.arange(len(inputs.lengths), device=counts.device) if of_sequences else inputs.segment_ids
    require_finite(counts, owners, non_finite_term(function), term=made.values)
    assert made.high is not None and made.low is not None  # `user_terms` fills them in
    nothing = torch.zeros_like(made.values.detach())
    return Terms(counts.double(), nothing, made.values, made.high, made.low, torch.zeros_like(counts))


# --- 4. The mean over sequences --------------------------------------------------------------------------------


def mini_batch_denominator(aggregation: Aggregation, lengths: Sequence[int], group_ids: Sequence[int]) -> float:
    """The number of episodes, tokens or prompts that the aggregation averages over, in a whole mini-batch on all ranks;
    at least 1.

    `lengths` (active tokens, of all branches together) and `group_ids` are those of the episodes with an active token.
    Episodes that the mismatch correction rejects are among them.
    """
    return float(max(AGGREGATIONS[aggregation].count(lengths, group_ids), 1))


def sequence_coefficients(
    settings: ObjectiveSettings,
    lengths: Tensor,
    denominator: float,
    group_sizes: Tensor | None = None,
    branch_weights: Tensor | None = None,
) -> Tensor:
    """c_i such that J = sum_i c_i (1/L_i) sum_t term_it: [S] float64, 0 for a sequence without active tokens.

    For GSPO without branches c_i is 1/N. A sequence is one row of the batch; an episode has several rows where it
    branched, or where each turn is a row. Row b of episode e has L_b of the episode's N_e active tokens, each of which
    is active in one row only. An average by sequence weighs the row by w_b = L_b / N_e, so that for E episodes

        J = (1/E) sum_e sum_b w_b (1/L_b) sum_t term_bt = (1/E) sum_e (1/N_e) sum_b sum_t term_bt.

    So every episode counts the same, and one that branched counts as it would in one row with the same terms. Averages
    that sum tokens need no such weight.

    `lengths: [S]` global active tokens. `denominator`: from `mini_batch_denominator`. `group_sizes: [S]`: for
    `group_mean_token_mean`, the number of episodes with an active token of each one's prompt. `branch_weights: [S]`:
    w_b; None where each sequence is an episode.

    Raises ValueError for a denominator that cannot be a count of what is there, for missing `group_sizes`, and for
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
    return AGGREGATIONS[settings.aggregation].coefficients(
        _Parts(
            scale, tokens, group_sizes, None if branch_weights is None else branch_weights.detach().double(), settings
        )
    )


class AggregationRule(NamedTuple):
    """Both halves of an average, which only together are one.

    `count`: the denominator, from the active tokens and the group id of each episode that has an active token.
    `coefficients`: c_i, [S] float64, which divide by it.
    """

    count: Callable[[Sequence[int], Sequence[int]], int]
    coefficients: Callable[[_Parts], Tensor]


class _Parts(NamedTuple):
    """The inputs of the coefficients. `scale` [S] float64: 1 / denominator, 0 for a sequence without active tokens.
    `tokens` [S] float64: active tokens of each sequence. `group_sizes` [S]: episodes with an active token of each one's
    prompt, if the caller knows them. `branch_weights` [S] float64: w_b, None where each sequence is an episode.
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


AGGREGATIONS: dict[Aggregation, AggregationRule] = {
    "sequence_mean_token_mean": AggregationRule(_count_episodes, lambda parts: parts.weighted_scale),
    "token_mean": AggregationRule(_count_tokens, lambda parts: parts.scale * parts.tokens),
    "sequence_mean_token_sum": AggregationRule(_count_episodes, lambda parts: parts.scale * parts.tokens),
    "sequence_mean_token_sum_norm": AggregationRule(_count_episodes, _token_sum_norm),
    "group_mean_token_mean": AggregationRule(_count_prompts, _group_mean),
}

"""The terms of the objectives: what min(rho A, clip(rho) A) is for GSPO and GRPO, and what others put in its place.

Owns the term of one unit, a sequence or a token, its gradient and its flags; the ratio of the unit, the average and the
parallel contract are `objective.py`'s. docs/objectives.md has each equation with its source.

With d = log pi(y_t) - log pi_old(y_t), r = exp(d), sg the stop-gradient and A the advantage of the token:

    clip     min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A), rho the ratio of the sequence or of the token
    cispo    sg[clip(r, 1 - clip_low, 1 + clip_high)] A log pi(y_t)
    sapo     (4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A
    dppo     r A; 0 where pi - pi_old of the token is above clip_high and A > 0, or below -clip_low and A < 0
    minirl   sg[pi / mu] A log pi(y_t), mu the server's; 0 where r is outside the range in the direction of A
    vespo    sg[W^k exp(lambda (1 - W))] A log pi(y_t), W = exp(sum of d over the sequence), k and lambda by the sign
    gmpo     exp(mean of clipped d over the sequence) A, d at most clip_high for A > 0, at least -clip_low for A < 0
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gspo_mega.algorithm.terms import ObjectiveSettings

NEAR_ONE = 0.5  # |log ratio| up to which expm1 keeps more digits of the term than exp does


@dataclass(frozen=True)
class Terms:
    """advantages * (offset + excess) of each unit, a sequence or a token; all of one shape.

    `advantages` is 0 where the unit does not count. `offset` is the term's factor at ratio 1, where `excess` is what is
    left of it: the terms of a group nearly cancel, and what is left are digits that offset + excess would have rounded
    away. Add the offsets' part and the excesses' part separately. `high`, `low`, `dual`: where it was clipped.
    """

    advantages: Tensor
    offset: Tensor
    excess: Tensor
    high: Tensor
    low: Tensor
    dual: Tensor


@dataclass(frozen=True)
class TokenTerms:
    """What a term of tokens is made of, all [T] float64 and local. `log_probs`: nats, with gradient. `log_ratio`: d
    with gradient; `decision`: the same numbers without. `old_log_probs`, `rollout_log_probs`: nats, without gradient,
    the second None where the objective needs none. `sequence_sums`: sum of d over each token's whole sequence, without.
    `advantages`; `counts`: bool, False where a token contributes nothing.
    """

    log_probs: Tensor
    log_ratio: Tensor
    decision: Tensor
    old_log_probs: Tensor
    rollout_log_probs: Tensor | None
    sequence_sums: Tensor
    advantages: Tensor
    counts: Tensor


def low_edge(clip_low: float) -> float:
    """The lower edge of a log ratio, nats; a width of 1 or more leaves it open."""
    return math.log1p(-clip_low) if clip_low < 1 else -math.inf


def clipped_terms(
    settings: ObjectiveSettings, log_ratio: Tensor, decision: Tensor, advantages: Tensor, counts: Tensor
) -> Terms:
    """The clipped surrogate of each unit; 0, with gradient 0 and no flag, where `counts` is False or A is 0.

    All tensors are local and of one shape: [S] where the unit is a sequence, [T] where it is a token. `log_ratio`:
    float64 nats, with gradient; `decision`: the same numbers without (log s_i of each token for GSPO-token);
    `advantages`: float64; `counts`: bool. The decision falls in log space and float64, strictly
    outside the band, so rounding of exp cannot flip it; exp is evaluated only where the ratio itself is the
    value, so an overflowing clipped ratio costs neither inf nor NaN.
    """
    positive, negative = counts & (advantages > 0), counts & (advantages < 0)
    high = positive & (decision > math.log1p(settings.clip_high))
    low = negative & (decision < low_edge(settings.clip_low))
    dual = torch.zeros_like(low)
    excess = settings.clip_high * high.double() - settings.clip_low * low.double()
    if settings.dual_clip is not None:
        dual = negative & (decision > math.log(settings.dual_clip))
        excess = torch.where(dual, settings.dual_clip - 1.0, excess)
    follows_ratio = (positive | negative) & ~(high | low | dual)
    offset, excess = _ratio_parts(log_ratio, decision, follows_ratio, excess)
    return Terms(torch.where(positive | negative, advantages, 0.0), offset, excess, high, low, dual)


def geometric_terms(log_ratio: Tensor, advantages: Tensor, counts: Tensor, high: Tensor, low: Tensor) -> Terms:
    """GMPO's term of each sequence from the mean of its clipped log ratios: `log_ratio`, `advantages`, `counts` [S].
    `high`, `low`: [T], of `clipped_log_ratios`.
    """
    counts = counts & (advantages != 0)
    offset, excess = _ratio_parts(log_ratio, log_ratio.detach(), counts, torch.zeros_like(log_ratio.detach()))
    return Terms(torch.where(counts, advantages, 0.0), offset, excess, high, low, torch.zeros_like(low))


def clipped_log_ratios(
    settings: ObjectiveSettings, log_ratio: Tensor, advantages: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """GMPO's clipped d, which has no gradient where it is clipped, and where it was clipped high and low: each [T].

    `log_ratio`: nats, with gradient; `advantages`: of each token's sequence; `counts`: bool.
    """
    d = log_ratio.detach()
    high = counts & (advantages > 0) & (d > settings.clip_high)
    low = counts & (advantages < 0) & (d < -settings.clip_low)
    clipped = torch.where(high, settings.clip_high, torch.where(low, -settings.clip_low, log_ratio))
    return clipped, high, low


def token_terms(settings: ObjectiveSettings, tokens: TokenTerms) -> Terms:
    """The term of each token under a surrogate with a ratio of tokens; 0, with gradient 0 and no flag, where it does
    not count or A is 0. Raises ValueError for `minirl` without the server's log-probs.
    """
    advantages, decision = tokens.advantages, tokens.decision
    positive, negative = tokens.counts & (advantages > 0), tokens.counts & (advantages < 0)
    counts, none = positive | negative, torch.zeros_like(positive)
    high, low = none, none
    offset = torch.zeros_like(advantages)
    if settings.surrogate == "clip":
        return clipped_terms(settings, tokens.log_ratio, decision, advantages, tokens.counts)
    if settings.surrogate == "sapo":
        tau = _by_sign(positive, settings.temperature_positive, settings.temperature_negative)
        offset = 2.0 / tau
        # sigmoid(x) - 1/2 = tanh(x / 2) / 2; of a ratio too large for float64 it is 1/2.
        x = torch.where(counts, tau * torch.expm1(tokens.log_ratio.clamp(max=700.0)), 0.0)
        excess = offset * torch.tanh(x / 2)
    elif settings.surrogate == "dppo":
        moved = tokens.log_probs.detach().exp() - tokens.old_log_probs.exp()
        high, low = positive & (moved > settings.clip_high), negative & (moved < -settings.clip_low)
        offset, excess = _ratio_parts(tokens.log_ratio, decision, counts & ~(high | low), torch.zeros_like(decision))
        offset = torch.where(high | low, 0.0, offset)
    else:
        weight, high, low = _weights(settings, tokens, positive, negative)
        excess = torch.where(counts, weight * tokens.log_probs, 0.0)
    return Terms(torch.where(counts, advantages, 0.0), offset, excess, high, low, none)


def _weights(
    settings: ObjectiveSettings, tokens: TokenTerms, positive: Tensor, negative: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The detached weight of A log pi(y_t), and where it was clipped high and low: each [T]."""
    decision = tokens.decision
    edges = low_edge(settings.clip_low), math.log1p(settings.clip_high)
    if settings.surrogate == "cispo":
        # Clipped whatever the sign of A: it is the weight that is bounded, and no token loses its gradient.
        counts = positive | negative
        high, low = counts & (decision > edges[1]), counts & (decision < edges[0])
        return decision.clamp(*edges).exp(), high, low
    if settings.surrogate == "vespo":
        power = _by_sign(positive, settings.power_positive, settings.power_negative)
        decay = _by_sign(positive, settings.decay_positive, settings.decay_negative)
        sums = tokens.sequence_sums
        # exp of a large sum is infinite, and the weight then 0, as it should be.
        weight = torch.exp(decay + power * sums - decay * sums.exp())
        return weight, torch.zeros_like(positive), torch.zeros_like(negative)
    if tokens.rollout_log_probs is None:
        raise ValueError("minirl weighs by the ratio to the server's log-probs, which were not given")
    high, low = positive & (decision > edges[1]), negative & (decision < edges[0])
    to_server = tokens.log_probs.detach() - tokens.rollout_log_probs
    if settings.weight_limit is not None:
        to_server = to_server.clamp(max=math.log(settings.weight_limit))
    return torch.where(high | low, 0.0, to_server.exp()), high, low


def _by_sign(positive: Tensor, if_positive: float, otherwise: float) -> Tensor:
    """One of two numbers for each entry of `positive` [T] bool: float64, as a choice of two Python floats is not."""
    return torch.full_like(positive, otherwise, dtype=torch.float64).masked_fill(positive, if_positive)


def _ratio_parts(
    log_ratio: Tensor, decision: Tensor, follows_ratio: Tensor, otherwise: Tensor
) -> tuple[Tensor, Tensor]:
    """(offset, excess) of exp(log_ratio) where `follows_ratio`, else (1, `otherwise`)."""
    far = decision.abs() > NEAR_ONE
    near_ratio, far_ratio = follows_ratio & ~far, follows_ratio & far
    excess = torch.where(near_ratio, torch.expm1(torch.where(near_ratio, log_ratio, 0.0)), otherwise)
    excess = torch.where(far_ratio, torch.exp(torch.where(far_ratio, log_ratio, 0.0)), excess)
    return (~far_ratio).double(), excess

"""The terms that other objectives put in the place of GSPO's and GRPO's clip, which is in `objective.py`.

Each function returns the term of every unit (a sequence or a token), its gradient and its flags. docs/objectives.md has
each equation with its source. With d = log pi(y_t) - log pi_old(y_t), r = exp(d), sg the stop-gradient and A the
advantage of the token:

    cispo    sg[clip(r, 1 - clip_low, 1 + clip_high)] A log pi(y_t)
    sapo     (4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A
    dppo     r A; 0 where pi - pi_old of the token is above clip_high and A > 0, or below -clip_low and A < 0
    dppo_kl  r A; 0 where the divergence of the token's coin, D(pi_old, pi) of `binary_divergence`, is above clip_high,
             r > 1 and A > 0, or above clip_low, r < 1 and A < 0
    minirl   sg[pi / mu] A log pi(y_t), mu the server's; 0 where r is outside the range in the direction of A
    vespo    sg[W^k exp(lambda (1 - W))] A log pi(y_t), W = exp(sum of d over the sequence), k and lambda by the sign
    gmpo     exp(mean of clipped d over the sequence) A, d at most clip_high for A > 0, at least -clip_low for A < 0
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gspo_mega.algorithm.named_corrections import binary_divergence
from gspo_mega.algorithm.terms import ObjectiveSettings, Terms, log_lower_edge, ratio_parts


@dataclass(frozen=True)
class TokenInputs:
    """What the term of a token is computed from, all [T] float64 and local. `log_probs`: nats, with gradient.
    `log_ratio`: d with gradient; `decision`: the same numbers without. `old_log_probs`, `rollout_log_probs`: nats,
    without gradient; the second is None where the objective needs none. `sequence_sums`: the sum of d over each token's
    whole sequence, without gradient. `advantages`. `counts`: bool, False where a token contributes nothing.
    """

    log_probs: Tensor
    log_ratio: Tensor
    decision: Tensor
    old_log_probs: Tensor
    rollout_log_probs: Tensor | None
    sequence_sums: Tensor
    advantages: Tensor
    counts: Tensor


def surrogate_terms(settings: ObjectiveSettings, tokens: TokenInputs) -> Terms:
    """The term of each token under `cispo`, `sapo`, `dppo`, `dppo_kl`, `minirl` or `vespo`: [T]. A token that does not
    count, or has A = 0, has the term 0 with gradient 0 and no flag. Raises ValueError for `minirl` without the server's
    log-probs.
    """
    advantages, decision = tokens.advantages, tokens.decision
    positive, negative = tokens.counts & (advantages > 0), tokens.counts & (advantages < 0)
    counts, none = positive | negative, torch.zeros_like(positive)
    high, low = none, none
    offset = torch.zeros_like(advantages)
    if settings.surrogate == "sapo":
        tau = _by_sign(positive, settings.temperature_positive, settings.temperature_negative)
        offset = 2.0 / tau
        # sigmoid(x) - 1/2 = tanh(x / 2) / 2; for a ratio too large for float64 it is 1/2.
        x = torch.where(counts, tau * torch.expm1(tokens.log_ratio.clamp(max=700.0)), 0.0)
        excess = offset * torch.tanh(x / 2)
    elif settings.surrogate in ("dppo", "dppo_kl"):
        if settings.surrogate == "dppo":
            moved = tokens.log_probs.detach().exp() - tokens.old_log_probs.exp()
        else:
            moved = binary_divergence(tokens.old_log_probs, tokens.log_probs.detach()) * decision.sign()
        high, low = positive & (moved > settings.clip_high), negative & (moved < -settings.clip_low)
        offset, excess = ratio_parts(tokens.log_ratio, decision, counts & ~(high | low), torch.zeros_like(decision))
        offset = torch.where(high | low, 0.0, offset)
    else:
        weight, high, low = _weights(settings, tokens, positive, negative)
        excess = torch.where(counts, weight * tokens.log_probs, 0.0)
    return Terms(torch.where(counts, advantages, 0.0), offset, excess, high, low, none)


def _weights(
    settings: ObjectiveSettings, tokens: TokenInputs, positive: Tensor, negative: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The detached weight of A log pi(y_t), and where it was clipped high and low: each [T]."""
    decision = tokens.decision
    edges = log_lower_edge(settings.clip_low), math.log1p(settings.clip_high)
    if settings.surrogate == "cispo":
        # Clipped for either sign of A: the weight is bounded, and no token loses its gradient.
        counts = positive | negative
        high, low = counts & (decision > edges[1]), counts & (decision < edges[0])
        return decision.clamp(*edges).exp(), high, low
    if settings.surrogate == "vespo":
        power = _by_sign(positive, settings.power_positive, settings.power_negative)
        decay = _by_sign(positive, settings.decay_positive, settings.decay_negative)
        sums = tokens.sequence_sums
        # exp of a large sum is infinite, and the weight is then 0, as it should be.
        weight = torch.exp(decay + power * sums - decay * sums.exp())
        return weight, torch.zeros_like(positive), torch.zeros_like(negative)
    if settings.surrogate != "minirl":
        raise ValueError(f"surrogate {settings.surrogate} has no formula in surrogates.py")
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


def clipped_log_ratios(
    settings: ObjectiveSettings, log_ratio: Tensor, advantages: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """GMPO's clipped d, which has no gradient where it is clipped, and where it was clipped high and low: each [T].

    `log_ratio`: [T] nats, with gradient; `advantages`: [T], of each token's sequence; `counts`: [T] bool.
    """
    d = log_ratio.detach()
    high = counts & (advantages > 0) & (d > settings.clip_high)
    low = counts & (advantages < 0) & (d < -settings.clip_low)
    clipped = torch.where(high, settings.clip_high, torch.where(low, -settings.clip_low, log_ratio))
    return clipped, high, low


def geometric_terms(log_ratio: Tensor, advantages: Tensor, counts: Tensor, high: Tensor, low: Tensor) -> Terms:
    """GMPO's term of each sequence, from the mean of its clipped log-ratios: `log_ratio`, `advantages`, `counts` are
    [S]. `high`, `low`: [T], from `clipped_log_ratios`.
    """
    counts = counts & (advantages != 0)
    offset, excess = ratio_parts(log_ratio, log_ratio.detach(), counts, torch.zeros_like(log_ratio.detach()))
    return Terms(torch.where(counts, advantages, 0.0), offset, excess, high, low, torch.zeros_like(low))

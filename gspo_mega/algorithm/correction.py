"""The correction of the engine gap: which responses a step trains on, and with what weight.

Owns the rule and its arithmetic, for all responses of a rollout batch at once. Bringing their sums together from all
ranks is `engine.shared_correction`'s; the metrics of the gap are `mismatch`'s. docs/mismatch.md derives the rule.

d = trainer - rollout of a sampled token, nats. Its mean is -KL and its variance about 2 KL, KL(rollout || trainer) per
token, so the mean over L tokens is -KL +- sqrt(2 KL / L). A band of fixed width around 0 would therefore judge a
response by its length: short ones leave it by noise, and long ones because of the mean. The band here is centred on
the batch's own mean m and narrows with the length:

    z_i = sqrt(L_i) (mean d_i - m),   kept: |z_i| <= bound_nats and no token with |d| > token_veto_nats.

The unit of z is the nat: it is the deviation of a response of one token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gspo_mega.algorithm.ratio import segment_sum
from gspo_mega.base.errors import NumericsError

CorrectionMode = Literal["none", "truncate", "mask"]
KeptWeight = Literal["one", "ratio"]

# Sums of d on this grid are exact in float64 up to 2^21 nats, so that they are the same in every order of addition.
GRID_NATS = 2.0**-32
# The inside of the centre settles in a few turns; the number only keeps a rounding error from turning it forever.
_MOST_TURNS = 100


@dataclass(frozen=True)
class CorrectionRule:
    """The keys of section `mismatch` of a configuration, with their meanings there.

    Raises ValueError for a mode, weight or bound that has no meaning.
    """

    mode: CorrectionMode = "mask"
    bound_nats: float = 0.5
    token_veto_nats: float | None = 9.2
    kept_weight: KeptWeight = "one"
    segment_tokens: int = 64

    def __post_init__(self) -> None:
        if self.mode not in ("none", "truncate", "mask"):
            raise ValueError(f"correction {self.mode!r}; valid: none, truncate, mask")
        if self.kept_weight not in ("one", "ratio"):
            raise ValueError(f"kept_weight {self.kept_weight!r}; valid: one, ratio")
        for name, value in (("bound_nats", self.bound_nats), ("token_veto_nats", self.token_veto_nats)):
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be > 0 and finite; got {value}")
        if self.segment_tokens < 1:
            raise ValueError(f"segment_tokens must be >= 1; got {self.segment_tokens}")

    @property
    def veto_limit(self) -> float:
        """|d| above which a token drops its response, nats; infinite where there is no veto."""
        return math.inf if self.token_veto_nats is None else self.token_veto_nats


@dataclass(frozen=True)
class CorrectionResult:
    """Of N responses. `weights` [N] float64, detached, 0 where the response is dropped; `keep` [N] bool; `deviations`
    [N] float64 nats: z, signed, 0 for a response without active token; `centre`: m, nats.
    """

    weights: Tensor
    keep: Tensor
    deviations: Tensor
    centre: float


def exact_sums(d: Tensor, segment_ids: Tensor, num_segments: int) -> Tensor:
    """Sum of `d: [T]` float64 nats by segment, [num_segments] float64, each d rounded to a multiple of `GRID_NATS`.

    Masked tokens hold 0. Exact, so neither the order of the tokens, nor the packs, nor the division over
    context-parallel ranks changes a bit of what is decided by these sums.
    """
    return segment_sum((d / GRID_NATS).round() * GRID_NATS, segment_ids, num_segments)


def batch_centre(sums: Tensor, lengths: Tensor, bound: float) -> float:
    """m of N responses, nats: the token-weighted mean of d over those that lie inside their band around it.

    `sums: [N]` nats of d, of `exact_sums`, over `lengths: [N]` tokens each; those without token do not count, and 0 is
    the m of none. Starts at `bounded_centre` and takes the mean of those inside until they stay the same, which lowers
    sum_i min(z_i^2, bound^2) at every turn. So a response outside does not move m at all, and where all are inside m is
    sum d / sum L. Where none is inside of the start, that is m.
    """
    present = lengths > 0
    totals, tokens = sums[present].double(), lengths[present].double()
    if totals.numel() == 0:
        return 0.0
    means, roots = totals / tokens, tokens.sqrt()
    centre = bounded_centre(means, roots, bound)
    before = torch.zeros_like(present[present])
    for _ in range(_MOST_TURNS):
        inside = (roots * (means - centre)).abs() <= bound
        if torch.equal(inside, before) or not bool(inside.any()):
            break
        centre, before = float(totals[inside].sum() / tokens[inside].sum()), inside
    return centre


def bounded_centre(means: Tensor, roots: Tensor, bound: float) -> float:
    """The root of sum_i clip(roots_i (means_i - m), -bound, bound) in m, nats: `means: [N]` nats, `roots: [N]` sqrt(L).

    Huber's estimate of location, of z rather than of the mean: the largest pull is the same for a response of any
    length, so that it breaks down where half of the responses are broken. (With sqrt(L) times that pull it would be
    where sqrt(L) adds up to half, and one long broken response outvotes many short healthy ones.) Its own bias is
    largest for long responses, in z, which is why m is not this. Where a whole interval is root, its middle.
    """
    # Around one of the means, so that a shift common to all of them costs no digits.
    origin = float(means.median())
    means = means - origin
    return origin + (_smallest_root(means, roots, bound) - _smallest_root(-means, roots, bound)) / 2


def _smallest_root(means: Tensor, roots: Tensor, bound: float) -> float:
    nothing = 1e-12 * bound * means.numel()
    edges = torch.cat([means - bound / roots, means + bound / roots]).sort().values
    # The pull is linear between neighbouring edges, positive at the first and negative at the last.
    low, high = 1, edges.numel() - 1
    while low < high:
        middle = (low + high) // 2
        if float((roots * (means - edges[middle])).clamp(-bound, bound).sum()) > nothing:
            low = middle + 1
        else:
            high = middle
    left, right = edges[low - 1], edges[low]
    offsets = means - (left + right) / 2
    inside = offsets.abs() <= bound / roots
    outer = bound * offsets.sign()[~inside].sum()
    root = ((roots * means)[inside].sum() + outer) / roots[inside].sum()
    return float(root.clamp(left, right)) if bool(inside.any()) else float(right)


def correct(rule: CorrectionRule, sums: Tensor, lengths: Tensor, num_vetoes: Tensor) -> CorrectionResult:
    """The rule on all N responses of a rollout batch, in the batch's order, from all ranks.

    `sums: [N]` float64 nats, of `exact_sums`; `lengths: [N]` active tokens; `num_vetoes: [N]` tokens with |d| above
    `rule.veto_limit`. What a token vetoed does not enter the centre. Raises NumericsError naming the row of a sum that
    is not finite.
    """
    bad = ~torch.isfinite(sums)
    if bool(bad.any()):
        row = int(bad.to(torch.uint8).argmax())
        raise NumericsError(
            f"the log ratio of trainer to server is {float(sums[row])} for trajectory {row} of the rollout batch"
        )
    vetoed = num_vetoes > 0
    centre = batch_centre(sums[~vetoed], lengths[~vetoed], rule.bound_nats)
    return weigh(rule, sums, lengths, vetoed, centre)


def weigh(rule: CorrectionRule, sums: Tensor, lengths: Tensor, vetoed: Tensor, centre: float) -> CorrectionResult:
    """The rule around a known `centre`, nats. `sums: [N]` nats, finite; `lengths: [N]` tokens; `vetoed: [N]` bool.

    `none`: all weights 1. `mask`: kept responses weigh 1, or exp(mean d_i - m) with `kept_weight: ratio`. `truncate`:
    all but vetoed ones are kept and weigh exp(min(mean d_i - m, bound_nats / sqrt(L_i))). A response without active
    token is kept and weighs 1.
    """
    sums, tokens = sums.detach().double(), lengths.double().clamp(min=1.0)
    log_weights = torch.where(lengths > 0, sums / tokens - centre, 0.0)
    deviations = log_weights * tokens.sqrt()
    weights, keep = torch.ones_like(sums), torch.ones_like(sums, dtype=torch.bool)
    if rule.mode == "truncate":
        keep = ~vetoed
        weights = torch.minimum(log_weights, rule.bound_nats / tokens.sqrt()).exp()
    elif rule.mode == "mask":
        keep = ~vetoed & (deviations.abs() <= rule.bound_nats)
        if rule.kept_weight == "ratio":
            weights = torch.where(keep, log_weights, 0.0).exp()
    return CorrectionResult(torch.where(keep, weights, 0.0), keep, deviations, centre)


def acted_on(mode: CorrectionMode, bound_nats: float, keep: Tensor, deviations: Tensor) -> Tensor:
    """Which of N responses the rule changed: dropped, or weighed by the bound of `truncate`. [N] bool.

    `keep` [N] bool and `deviations` [N] nats of `CorrectionResult`.
    """
    if mode == "truncate":
        return ~keep | (deviations > bound_nats)
    return ~keep

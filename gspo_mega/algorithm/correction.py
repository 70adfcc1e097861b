"""The gap between the two engines: its metrics, and the correction, which says which responses a step trains on.

d = trainer - rollout is the difference of the log-probs of one sampled token, in nats. Every KL here is
KL(rollout || trainer), because the rollout is what was sampled from. The gap to the *current* policy, which is the
importance ratio, is in `objective.py`. First come the metrics, then the correction for one weight version, then the one
for several.

Over the tokens of a response the mean of d is -KL and its variance about 2 KL, with the KL per token, so the mean over
L tokens is -KL +- sqrt(2 KL / L). A band of fixed width around 0 would therefore judge a response by its length: short
ones leave it by noise, and long ones because of the mean. The band here is centred on the batch's own mean m and
narrows with the length:

    z_i = sqrt(L_i) (mean d_i - m),   kept: |z_i| <= bound_nats and no token with |d| > token_veto_nats.

The unit of z is the nat: it is the deviation of a response of one token. docs/mismatch.md derives the rule.

If tokens of several weight versions are trained together, d also contains what the policy has moved since version v:
its mean over tokens of version v is -(KL of the engines + KL of v to the policy). So each version has a centre m_v. A
segment is the tokens of one response that one weight version sampled, and

    z_iv = (sum_{t in v} d_it - L_iv m_v) / sqrt(L_iv),        z_i = sum_v sqrt(L_iv / L_i) z_iv.

Both have the noise's own standard deviation at every length. A response is kept if |z_i| <= bound_nats and
|z_iv| <= bound_nats for each of its segments of at least `segment_tokens` tokens. With one version this is the rule
above. docs/studies/asynchronous_ratio.md derives it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from gspo_mega.algorithm.objective import active_values, segment_sum, token_log_ratios
from gspo_mega.algorithm.terms import exp_minus_linear
from gspo_mega.base.errors import NumericsError
from gspo_mega.config.algorithms import CORRECTION_LIMITS as DEFAULT_LIMITS
from gspo_mega.config.clip_range import Band

# --- Metrics ---------------------------------------------------------------------------------------------------

SUM_NAMES = (
    "tokens",
    "log_ratio",
    "log_ratio_squared",
    "k3",
    "abs_log_ratio",
    "second_order_chi2",
    "truncated_ratio",
    "truncated",
    "icepop_kept",
    "range_widths",
    "clipped_if_negative",
    "clipped_if_positive",
)
MAXIMUM_NAMES = ("abs_log_ratio", "abs_prob_difference", "negative_log_ratio")
ICEPOP_BAND = (0.5, 5.0)
TOKEN_CAP = 2.0  # the cap of token ratios in truncated importance sampling; only a metric uses it


def mismatch_sums(
    trainer_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    segment_ids: Tensor,
    num_sequences: int,
    token_cap: float = TOKEN_CAP,
    band: Band | None = None,
) -> tuple[Tensor, Tensor]:
    """The numbers of each sequence that the metrics need, float64: sums [S, len(SUM_NAMES)] and maxima
    [S, len(MAXIMUM_NAMES)].

    All token arguments are [T]; masked entries may hold anything. A rank that holds part of a sequence's tokens
    returns its part: add the sums and take the largest of the maxima over the context-parallel ranks. `token_cap`
    bounds the token ratio in `truncated_ratio`. `band`: the clip range of tokens for the last three sums, which are 0
    without one, and with one of whole sequences. A sequence without active tokens has sums 0 and maxima -inf.
    """
    active = mask.bool()
    d = token_log_ratios(trainer_log_probs.detach(), rollout_log_probs, mask)
    ratio = d.exp()
    trainer, rollout = active_values(trainer_log_probs.detach(), mask), active_values(rollout_log_probs.detach(), mask)
    moved = trainer.exp() - rollout.exp()
    columns = {
        "tokens": torch.ones_like(d),
        "log_ratio": d,
        "log_ratio_squared": d.square(),
        "k3": exp_minus_linear(d),
        "abs_log_ratio": d.abs(),
        "second_order_chi2": exp_minus_linear(2 * d),
        "truncated_ratio": ratio.clamp(max=token_cap),
        "truncated": (ratio > token_cap).double(),
        "icepop_kept": ((ratio >= ICEPOP_BAND[0]) & (ratio <= ICEPOP_BAND[1])).double(),
        **dict.fromkeys(("range_widths", "clipped_if_negative", "clipped_if_positive"), torch.zeros_like(d)),
    }
    if band is not None and band.per_token:
        x = moved if band.of_probability else d
        columns["range_widths"] = band.widths(x)
        columns["clipped_if_negative"] = band.is_clipped(x, negative=True).double()
        columns["clipped_if_positive"] = band.is_clipped(x, negative=False).double()
    sums = torch.stack(
        [segment_sum(torch.where(active, columns[n], 0.0), segment_ids, num_sequences) for n in SUM_NAMES], dim=1
    )
    candidates = {
        "abs_log_ratio": d.abs(),
        "abs_prob_difference": moved.abs(),
        "negative_log_ratio": -d,
    }
    maxima = torch.full((num_sequences, len(MAXIMUM_NAMES)), -math.inf, dtype=torch.float64, device=d.device)
    for column, name in enumerate(MAXIMUM_NAMES):
        values = torch.where(active, candidates[name], -math.inf)
        maxima[:, column] = maxima[:, column].scatter_reduce(0, segment_ids, values, "amax")
    return sums, maxima


def effective_sample_fraction(log_weights: Tensor) -> float:
    """(sum w)^2 / (n sum w^2) of w = exp(log_weights: [N]), in (0, 1]; computed on w / max w. 1 for no weights."""
    if log_weights.numel() == 0:
        return 1.0
    weights = (log_weights.double() - log_weights.max().double()).exp()
    return float(weights.sum().square() / (weights.numel() * weights.square().sum()))


def mismatch_metrics(sums: Tensor, maxima: Tensor) -> dict[str, float]:
    """Metrics of all sequences of a batch from `mismatch_sums` gathered over ranks: [N, ...] each.

    Token means weigh tokens alike, sequence means sequences; sequences without active tokens count in neither. `k1`,
    `k2`, `k3` estimate the KL per token; `chi2_*` are mean(w^2) - 1, `ess_*` the effective share of the samples, for w
    the token ratio, the sequence's full product exp(sum d) (`sequence`) or its geometric mean
    (`sequence_length_normalised`). `chi2_sequence_log1p` = log(1 + chi2_sequence) stays finite where that overflows.
    Without any active token, KLs are 0, ratios and ESS 1.
    """
    present = sums[:, 0] > 0
    by_name: dict[str, Tensor] = dict(zip(SUM_NAMES, sums[present].double().T, strict=True))
    top = dict(zip(MAXIMUM_NAMES, maxima[present].double().T, strict=True))
    lengths = by_name["tokens"]
    if lengths.numel() == 0:
        zero: dict[str, float] = dict.fromkeys(
            (
                "k1",
                "k2",
                "k3",
                "abs_log_ratio_mean",
                "abs_log_ratio_max",
                "abs_prob_difference_max",
                "log_ppl_difference_mean",
                "chi2_token",
                "chi2_sequence",
                "chi2_sequence_log1p",
                "chi2_sequence_length_normalised",
                "token_truncated_fraction",
            ),
            0.0,
        )
        one: dict[str, float] = dict.fromkeys(
            (
                "ppl_ratio_mean",
                "token_truncated_ratio_mean",
                "ess_token",
                "ess_sequence",
                "icepop_kept_fraction",
            ),
            1.0,
        )
        return zero | one
    num_tokens = float(lengths.sum())

    def token_mean(name: str) -> float:
        return float(by_name[name].sum()) / num_tokens

    means = by_name["log_ratio"] / lengths
    mean_d = token_mean("log_ratio")
    chi2_token = 2 * mean_d + token_mean("second_order_chi2")  # = mean(exp(2d)) - 1, its cancelling part apart
    return {
        "k1": -mean_d,
        "k2": token_mean("log_ratio_squared") / 2,
        "k3": token_mean("k3"),
        "abs_log_ratio_mean": token_mean("abs_log_ratio"),
        "abs_log_ratio_max": float(top["abs_log_ratio"].max()),
        "abs_prob_difference_max": float(top["abs_prob_difference"].max()),
        "log_ppl_difference_mean": float(-means.mean()),
        "ppl_ratio_mean": float((-means).exp().mean()),
        "chi2_token": chi2_token,
        "chi2_sequence": float(torch.expm1(2 * by_name["log_ratio"]).mean()),
        "chi2_sequence_log1p": float(torch.logsumexp(2 * by_name["log_ratio"], 0)) - math.log(lengths.numel()),
        "chi2_sequence_length_normalised": float(torch.expm1(2 * means).mean()),
        "token_truncated_ratio_mean": token_mean("truncated_ratio"),
        "token_truncated_fraction": token_mean("truncated"),
        "ess_token": (1 + mean_d + token_mean("k3")) ** 2 / (1 + chi2_token),
        "ess_sequence": effective_sample_fraction(by_name["log_ratio"]),
        "icepop_kept_fraction": token_mean("icepop_kept"),
    }


def sequence_mean_log_ratio(sums: Tensor) -> Tensor:
    """The mean over each response of trainer - rollout, from `mismatch_sums`: [N] float64 nats; 0 without active
    tokens.
    """
    return sums[:, SUM_NAMES.index("log_ratio")] / sums[:, SUM_NAMES.index("tokens")].clamp(min=1.0)


# --- The correction --------------------------------------------------------------------------------------------

# Those of whole responses by their mean, and those that have their weights in `named_corrections.py`.
CorrectionMode = Literal["none", "truncate", "mask", "token_tis", "icepop", "kpop", "sequence_mis", "m2po"]
TOKEN_MODES = frozenset({"token_tis", "icepop", "kpop", "m2po"})
KeptWeight = Literal["one", "ratio"]

# Sums of d on this grid are exact in float64 up to 2^21 nats, so they are the same in every order of addition.
GRID_NATS = 2.0**-32
# `batch_centre` converges in a few iterations. The limit only keeps a rounding error from making it run forever.
_MAX_ITERATIONS = 100


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
    upper: float | None = None
    lower: float | None = None
    threshold: float | None = None

    def __post_init__(self) -> None:
        if self.mode not in get_args(CorrectionMode):
            raise ValueError(f"correction {self.mode!r}; valid: {', '.join(get_args(CorrectionMode))}")
        if self.kept_weight not in ("one", "ratio"):
            raise ValueError(f"kept_weight {self.kept_weight!r}; valid: one, ratio")
        for name in ("bound_nats", "token_veto_nats", "upper", "lower", "threshold"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be > 0 and finite; got {value}")
        if self.segment_tokens < 1:
            raise ValueError(f"segment_tokens must be >= 1; got {self.segment_tokens}")

    @property
    def veto_limit(self) -> float:
        """The |d| above which a token drops its response, in nats; infinite if there is no veto."""
        return math.inf if self.token_veto_nats is None else self.token_veto_nats

    @property
    def is_of_tokens(self) -> bool:
        """Whether single tokens have weights."""
        return self.mode in TOKEN_MODES

    @property
    def upper_limit(self) -> float:
        """The largest importance weight; above it the weight is cut (`token_tis`) or 0."""
        return self.upper if self.upper is not None else DEFAULT_LIMITS[self.mode]["upper"]

    @property
    def lower_limit(self) -> float:
        """The smallest importance weight of `icepop`."""
        return self.lower if self.lower is not None else DEFAULT_LIMITS[self.mode]["lower"]

    @property
    def divergence_limit(self) -> float:
        """The largest divergence of `kpop`, or mean square of `m2po`."""
        return self.threshold if self.threshold is not None else DEFAULT_LIMITS[self.mode]["threshold"]


@dataclass(frozen=True)
class CorrectionResult:
    """The decision for N responses. `weights` [N] float64, detached, 0 where the response is dropped; `keep` [N] bool;
    `deviations` [N] float64 nats: z, signed, 0 for a response without active tokens; `centre`: m, nats.
    """

    weights: Tensor
    keep: Tensor
    deviations: Tensor
    centre: float


def exact_sums(d: Tensor, segment_ids: Tensor, num_segments: int) -> Tensor:
    """Sum of `d: [T]` float64 nats by segment, [num_segments] float64, each d rounded to a multiple of `GRID_NATS`.

    Masked tokens hold 0. The sums are exact, so neither the order of the tokens, nor the packs, nor the division over
    context-parallel ranks changes a bit of any decision that depends on them.
    """
    return segment_sum((d / GRID_NATS).round() * GRID_NATS, segment_ids, num_segments)


def batch_centre(sums: Tensor, lengths: Tensor, bound: float) -> float:
    """m of N responses, nats: the token-weighted mean of d over those that lie inside their band around it.

    `sums: [N]` nats, from `exact_sums`, each over `lengths: [N]` tokens. Responses without tokens do not count, and
    without any response m is 0. The search starts at `bounded_centre` and takes the mean of the responses inside until
    they stay the same, which lowers sum_i min(z_i^2, bound^2) at every iteration. So a response outside does not move m
    at all, and if all are inside, m is sum d / sum L. If none is inside at the start, the start is m.
    """
    present = lengths > 0
    totals, tokens = sums[present].double(), lengths[present].double()
    if totals.numel() == 0:
        return 0.0
    means, roots = totals / tokens, tokens.sqrt()
    centre = bounded_centre(means, roots, bound)
    before = torch.zeros_like(present[present])
    for _ in range(_MAX_ITERATIONS):
        inside = (roots * (means - centre)).abs() <= bound
        if torch.equal(inside, before) or not bool(inside.any()):
            break
        centre, before = float(totals[inside].sum() / tokens[inside].sum()), inside
    return centre


def bounded_centre(means: Tensor, roots: Tensor, bound: float) -> float:
    """The root of sum_i clip(roots_i (means_i - m), -bound, bound) in m, nats: `means: [N]` nats, `roots: [N]` sqrt(L).

    This is Huber's estimate of location, for z rather than for the mean. The largest pull is the same for a response of
    any length, so the estimate breaks down when half of the responses are broken. (If the pull grew with sqrt(L), it
    would break down when broken responses have half of the sum of sqrt(L), and one long broken response would outvote
    many short healthy ones.) Its own bias in z is largest for long responses, which is why this root is not used as m.
    If a whole interval is a root, the result is its middle.
    """
    # Relative to one of the means, so that a shift common to all of them costs no digits.
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
    """Decide the correction of all N responses of a rollout batch, in the batch's order, from all ranks.

    `sums: [N]` float64 nats, from `exact_sums`; `lengths: [N]` active tokens; `num_vetoes: [N]` tokens with |d| above
    `rule.veto_limit`. A response that a token vetoed does not enter the centre. Raises NumericsError naming the row of
    a sum that is not finite.
    """
    bad = ~torch.isfinite(sums)
    if bool(bad.any()):
        row = int(bad.to(torch.uint8).argmax())
        raise NumericsError(
            f"the log ratio of trainer to server is {float(sums[row])} for trajectory {row} of the rollout batch"
        )
    vetoed = num_vetoes > 0
    centre = batch_centre(sums[~vetoed], lengths[~vetoed], rule.bound_nats)
    return correct_around(rule, sums, lengths, vetoed, centre)


def correct_around(
    rule: CorrectionRule, sums: Tensor, lengths: Tensor, vetoed: Tensor, centre: float
) -> CorrectionResult:
    """Decide the correction around a known `centre`, in nats.

    `sums: [N]` nats, finite; `lengths: [N]` tokens; `vetoed: [N]` bool: whether a token vetoed the response.

    `none`: all weights 1. `mask`: kept responses weigh 1, or exp(mean d_i - m) with `kept_weight: ratio`. `truncate`:
    all but vetoed ones are kept and weigh exp(min(mean d_i - m, bound_nats / sqrt(L_i))). `sequence_mis`: those whose
    exp(sum d_i) is above the limit are dropped too, and the others weigh that. Corrections of tokens: all but vetoed
    ones are kept and weigh 1. A response without active tokens is kept and weighs 1.
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
    elif rule.is_of_tokens:
        keep = ~vetoed
    elif rule.mode == "sequence_mis":
        products = torch.where(lengths > 0, sums, 0.0)
        keep = ~vetoed & (products <= math.log(rule.upper_limit))
        weights = torch.where(keep, products, 0.0).exp()
    return CorrectionResult(torch.where(keep, weights, 0.0), keep, deviations, centre)


def changed_by_rule(mode: CorrectionMode, bound_nats: float, keep: Tensor, deviations: Tensor) -> Tensor:
    """Which of N responses the rule changed, [N] bool: those dropped, and those cut at the bound of `truncate`.

    `keep` [N] bool and `deviations` [N] nats are those of `CorrectionResult`.
    """
    if mode == "truncate":
        return ~keep | (deviations > bound_nats)
    return ~keep


# --- The correction with several weight versions ---------------------------------------------------------------

# A version with fewer segments has no centre of its own: a single segment would be its own centre and never outside.
MIN_SEGMENTS = 8


@dataclass(frozen=True)
class SegmentCorrection:
    """`result`: the decision for N responses. Its `deviations` are, for each response, the largest in size among its
    own and its judged segments'; its `centre` is the token-weighted mean of the versions' centres. `num_judged` [N]
    float64: segments of at least `segment_tokens` tokens. `by_segment` [N] bool: the response is inside its band as a
    whole, and one of its segments is outside. `centres` [V] float64 nats, oldest version first; NaN for a version
    without tokens.
    """

    result: CorrectionResult
    num_judged: Tensor
    by_segment: Tensor
    centres: Tensor


def segment_centres(sums: Tensor, lengths: Tensor, bound: float) -> Tensor:
    """m_v of V versions, [V] float64 nats: `batch_centre` of the version's segments, or of all segments if it has fewer
    than `MIN_SEGMENTS`; NaN if it has none. `sums`, `lengths`: [N, V] as in `correct_segments`.
    """
    pooled = batch_centre(sums.flatten(), lengths.flatten(), bound)
    centres = []
    for version in range(sums.shape[1]):
        count = int((lengths[:, version] > 0).sum())
        own = count >= MIN_SEGMENTS
        centre = batch_centre(sums[:, version], lengths[:, version], bound) if own else pooled
        centres.append(centre if count else float("nan"))
    return torch.tensor(centres, dtype=torch.float64)


def correct_segments(rule: CorrectionRule, sums: Tensor, lengths: Tensor, num_vetoes: Tensor) -> SegmentCorrection:
    """Decide the correction of all N responses of a rollout batch with tokens of V weight versions.

    `sums: [N, V]` float64 nats, from `exact_sums` over the tokens of each version; `lengths: [N, V]` their number, 0
    where a response has none; `num_vetoes: [N]` as in `correct`. `truncate` cuts every judged segment at its own bound:
    a response weighs exp(min(sum_v (L_iv / L_i) min(z_iv, bound) / sqrt(L_iv), bound / sqrt(L_i))). Raises
    NumericsError naming the row of a sum that is not finite.
    """
    bad = ~torch.isfinite(sums).all(dim=1)
    if bool(bad.any()):
        row = int(bad.to(torch.uint8).argmax())
        raise NumericsError(
            f"the log ratio of trainer to server is not finite for trajectory {row} of the rollout batch"
        )
    sums, lengths, bound = sums.detach().double(), lengths.double(), rule.bound_nats
    vetoed = num_vetoes > 0
    centres = segment_centres(sums[~vetoed], lengths[~vetoed], bound)
    # A version that occurs only in dropped responses has no centre and gets that of all segments.
    pooled = batch_centre(sums[~vetoed].flatten(), lengths[~vetoed].flatten(), bound)
    centres = torch.where(centres.isnan() & (lengths > 0).any(dim=0), pooled, centres)
    shifts = torch.where(lengths > 0, sums - lengths * centres, 0.0)
    tokens = lengths.sum(dim=1).clamp(min=1.0)
    of_segments = shifts / lengths.clamp(min=1.0).sqrt()
    whole = shifts.sum(dim=1) / tokens.sqrt()
    judged = lengths >= rule.segment_tokens
    outside = judged & (of_segments.abs() > bound)
    every = torch.cat([whole[:, None], torch.where(judged, of_segments, 0.0)], dim=1)
    deviations = every.gather(1, every.abs().argmax(dim=1, keepdim=True))[:, 0]

    log_weights = whole / tokens.sqrt()
    weights, keep = torch.ones_like(whole), torch.ones_like(whole, dtype=torch.bool)
    by_segment = (whole.abs() <= bound) & outside.any(dim=1) & ~vetoed
    if rule.mode == "truncate":
        keep = ~vetoed
        cut = torch.where(judged, of_segments.clamp(max=bound) * lengths.sqrt(), shifts).sum(dim=1) / tokens
        weights = torch.minimum(cut, bound / tokens.sqrt()).exp()
        by_segment = (whole <= bound) & (judged & (of_segments > bound)).any(dim=1) & ~vetoed
    elif rule.mode == "mask":
        keep = ~vetoed & (whole.abs() <= bound) & ~outside.any(dim=1)
        if rule.kept_weight == "ratio":
            weights = torch.where(keep, log_weights, 0.0).exp()
    counted = lengths.sum(dim=0)
    centre = float(torch.where(counted > 0, counted * centres, 0.0).sum() / counted.sum().clamp(min=1.0))
    result = CorrectionResult(torch.where(keep, weights, 0.0), keep, deviations, centre)
    return SegmentCorrection(result, judged.double().sum(dim=1), by_segment, centres)

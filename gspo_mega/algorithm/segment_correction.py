"""The correction of the engine gap where tokens of several weight versions are trained together: by version segments.

Owns the rule for segments; for one version `correction.py` is the whole rule, and this one is equal to it. A segment is
the tokens of one response that one weight version sampled. docs/studies/asynchronous_ratio.md derives the rule.

d = trainer - rollout contains, besides the difference of the two engines, what the policy has moved since version v:
its mean over tokens of version v is -(KL of the engines + KL of v to the policy). So each version has a centre m_v, and

    z_iv = (sum_{t in v} d_it - L_iv m_v) / sqrt(L_iv),        z_i = sum_v sqrt(L_iv / L_i) z_iv.

Both have the noise's own sd at every length. A response is kept where |z_i| <= bound_nats and |z_iv| <= bound_nats for
each of its segments of at least `segment_tokens` tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gspo_mega.algorithm.correction import CorrectionResult, CorrectionRule, batch_centre
from gspo_mega.errors import NumericsError

# A version with fewer segments has no centre of its own: a lone segment would be its own centre, and never outside.
LEAST_SEGMENTS = 8


@dataclass(frozen=True)
class SegmentCorrection:
    """`result`: of the N responses; its `deviations` are those of largest size of a response and its judged segments,
    its `centre` the token-weighted mean of the versions'. `num_judged` [N] float64: segments of at least
    `segment_tokens` tokens. `by_segment` [N] bool: inside its band as a whole, and outside for a segment. `centres` [V]
    float64 nats, oldest version first; NaN of a version without token.
    """

    result: CorrectionResult
    num_judged: Tensor
    by_segment: Tensor
    centres: Tensor


def segment_centres(sums: Tensor, lengths: Tensor, bound: float) -> Tensor:
    """m_v of V versions, [V] float64 nats: `batch_centre` of the version's segments, of all segments where it has fewer
    than `LEAST_SEGMENTS`; NaN where it has none. `sums`, `lengths`: [N, V] as in `correct_segments`.
    """
    pooled = batch_centre(sums.flatten(), lengths.flatten(), bound)
    centres = []
    for version in range(sums.shape[1]):
        count = int((lengths[:, version] > 0).sum())
        own = count >= LEAST_SEGMENTS
        centre = batch_centre(sums[:, version], lengths[:, version], bound) if own else pooled
        centres.append(centre if count else float("nan"))
    return torch.tensor(centres, dtype=torch.float64)


def correct_segments(rule: CorrectionRule, sums: Tensor, lengths: Tensor, num_vetoes: Tensor) -> SegmentCorrection:
    """The rule on all N responses of a rollout batch with tokens of V weight versions.

    `sums: [N, V]` float64 nats, of `exact_sums` over the tokens of each version; `lengths: [N, V]` their number, 0
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
    # A version that only dropped responses have has no centre; they lie at the one of all.
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

"""Metrics of one mini-batch's objective: clip fractions, KL estimates and the spread of the log-ratios.

`policy_sums` returns sums for every micro-batch on every rank. They are added up over micro-batches and over data- and
context-parallel ranks alike, and `policy_metrics` divides once. Quantiles cannot be added up, so `log_ratio_summary`
and `band_fractions` take the gathered log s_i.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gspo_mega.algorithm.objective import ObjectiveOutput, active_values
from gspo_mega.algorithm.terms import exp_minus_linear, log_lower_edge

POLICY_SUMS = (
    "objective",
    "num_tokens",
    "num_sequences",
    "num_kept_sequences",
    "clipped_high_tokens",
    "clipped_low_tokens",
    "dual_clipped_tokens",
    "clipped_high_sequences",
    "clipped_low_sequences",
    "dual_clipped_sequences",
    "positive_sequences",
    "negative_sequences",
    "positive_clipped_sequences",
    "negative_clipped_sequences",
    "k1",
    "k2",
    "k3",
    "second_order_chi2",
    "positive_mass",
    "positive_mass_clipped",
    "negative_mass",
    "negative_mass_clipped",
)


def policy_sums(
    output: ObjectiveOutput,
    *,
    mask: Tensor,
    segment_ids: Tensor,
    lengths: Tensor,
    advantages: Tensor,
    keep: Tensor | None = None,
    token_advantages: Tensor | None = None,
    branch_weights: Tensor | None = None,
) -> Tensor:
    """The sums of one micro-batch on one rank, in the order of POLICY_SUMS: [len(POLICY_SUMS)] float64.

    Arguments as given to `policy_objective`. A sequence counts as its tokens held here over its length, so the
    parts of context-parallel ranks add up to one. Its `branch_weights` multiply this, so that an episode of several
    branches counts once. For the token forms a sequence counts as clipped by the share of its tokens that are clipped.
    A sequence that `keep` drops is counted as a sequence, and never as clipped. `*_mass` is |A| of the
    kept sequences by sign, in sequences, and the part of it that was clipped away.
    """
    active = mask.bool()
    whole = 1.0 / lengths.double().clamp(min=1.0)
    if branch_weights is not None:
        whole = whole * branch_weights.detach().double()
    share = torch.where(active, whole[segment_ids], 0.0)
    kept = active if keep is None else active & keep.bool()[segment_ids]
    d = output.token_log_ratio
    high, low, dual = (
        active & (flags if output.flags_are_per_token else flags[segment_ids])
        for flags in (output.clipped_high, output.clipped_low, output.dual_clipped)
    )
    unit_advantages = advantages.detach().double()[segment_ids]
    if token_advantages is not None and output.flags_are_per_token:
        unit_advantages = active_values(token_advantages.detach(), mask)
    signed = torch.where(active, share * unit_advantages, 0.0)
    mass = torch.where(kept, signed, 0.0)
    clipped = high | low | dual
    columns = {
        "objective": output.value,
        "num_tokens": active.sum(),
        "num_sequences": share.sum(),
        "num_kept_sequences": torch.where(kept, share, 0.0).sum(),
        "clipped_high_tokens": high.sum(),
        "clipped_low_tokens": low.sum(),
        "dual_clipped_tokens": dual.sum(),
        "clipped_high_sequences": torch.where(high, share, 0.0).sum(),
        "clipped_low_sequences": torch.where(low, share, 0.0).sum(),
        "dual_clipped_sequences": torch.where(dual, share, 0.0).sum(),
        "positive_sequences": torch.where(signed > 0, share, 0.0).sum(),
        "negative_sequences": torch.where(signed < 0, share, 0.0).sum(),
        "positive_clipped_sequences": torch.where(clipped & (signed > 0), share, 0.0).sum(),
        "negative_clipped_sequences": torch.where(clipped & (signed < 0), share, 0.0).sum(),
        "k1": -d.sum(),
        "k2": d.square().sum() / 2,
        "k3": exp_minus_linear(d).sum(),
        "second_order_chi2": exp_minus_linear(2 * d).sum(),
        "positive_mass": mass.clamp(min=0).sum(),
        "positive_mass_clipped": torch.where(clipped, mass, 0.0).clamp(min=0).sum(),
        "negative_mass": mass.clamp(max=0).abs().sum(),
        "negative_mass_clipped": torch.where(clipped, mass, 0.0).clamp(max=0).abs().sum(),
    }
    return torch.stack([columns[name].double() for name in POLICY_SUMS])


def policy_metrics(sums: Tensor) -> dict[str, float]:
    """Metrics of one mini-batch from its `policy_sums` added over micro-batches and ranks: [len(POLICY_SUMS)].

    `k1`, `k2`, `k3`: estimates of KL(old || current) per token, nats. `*_mass_left`: share of |A| of the kept
    sequences that still has a gradient. Without sequences 0 is clipped and 1 is left; `clip_fraction_<sign>` is
    absent if there is no sequence of that sign.
    """
    total: dict[str, float] = dict(zip(POLICY_SUMS, sums.double().tolist(), strict=True))

    def share(part: str, whole: str) -> float:
        return total[part] / total[whole] if total[whole] > 0 else 0.0

    token_clips = total["clipped_high_tokens"] + total["clipped_low_tokens"] + total["dual_clipped_tokens"]
    sequence_clips = total["clipped_high_sequences"] + total["clipped_low_sequences"] + total["dual_clipped_sequences"]
    by_sign = {
        f"clip_fraction_{sign}": share(f"{sign}_clipped_sequences", f"{sign}_sequences")
        for sign in ("positive", "negative")
        if total[f"{sign}_sequences"] > 0
    }
    return {
        "objective": total["objective"],
        "num_sequences": total["num_sequences"],
        "num_tokens": total["num_tokens"],
        "kept_fraction": share("num_kept_sequences", "num_sequences") if total["num_sequences"] > 0 else 1.0,
        "clip_fraction": sequence_clips / total["num_sequences"] if total["num_sequences"] > 0 else 0.0,
        "clip_fraction_high": share("clipped_high_sequences", "num_sequences"),
        "clip_fraction_low": share("clipped_low_sequences", "num_sequences"),
        "dual_clip_fraction": share("dual_clipped_sequences", "num_sequences"),
        **by_sign,
        "token_clip_fraction": token_clips / total["num_tokens"] if total["num_tokens"] > 0 else 0.0,
        "token_clip_fraction_high": share("clipped_high_tokens", "num_tokens"),
        "token_clip_fraction_low": share("clipped_low_tokens", "num_tokens"),
        "k1": share("k1", "num_tokens"),
        "k2": share("k2", "num_tokens"),
        "k3": share("k3", "num_tokens"),
        # mean(exp(2d)) - 1; its first-order part nearly cancels, so it is added apart
        "chi2_token": share("second_order_chi2", "num_tokens") - 2 * share("k1", "num_tokens"),
        "positive_mass_left": 1 - share("positive_mass_clipped", "positive_mass"),
        "negative_mass_left": 1 - share("negative_mass_clipped", "negative_mass"),
    }


def log_ratio_summary(log_ratios: Tensor) -> dict[str, float]:
    """Mean, sd (population), min, max and 1st and 99th percentile of gathered sequence log-ratios: [N] nats.

    Use it for the means of current - rollout, or for its two parts, which add up exactly: the gap (old - rollout) and
    the update, log s_i. Percentiles interpolate linearly. With N = 0 all are 0.
    """
    if log_ratios.numel() == 0:
        return dict.fromkeys(("mean", "sd", "min", "max", "p1", "p99"), 0.0)
    values = log_ratios.double()
    low, high = _quantile(values, 0.01), _quantile(values, 0.99)
    return {
        "mean": float(values.mean()),
        "sd": float(values.std(correction=0)),
        "min": float(values.min()),
        "max": float(values.max()),
        "p1": low,
        "p99": high,
    }


def _quantile(values: Tensor, q: float) -> float:
    # torch.quantile refuses more than 2^24 values; a sort does not.
    ordered = values.sort().values
    position = q * (ordered.numel() - 1)
    below, above = ordered[math.floor(position)], ordered[math.ceil(position)]
    return float(below + (above - below) * (position - math.floor(position)))


def band_fractions(log_ratios: Tensor, clip_low: float, clip_high: float) -> tuple[float, float]:
    """Shares of sequences whose s_i lies above and below the clip range, for any advantage: (high, low).

    `log_ratios`: log s_i of all sequences of the mini-batch, [S] nats of any float dtype, global.
    """
    if log_ratios.numel() == 0:
        return 0.0, 0.0
    values = log_ratios.double()
    low_edge = log_lower_edge(clip_low)
    return float((values > math.log1p(clip_high)).double().mean()), float((values < low_edge).double().mean())

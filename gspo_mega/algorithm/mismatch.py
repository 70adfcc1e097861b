"""The gap between the two engines: the trainer's log-probs against those the rollout server sampled with.

Owns the mismatch metrics. d = trainer - rollout, nats, over active tokens; every KL is KL(rollout || trainer),
because the rollout is what was sampled from. What is done about the gap is `correction`'s, its split by length and
advantage `mismatch_report`'s. The gap to the *current* policy (staleness, the importance ratio) is not here: see
`ratio` and `objective`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gspo_mega.algorithm.ratio import active_values, exp_minus_linear, segment_sum, token_log_ratios
from gspo_mega.config.mismatch_range import Band

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
TOKEN_CAP = 2.0  # of truncated importance sampling by tokens; a metric only


def mismatch_sums(
    trainer_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    segment_ids: Tensor,
    num_sequences: int,
    token_cap: float = TOKEN_CAP,
    band: Band | None = None,
) -> tuple[Tensor, Tensor]:
    """What the metrics need of each sequence: sums [S, len(SUM_NAMES)] and maxima [S, len(MAXIMUM_NAMES)], float64.

    All token arguments are [T]; masked entries may hold anything. A rank that holds part of a sequence's tokens
    returns its part: add the sums and take the largest of the maxima over the context-parallel ranks. `token_cap`
    bounds the token ratio in `truncated_ratio`. `band`: the range of tokens that the last three sums are of; they
    are 0 without one, and with one of whole sequences. A sequence without active token has sums 0 and maxima -inf.
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

    Token means weigh tokens alike, sequence means sequences; sequences without active token count in neither. `k1`,
    `k2`, `k3` estimate the KL per token; `chi2_*` are mean(w^2) - 1, `ess_*` the effective share of the samples, for w
    the token ratio, the sequence's full product exp(sum d) (`sequence`) or its geometric mean
    (`sequence_length_normalised`). `chi2_sequence_log1p` = log(1 + chi2_sequence) stays finite where that overflows.
    Without any active token: KLs 0, ratios and ESS 1.
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
    """Mean over the response of trainer - rollout from `mismatch_sums`: [N] float64 nats; 0 for no active token."""
    return sums[:, SUM_NAMES.index("log_ratio")] / sums[:, SUM_NAMES.index("tokens")].clamp(min=1.0)

"""Rows of numbers: how large a difference of log-probs is, per token and per sequence, and what the clip range sees.

Owns the statistics and their standard errors. Tokens of one response and responses to one prompt are not independent,
so every error comes from the spread between prompts. No I/O.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Tokens:
    """Whose tokens the values are: `sequence` [T] int64 ascending from 0, `prompt` [S] int64, the group of each
    sequence.
    """

    sequence: np.ndarray
    prompt: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sequence, [S] int64."""
        return np.bincount(self.sequence, minlength=len(self.prompt))

    @property
    def positions(self) -> np.ndarray:
        """Place of each token in its sequence, from 0, [T] int64."""
        ends = np.cumsum(self.lengths)
        return np.arange(len(self.sequence)) - np.repeat(ends - self.lengths, self.lengths)


@dataclass(frozen=True)
class Band:
    """The clip range of log s, `low` < 0 < `high`, nats. `per_token`: a token's own ratio is clipped, not the
    sequence's.
    """

    low: float
    high: float
    per_token: bool = False

    @property
    def width(self) -> float:
        return self.high - self.low


@dataclass(frozen=True)
class Estimate:
    """A mean and its standard error; infinite where there is one prompt only."""

    value: float
    error: float

    def above(self, bound: float, errors: float = 2.0) -> bool:
        """Whether it is larger than `bound` by more than so many standard errors."""
        return self.value - errors * self.error > bound

    def below(self, bound: float, errors: float = 2.0) -> bool:
        """Whether it is smaller than `bound` by more than so many standard errors."""
        return self.value + errors * self.error < bound


@dataclass(frozen=True)
class AtLength:
    """log s of the first `length` tokens of the `count` sequences that have as many."""

    length: int
    count: int
    mean: Estimate
    sd: float


@dataclass(frozen=True)
class Row:
    """One difference x of log-probs. `k3`: mean(e^x - 1 - x) per token, nats. `mean`: of x per token. `maximum`:
    largest |x|. `band_share`: mean |log s| in widths of the clip range. `negative`, `positive`: the share of sequences
    (tokens, where those are clipped) below and above the range, which is where A < 0 and A > 0 are clipped.
    """

    k3: Estimate
    mean: Estimate
    at_length: tuple[AtLength, ...]
    band_share: Estimate
    negative: Estimate
    positive: Estimate
    maximum: float


def ratio_estimate(values: np.ndarray, weights: np.ndarray, groups: np.ndarray) -> Estimate:
    """sum(values) / sum(weights) with the standard error that the spread between `groups` gives, all [N].

    The linearised error of a ratio of sums over G independent groups: sqrt(G / (G - 1) sum_g r_g^2) / sum(weights)
    with r_g = sum over the group of values - ratio x weights.
    """
    total = float(weights.sum())
    if total == 0:
        return Estimate(0.0, math.inf)
    ratio = float(values.sum()) / total
    _, place = np.unique(groups, return_inverse=True)
    residuals = np.bincount(place, values - ratio * weights)
    count = len(residuals)
    error = math.sqrt(count / (count - 1) * float(residuals @ residuals)) / total if count > 1 else math.inf
    return Estimate(ratio, error)


def share_estimate(flags: np.ndarray, groups: np.ndarray) -> Estimate:
    """The share of true `flags` [N] bool. None or all of G groups say no more than that the share is within 3 / G of
    that, which two standard errors then are.
    """
    estimate = ratio_estimate(flags.astype(float), np.ones(len(flags)), groups)
    if len(flags) and estimate.value in (0.0, 1.0):
        return Estimate(estimate.value, 1.5 / len(np.unique(groups)))
    return estimate


def three_lengths(lengths: np.ndarray) -> tuple[int, ...]:
    """A ninth, a third and the whole of the length that half of the sequences reach, each at least 1, once each."""
    longest = int(np.sort(lengths)[len(lengths) // 2])
    return tuple(sorted({max(1, longest // 9), max(1, longest // 3), max(1, longest)}))


def prefix_means(values: np.ndarray, tokens: Tokens, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Means over the first `length` tokens of the sequences that have as many, [n] float64, and their indices, [n]."""
    chosen = np.flatnonzero(tokens.lengths >= length)
    kept = tokens.positions < length
    sums = np.bincount(tokens.sequence[kept], values[kept], minlength=len(tokens.prompt))
    return sums[chosen] / length, chosen


def sequence_means(values: np.ndarray, tokens: Tokens) -> np.ndarray:
    """log s: the mean of `values` [T] over each sequence, [S] float64; 0 without tokens."""
    return np.bincount(tokens.sequence, values, minlength=len(tokens.prompt)) / np.maximum(tokens.lengths, 1)


def make_row(values: np.ndarray, tokens: Tokens, band: Band, lengths: Sequence[int]) -> Row:
    """The numbers of one difference `values` [T] float64, nats. `lengths`: those at which log s is described."""
    by_token = tokens.prompt[tokens.sequence]
    ones = np.ones(len(values))
    log_s = sequence_means(values, tokens)
    units, groups = (values, by_token) if band.per_token else (log_s, tokens.prompt)
    each = np.ones(len(units))
    described = []
    for length in lengths:
        means, chosen = prefix_means(values, tokens, length)
        described.append(
            AtLength(
                length,
                len(means),
                ratio_estimate(means, np.ones(len(means)), tokens.prompt[chosen]),
                float(means.std()) if len(means) else 0.0,
            )
        )
    return Row(
        k3=ratio_estimate(np.expm1(values) - values, ones, by_token),
        mean=ratio_estimate(values, ones, by_token),
        at_length=tuple(described),
        band_share=ratio_estimate(np.abs(units) / band.width, each, groups),
        negative=share_estimate(units < band.low, groups),
        positive=share_estimate(units > band.high, groups),
        maximum=float(np.abs(values).max(initial=0.0)),
    )


def explained_share(part: np.ndarray, whole: np.ndarray) -> float:
    """How much of the squared size of `whole` lies along `part`: sum(part whole) / sum(whole^2), both [T]. Shares of
    parts that add up to the whole add up to 1; one is negative where a part takes away from the others.
    """
    size = float(whole @ whole)
    return float(part @ whole) / size if size > 0 else 0.0

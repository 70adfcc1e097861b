"""Statistics of a difference of log-probs: its size per token and per sequence, and what the clip range sees of it.

Tokens of one response, and responses to one prompt, are not independent, so every standard error comes from the spread
between prompts. No I/O.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gspo_mega.config.derived import Band

_RESAMPLES = 2000


@dataclass(frozen=True)
class TokenPlaces:
    """Whose tokens the values are: `sequence` [T] int64 ascending from 0, `prompt` [S] int64, the group of each
    sequence, and `signs` [S] int64, the sign of each sequence's advantage, 0 where that is 0 or not known.
    """

    sequence: np.ndarray
    prompt: np.ndarray
    signs: np.ndarray

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
class PromptEstimate:
    """A mean and its standard error; infinite where there is one prompt only."""

    value: float
    error: float

    @property
    def low(self) -> float:
        """Two standard errors below."""
        return self.value - 2 * self.error

    @property
    def high(self) -> float:
        """Two standard errors above."""
        return self.value + 2 * self.error

    def above(self, bound: float) -> bool:
        """Whether it is larger than `bound` by more than two standard errors."""
        return self.low > bound

    def below(self, bound: float) -> bool:
        """Whether it is smaller than `bound` by more than two standard errors."""
        return self.high < bound


@dataclass(frozen=True)
class CountedShare(PromptEstimate):
    """A share of units, as of `trials` independent ones. `low` and `high` are Wilson's interval at two standard errors,
    which is not symmetric; `error` is half the way to its farther end.

    Source: E. B. Wilson, Probable inference, the law of succession, and statistical inference, JASA 22 (1927).
    """

    trials: float

    @classmethod
    def of(cls, value: float, trials: float) -> CountedShare:
        return cls(value, max(_wilson(value, trials, +1) - value, value - _wilson(value, trials, -1)) / 2, trials)

    @property
    def low(self) -> float:
        return _wilson(self.value, self.trials, -1)

    @property
    def high(self) -> float:
        return _wilson(self.value, self.trials, +1)


def _wilson(value: float, trials: float, sign: int) -> float:
    """The share b with value - b = -sign 2 sqrt(b (1 - b) / trials)."""
    square = 4.0
    centre = value + square / (2 * trials)
    half = math.sqrt(square * value * (1 - value) / trials + (square / (2 * trials)) ** 2)
    return min(1.0, max(0.0, (centre + sign * half) / (1 + square / trials)))


@dataclass(frozen=True)
class AtLength:
    """log s of the first `length` tokens of the `count` sequences that have as many."""

    length: int
    count: int
    mean: PromptEstimate
    sd: float


@dataclass(frozen=True)
class AttributionRow:
    """One difference x of log-probs. `k3`: mean(e^x - 1 - x) per token, nats. `mean`: of x per token. `maximum`:
    largest |x|. What follows is of the clip range as the recipe means it (`config/derived.py`), and None where
    nothing is clipped. `band_share`: the mean size in widths of the range. `below`, `above`: the share of all sequences
    (tokens, where those are clipped) below and above it. `clipped_negative`, `clipped_positive`: of those with A < 0
    and A > 0 the share that is clipped; None where there is none of that sign.
    """

    k3: PromptEstimate
    mean: PromptEstimate
    at_length: tuple[AtLength, ...]
    band_share: PromptEstimate | None
    below: PromptEstimate | None
    above: PromptEstimate | None
    clipped_negative: PromptEstimate | None
    clipped_positive: PromptEstimate | None
    maximum: float

    @property
    def negative(self) -> PromptEstimate | None:
        """What is known of A < 0: their own share, or without any that of all, as if A had no part in it."""
        return self.below if self.clipped_negative is None else self.clipped_negative

    @property
    def positive(self) -> PromptEstimate | None:
        """What is known of A > 0, as `negative`."""
        return self.above if self.clipped_positive is None else self.clipped_positive


def ratio_estimate(values: np.ndarray, weights: np.ndarray, groups: np.ndarray) -> PromptEstimate:
    """sum(values) / sum(weights) with the standard error that the spread between `groups` gives, all [N].

    The linearised error of a ratio of sums over G independent groups: sqrt(G / (G - 1) sum_g r_g^2) / sum(weights)
    with r_g = sum over the group of values - ratio x weights.
    """
    total = float(weights.sum())
    if total == 0:
        return PromptEstimate(0.0, math.inf)
    ratio = float(values.sum()) / total
    _, place = np.unique(groups, return_inverse=True)
    residuals = np.bincount(place, values - ratio * weights)
    count = len(residuals)
    error = math.sqrt(count / (count - 1) * float(residuals @ residuals)) / total if count > 1 else math.inf
    return PromptEstimate(ratio, error)


def share_estimate(flags: np.ndarray, groups: np.ndarray) -> PromptEstimate:
    """The share of true `flags` [N] bool, as of as many independent trials as there are groups.

    Units of one group may be all alike, and few flags do not say whether they are: the variance of the share is then
    p (1 - p) sum n_g^2 / (sum n_g)^2 with n_g units of group g, that of (sum n_g)^2 / sum n_g^2 independent trials. So
    an interval is never too narrow for being seen in few groups, and one more true flag never says less.
    """
    if not len(flags):
        return PromptEstimate(0.0, math.inf)
    sizes = np.unique(groups, return_counts=True)[1].astype(float)
    return CountedShare.of(float(flags.mean()), float(sizes.sum() ** 2 / (sizes @ sizes)))


def three_lengths(lengths: np.ndarray) -> tuple[int, ...]:
    """A ninth, a third and the whole of the length that half of the sequences reach, each at least 1, once each."""
    longest = int(np.sort(lengths)[len(lengths) // 2])
    return tuple(sorted({max(1, longest // 9), max(1, longest // 3), max(1, longest)}))


def prefix_means(values: np.ndarray, tokens: TokenPlaces, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Means over the first `length` tokens of the sequences that have as many, [n] float64, and their indices, [n]."""
    chosen = np.flatnonzero(tokens.lengths >= length)
    kept = tokens.positions < length
    sums = np.bincount(tokens.sequence[kept], values[kept], minlength=len(tokens.prompt))
    return sums[chosen] / length, chosen


def sequence_means(values: np.ndarray, tokens: TokenPlaces) -> np.ndarray:
    """log s: the mean of `values` [T] over each sequence, [S] float64; 0 without tokens."""
    return np.bincount(tokens.sequence, values, minlength=len(tokens.prompt)) / np.maximum(tokens.lengths, 1)


def make_row(
    values: np.ndarray,
    tokens: TokenPlaces,
    band: Band | None,
    lengths: Sequence[int],
    moved: np.ndarray | None = None,
) -> AttributionRow:
    """The numbers of one difference `values` [T] float64, nats. `lengths`: those at which log s is described. `moved`
    [T]: the difference of the tokens' probabilities, for a range of these.
    """
    by_token = tokens.prompt[tokens.sequence]
    ones = np.ones(len(values))
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
    return AttributionRow(
        k3=ratio_estimate(np.expm1(values) - values, ones, by_token),
        mean=ratio_estimate(values, ones, by_token),
        at_length=tuple(described),
        maximum=float(np.abs(values).max(initial=0.0)),
        **_against_range(values if moved is None else moved, values, tokens, band),
    )


def _against_range(
    x: np.ndarray, values: np.ndarray, tokens: TokenPlaces, band: Band | None
) -> dict[str, PromptEstimate | None]:
    """The fields of `AttributionRow` that are of the range. `x`: what is compared with a range of probabilities."""
    if band is None:
        return dict.fromkeys(("band_share", "below", "above", "clipped_negative", "clipped_positive"))
    if band.per_token:
        units, groups = (x if band.of_probability else values), tokens.prompt[tokens.sequence]
        signs = tokens.signs[tokens.sequence]
    else:
        units, groups, signs = sequence_means(values, tokens), tokens.prompt, tokens.signs
    return {
        "band_share": ratio_estimate(band.widths(units), np.ones(len(units)), groups),
        "below": share_estimate(units < band.low, groups),
        "above": share_estimate(units > band.high, groups),
        "clipped_negative": _share_where(signs < 0, band.is_clipped(units, negative=True), groups),
        "clipped_positive": _share_where(signs > 0, band.is_clipped(units, negative=False), groups),
    }


def _share_where(chosen: np.ndarray, flags: np.ndarray, groups: np.ndarray) -> PromptEstimate | None:
    """`share_estimate` of the `chosen` [N] bool; None without any."""
    return share_estimate(flags[chosen], groups[chosen]) if chosen.any() else None


def explained_share(part: np.ndarray, whole: np.ndarray, groups: np.ndarray) -> PromptEstimate:
    """How much of the squared size of `whole` lies along `part`: sum(part whole) / sum(whole^2), all [T]. Shares of
    parts that add up to the whole add up to 1; one is negative where a part takes away from the others.

    The standard error is that of a bootstrap over `groups`: squares have long tails, and where one group has most of
    them a linearised error would be far too small.
    """
    size = float(whole @ whole)
    if size == 0:
        return PromptEstimate(0.0, math.inf)
    value = float(part @ whole) / size
    _, place = np.unique(groups, return_inverse=True)
    along, squares = np.bincount(place, part * whole), np.bincount(place, whole * whole)
    count = len(squares)
    if count == 1:
        return PromptEstimate(value, math.inf)
    drawn = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), size=_RESAMPLES)
    sizes = drawn @ squares
    shares = (drawn @ along)[sizes > 0] / sizes[sizes > 0]
    # A resample of G groups spreads by (G - 1) / G less than G groups do.
    return PromptEstimate(value, float(shares.std()) * math.sqrt(count / (count - 1)))

"""Statistics of a difference of log-probs: its size per token and per sequence, and its effect at the clip range.

Tokens of one response, and responses to one prompt, are not independent, so every standard error comes from the spread
between prompts. No I/O.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gspo_mega.config.clip_range import Band

_RESAMPLES = 2000


@dataclass(frozen=True)
class TokenPlaces:
    """The sequence and prompt of each token: `sequence` [T] int64 ascending from 0, `prompt` [S] int64, the group of
    each sequence, and `signs` [S] int64, the sign of each sequence's advantage, 0 if that is 0 or not known.
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
    """A mean and its standard error, which is infinite if there is only one prompt."""

    value: float
    error: float

    @property
    def low(self) -> float:
        """The value less two standard errors."""
        return self.value - 2 * self.error

    @property
    def high(self) -> float:
        """The value plus two standard errors."""
        return self.value + 2 * self.error

    def above(self, bound: float) -> bool:
        """Return whether the mean is above `bound` by more than two standard errors."""
        return self.low > bound

    def below(self, bound: float) -> bool:
        """Return whether the mean is below `bound` by more than two standard errors."""
        return self.high < bound


@dataclass(frozen=True)
class CountedShare(PromptEstimate):
    """A share of units, counted as `trials` independent ones. `low` and `high` are Wilson's interval at two standard
    errors, which is not symmetric; `error` is half the distance to its farther end.

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
    """Return the share b with value - b = -sign 2 sqrt(b (1 - b) / trials)."""
    square = 4.0
    centre = value + square / (2 * trials)
    half = math.sqrt(square * value * (1 - value) / trials + (square / (2 * trials)) ** 2)
    return min(1.0, max(0.0, (centre + sign * half) / (1 + square / trials)))


@dataclass(frozen=True)
class AtLength:
    """log s over the first `length` tokens of the `count` sequences that have at least so many."""

    length: int
    count: int
    mean: PromptEstimate
    sd: float


@dataclass(frozen=True)
class AttributionRow:
    """Statistics of one difference x of log-probs. `k3`: mean(e^x - 1 - x) per token, nats. `mean`: of x per token.
    `maximum`: largest |x|. The other fields refer to the clip range as the recipe defines it (`config/clip_range.py`),
    and are None if nothing is clipped. `band_share`: the mean size in widths of the range. `below`, `above`: the share
    of all sequences (of tokens, if the recipe clips these) below and above the range. `clipped_negative`,
    `clipped_positive`: the share that is clipped among those with A < 0 and A > 0; None if there are none.
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
        """The clipped share of A < 0; if there are none, the share of all that is below, as if A played no part."""
        return self.below if self.clipped_negative is None else self.clipped_negative

    @property
    def positive(self) -> PromptEstimate | None:
        """The clipped share of A > 0; if there are none, the share of all that is above, as if A played no part."""
        return self.above if self.clipped_positive is None else self.clipped_positive


def ratio_estimate(values: np.ndarray, weights: np.ndarray, groups: np.ndarray) -> PromptEstimate:
    """Return sum(values) / sum(weights) with the standard error from the spread between `groups`, all [N].

    It is the linearised error of a ratio of sums over G independent groups: sqrt(G / (G - 1) sum_g r_g^2) /
    sum(weights), where r_g is the sum over the group of values - ratio x weights.
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
    """Return the share of true `flags` [N] bool, with each group counted as about one independent trial.

    Units of one group may be all alike, and a few flags do not show whether they are. The variance of the share is then
    p (1 - p) sum n_g^2 / (sum n_g)^2 with n_g units in group g, as for (sum n_g)^2 / sum n_g^2 independent trials. So
    few groups never make an interval too narrow, and one more true flag never says less.
    """
    if not len(flags):
        return PromptEstimate(0.0, math.inf)
    sizes = np.unique(groups, return_counts=True)[1].astype(float)
    return CountedShare.of(float(flags.mean()), float(sizes.sum() ** 2 / (sizes @ sizes)))


def three_lengths(lengths: np.ndarray) -> tuple[int, ...]:
    """Return a ninth, a third and all of the length that half of the sequences reach, at least 1, without repeats."""
    longest = int(np.sort(lengths)[len(lengths) // 2])
    return tuple(sorted({max(1, longest // 9), max(1, longest // 3), max(1, longest)}))


def prefix_means(values: np.ndarray, tokens: TokenPlaces, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the means over the first `length` tokens, [n] float64, and the indices, [n], of the sequences that have at
    least so many.
    """
    chosen = np.flatnonzero(tokens.lengths >= length)
    kept = tokens.positions < length
    sums = np.bincount(tokens.sequence[kept], values[kept], minlength=len(tokens.prompt))
    return sums[chosen] / length, chosen


def sequence_means(values: np.ndarray, tokens: TokenPlaces) -> np.ndarray:
    """Return log s, the mean of `values` [T] over each sequence, [S] float64; 0 without tokens."""
    return np.bincount(tokens.sequence, values, minlength=len(tokens.prompt)) / np.maximum(tokens.lengths, 1)


def make_row(
    values: np.ndarray,
    tokens: TokenPlaces,
    band: Band | None,
    lengths: Sequence[int],
    moved: np.ndarray | None = None,
) -> AttributionRow:
    """Return the statistics of one difference `values` [T] float64, nats. `lengths`: where log s is described. `moved`
    [T]: the difference of the tokens' probabilities, for a clip range of probabilities.
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
    """Return the fields of `AttributionRow` that refer to the range. `x`: compared with a range of probabilities."""
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
    """Return `share_estimate` over the `chosen` [N] bool; None if none are chosen."""
    return share_estimate(flags[chosen], groups[chosen]) if chosen.any() else None


def explained_share(part: np.ndarray, whole: np.ndarray, groups: np.ndarray) -> PromptEstimate:
    """Return how much of the squared size of `whole` lies along `part`: sum(part whole) / sum(whole^2), all [T]. The
    shares of parts that add up to the whole add up to 1; a share is negative if its part cancels some of the others.

    The standard error comes from a bootstrap over `groups`: squares have long tails, and if one group has most of the
    sum, a linearised error would be far too small.
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
    # The variance of a resample of G groups is (G - 1) / G of that of G groups.
    return PromptEstimate(value, float(shares.std()) * math.sqrt(count / (count - 1)))

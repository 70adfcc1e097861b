"""Has a noisy curve fallen? A test that may be asked after every step of a long run.

Asked 2000 times of a run in which nothing happened, it says so wrongly in at most 1 % of runs: rewards of 64 or 512
responses, rare ones too, noise of which half stays until the next step, a rise before a plateau, groups of
different difficulty (`tests/soak/false_alarms.py` measures it). It finds a fall from .5 to .3 of 64 responses within 50
steps in 95 % of runs that were level for 50 steps before, or for 10 after a rise of 100 steps from .05.

How: of every window of steps a bound is computed that its true mean is certainly above (`lower`) and one that it is
certainly below (`upper`). The curve has fallen where an earlier window's lower bound is above the last window's upper
one. Comparing bounds instead of means is what makes the best of many earlier windows safe to compare with: a window
that is high by chance has a low lower bound.

The noise of a window's mean comes from the curve itself:

- a step's variance is half the mean square of the differences of neighbours: over the window, over the last 64 steps
  and over all steps so far, whichever is largest, so that a noise that grows, or that rests for a while, is seen;
- it is multiplied by what correlation of neighbouring steps adds to the variance of long means. For x_t = rho x_(t-1)
  + noise that is (1 + rho) / (1 - rho)^2, which the cube of D4 / D1 follows within 12 % up to rho = .6, D_k being the
  mean square of differences over k steps. Slower waves are measured by how far the mean of a block is from the line
  between its neighbours': a steady rise is none;
- it is never less than the standard errors that a caller knows, such as that of a step's reward.

What is known of the last window's noise is what had been known before it, or more if it has more itself.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

WIDTHS = (8, 16, 32, 64, 128, 256)
# Where each value's standard error is known, the level of a run's first steps may be known from so few of them.
SHORT_WIDTHS = (1, 2, 4)
# Standard errors between a mean and each of its bounds: measured, not derived. A narrow window's noise is less well
# known, and there are more of them.
BOUND, NARROW_BOUND = 3.85, 4.75
_NEAR_STEPS = 64
_BLOCKS = (8, 16)
# The most that correlation is taken to add, and how much of it is assumed of few steps.
_LARGEST_FACTOR = 8.0
_ASSUMED = 1.4


class Falls(NamedTuple):
    """For each place of a series, what had been seen of it until then; all [..., n].

    `fallen`: bool. `before_end`, `before_width`: the window with the highest lower bound before the last one, by its
    last place and its width; `last_width`: of the last window, which ends at the place itself. Widths are 0 where
    `fallen` is False.
    """

    fallen: np.ndarray
    before_end: np.ndarray
    before_width: np.ndarray
    last_width: np.ndarray


class _Noise(NamedTuple):
    """`squares`: cumulative sums of half the squared differences, [..., n + 1]. `around`: the larger of their means
    over the last steps and over all so far, [..., n]. `factor`: what correlation adds to the variance of a long mean,
    as that follows from these differences; `short_factor`: as it follows from the variance of a single value.
    """

    squares: np.ndarray
    around: np.ndarray
    factor: np.ndarray
    short_factor: np.ndarray


def find_falls(values: np.ndarray, errors: np.ndarray | None = None) -> Falls:
    """Judge each place of `values` [..., n] float by itself and those before it. `errors`: standard errors of the
    values, of the same shape; None where they are not known.
    """
    count = values.shape[-1]
    sums, noise = _sums(values), _noise_of(values)
    of_errors = None if errors is None else _sums(errors**2)
    highest = _highest_level(sums, noise, of_errors)
    fallen = np.zeros(values.shape, bool)
    before_end, before_width, last_width = (np.zeros(values.shape, int) for _ in range(3))
    clearest = np.zeros(values.shape)
    for width in WIDTHS:
        if width >= count:
            break
        here = slice(width, None)
        before = _Level(*(part[..., : count - width] for part in highest))
        mean = _trailing(sums, width)[..., here] / width
        lost = before.mean - mean
        # What was known of the noise before this window, or its own: a fall just before it is no noise.
        around, factor = noise.around[..., : count - width], noise.factor[..., : count - width]
        variance = np.maximum(_trailing(noise.squares, width - 1)[..., here] / (width - 1), around) * factor
        if of_errors is not None:
            known = _trailing(of_errors, width)[..., here] / width
            variance = np.maximum(variance, known * np.minimum(width, noise.short_factor[..., : count - width]))
        reach = _bound(width) * np.sqrt(variance)
        # A level that was seen with too little noise, such as a reward of exactly 1, may have had that of this window.
        lower = np.minimum(before.lower, before.mean - reach / np.sqrt(np.maximum(before.width, 1)))
        gap = lower - (mean + reach / math.sqrt(width))
        is_collapse = (gap > 0) & (lost > np.abs(before.mean) / 3) & (lost > before.learnt / 3)
        fallen[..., here] |= is_collapse
        better = is_collapse & (gap > clearest[..., here])
        for array, value in (
            (clearest, gap),
            (before_end, before.end),
            (before_width, before.width),
            (last_width, width),
        ):
            array[..., here] = np.where(better, value, array[..., here])
    return Falls(fallen, before_end, before_width, last_width)


class _Level(NamedTuple):
    """The window with the highest lower bound among those that end at a place or before it; all [..., n].

    `end`, `width`: which window, `lower` its bound, `mean` its mean; `learnt`: how far that is above the mean of the
    first tenth of the steps until then.
    """

    lower: np.ndarray
    end: np.ndarray
    width: np.ndarray
    mean: np.ndarray
    learnt: np.ndarray


def _highest_level(sums: np.ndarray, noise: _Noise, of_errors: np.ndarray | None) -> _Level:
    count = sums.shape[-1] - 1
    lower = np.full(noise.around.shape, -np.inf)
    widths = np.ones(noise.around.shape, int)
    for width in (*(SHORT_WIDTHS if of_errors is not None else ()), *WIDTHS):
        if width > count:
            break
        variance = noise.around
        if width > 1:
            variance = np.maximum(variance, _trailing(noise.squares, width - 1) / (width - 1))
        variance = variance * noise.factor
        if of_errors is not None:
            known = _trailing(of_errors, width) / width
            variance = np.maximum(variance, known * np.minimum(width, noise.short_factor))
        bound = _trailing(sums, width) / width - _bound(width) * np.sqrt(variance / width)
        bound[..., : width - 1] = -np.inf
        if width < WIDTHS[0]:
            bound[..., WIDTHS[0] :] = -np.inf  # later a whole window tells more
        widths = np.where(bound > lower, width, widths)
        lower = np.maximum(bound, lower)
    highest = np.maximum.accumulate(lower, axis=-1)
    end = np.maximum.accumulate(np.where(lower >= highest, np.arange(count), 0), axis=-1)

    def at_end(array: np.ndarray) -> np.ndarray:
        return np.take_along_axis(array, end, axis=-1)

    width = at_end(widths)
    mean = (
        np.take_along_axis(sums, end + 1, -1) - np.take_along_axis(sums, np.maximum(end + 1 - width, 0), -1)
    ) / width
    learnt = mean - at_end(_mean_of_start(sums))
    return _Level(highest, end, width, mean, learnt)


def _bound(width: int) -> float:
    return NARROW_BOUND if width == WIDTHS[0] else BOUND


def noise_until(values: np.ndarray) -> np.ndarray:
    """The variance of a mean of n neighbouring values, times n, as far as each place and those before it tell: [..., n]
    of `values` [..., n].
    """
    noise = _noise_of(values)
    return noise.around * noise.factor


def _sums(values: np.ndarray) -> np.ndarray:
    """Cumulative sums, [..., n + 1] from 0."""
    return np.concatenate([np.zeros_like(values[..., :1]), np.cumsum(values, axis=-1)], axis=-1)


def _trailing(sums: np.ndarray, width: int) -> np.ndarray:
    """Sums of the last `width` values at each place, of fewer at the beginning: [..., n] of [..., n + 1]."""
    places = np.arange(1, sums.shape[-1])
    return sums[..., places] - sums[..., np.maximum(places - width, 0)]


def _mean_of_start(sums: np.ndarray) -> np.ndarray:
    """The mean of the first tenth of what had been seen at each place, at least 3 values: [..., n]."""
    count = np.arange(1, sums.shape[-1])
    width = np.minimum(count, np.maximum(3, count // 10))
    return sums[..., width] / width


def _noise_of(values: np.ndarray) -> _Noise:
    count = values.shape[-1]
    number = np.arange(1, count + 1)
    squares = _sums(_half_squares(values, 1))
    of_four = _sums(_half_squares(values, 4))[..., 1:] / np.maximum(number - 4, 1)
    whole = squares[..., 1:] / np.maximum(number - 1, 1)
    near = _trailing(squares, _NEAR_STEPS) / np.clip(number - 1, 1, _NEAR_STEPS)
    divisor = np.where(whole > 0, whole, 1.0)
    ratio = np.maximum(of_four / divisor, 1.0) + _ASSUMED / np.sqrt(number)
    factor = ratio**3
    sums = _sums(values)
    for block in _BLOCKS:
        if count > 3 * block:
            means = _trailing(sums, block) / block
            waves = np.zeros_like(means)
            off = means[..., 2 * block :] - 2 * means[..., block:-block] + means[..., : -2 * block]
            waves[..., 3 * block - 1 :] = off[..., block - 1 :] ** 2 / 6 * block
            waves = _sums(waves)[..., 1:] / np.maximum(number - 3 * block + 1, 1)
            factor = np.maximum(factor, waves / divisor)
    return _Noise(squares, np.maximum(near, whole), np.minimum(factor, _LARGEST_FACTOR), np.minimum(ratio, 2.0) ** 2)


def _half_squares(values: np.ndarray, lag: int) -> np.ndarray:
    """Half the squared difference of each value from the one `lag` places before it, 0 without one."""
    halves = np.zeros_like(values, dtype=float)
    halves[..., lag:] = (values[..., lag:] - values[..., :-lag]) ** 2 / 2
    return halves

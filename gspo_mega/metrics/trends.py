"""Whether a curve learns, is flat, falls or collapsed, and since when. Pure functions of series; docs/report.md says
how a run is judged.

`trend_of` and `setbacks_of` judge a whole curve. `find_falls` says for each place whether the curve had fallen by then,
and may be asked after every step of a long run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

# The widths of the windows that `find_falls` compares, in steps.
WIDTHS = (8, 16, 32, 64, 128, 256)
# If the standard error of each value is known, windows of these widths may tell the level of a run's first steps.
SHORT_WIDTHS = (1, 2, 4)
# Standard errors between a mean and each of its bounds. They were measured, not derived. For the narrowest windows
# there are more, because their noise is known less well and there are more of them.
BOUND, NARROW_BOUND = 3.85, 4.75
_NEAR_STEPS = 64
_BLOCKS = (8, 16)
# The largest factor that correlation is assumed to add to a variance, and how much of it is assumed with few steps.
_LARGEST_FACTOR = 8.0
_ASSUMED = 1.4

FEWEST_STEPS = 8
# With fewer steps than this, a difference of more than half of what counts is left undecided.
FEW_STEPS = 16
# A difference between the start and the end counts from this many standard errors on. Measured: at most 1% of the runs
# in which nothing happened are said to learn, and at most 1% to fall.
LEAST_ERRORS = 2.4


class Trend(NamedTuple):
    """How a curve went.

    `start`, `end`: means over the steps from the first to the second of `start_steps` and `end_steps`. `peak`: the
    highest mean, at `peak_step`. `since`: the step at which the `kind` began; None if it is of the whole run.
    `level_since`: the step since which the curve has not risen by more than its noise; None if that is in the last
    third of the run. Of a `short` curve with fewer than `FEWEST_STEPS` values the means are NaN.
    """

    kind: Literal["learns", "flat", "falls", "collapsed", "short"]
    start: float
    end: float
    peak: float
    peak_step: int
    since: int | None = None
    start_steps: tuple[int, int] = (-1, -1)
    end_steps: tuple[int, int] = (-1, -1)
    level_since: int | None = None


class Setback(NamedTuple):
    """A fall from which the curve recovered. `before`: the mean over `before_steps`. `began`: the first step of the
    fall. `lowest`: the lowest value, at `step`. `back`: the first step after it with nine tenths of `before` again.
    """

    step: int
    before: float
    lowest: float
    back: int
    began: int
    before_steps: tuple[int, int]


def rolling(values: Sequence[float], width: int) -> list[float]:
    """The mean of the window of `width` values that ends at each place; the windows at the beginning are shorter."""
    shorter = [math.fsum(values[:end]) / end for end in range(1, min(width, len(values) + 1))]
    if len(values) < width:
        return shorter
    # Use NumPy, because a long run has thousands of windows of thousands of steps. Equal windows have equal means.
    whole = np.lib.stride_tricks.sliding_window_view(np.asarray(values, dtype=float), width).mean(axis=-1)
    return [*shorter, *whole.tolist()]


def trend_of(
    steps: Sequence[int], series: Sequence[float | None], errors: Sequence[float | None] | None = None
) -> Trend:
    """The trend of a curve, from means over a tenth of the run (at least 3 steps). Differences count above
    `LEAST_ERRORS` standard errors, and `find_falls` decides whether the curve collapsed. Values that are missing or not
    finite are left out. `errors`: the standard error of each value, if it is known.
    """
    at, values, known = _present(steps, series, errors)
    if len(values) < FEWEST_STEPS:
        return Trend("short", math.nan, math.nan, math.nan, -1)
    array = np.asarray(values)
    if (collapse := _collapse(at, array, known)) is not None:
        return collapse
    width = max(3, len(values) // 10)
    means = rolling(values, width)
    error = LEAST_ERRORS * math.sqrt(sum(_variances_of_ends(array, known, 3 * width)) / width)
    start, end = means[width - 1], means[-1]
    first, last = (at[0], at[width - 1]), (at[-width], at[-1])
    top = max(range(width - 1, len(means)), key=means.__getitem__)
    peak = means[top]
    if end - start > error:
        level = _level_since(at, means, width, error)
        since = next(at[place] for place in range(width, len(means)) if means[place] - start > error)
        return Trend("learns", start, end, peak, at[top], since, first, last, level)
    unclear = len(values) < FEW_STEPS and abs(end - start) > error / 2
    kind = "falls" if start - end > error else "short" if unclear else "flat"
    return Trend(kind, start, end, peak, at[top], None, first, last)


def _present(
    steps: Sequence[int], series: Sequence[float | None], errors: Sequence[float | None] | None
) -> tuple[list[int], list[float], np.ndarray | None]:
    """The steps that have a finite value, these values, and their standard errors: [n], or None if none is known."""
    chosen = [place for place, value in enumerate(series) if value is not None and math.isfinite(value)]
    values = [float(series[place] or 0.0) for place in chosen]
    given = [None if errors is None else errors[place] for place in chosen]
    found = [error for error in given if error is not None and math.isfinite(error)]
    if not found:
        return [steps[place] for place in chosen], values, _errors_of_counts(np.asarray(values))
    usual = math.sqrt(math.fsum(error**2 for error in found) / len(found))
    known = np.array([usual if error is None or not math.isfinite(error) else error for error in given])
    return [steps[place] for place in chosen], values, known


def _errors_of_counts(values: np.ndarray) -> np.ndarray | None:
    """Standard errors of values that look like counts of one unit, such as the share of few successes: sqrt(k) for k
    units, [n] for [n]. None if the values differ too much from each other to be counts, or too little from step to step
    to be counts of events that happen by chance.
    """
    distinct = np.unique(np.append(values, 0.0))
    if len(distinct) < 2 or 2 * len(distinct) > len(values) + 2:
        return None
    squares = np.diff(distinct).min() * np.abs(values)
    changes = (np.diff(values) ** 2).mean() / 2 if len(values) > 1 else 0.0
    return np.sqrt(squares) if squares.mean() <= 4 * changes else None


def _variances_of_ends(values: np.ndarray, errors: np.ndarray | None, width: int) -> list[float]:
    """The variance of a mean of n values, times n, among the first and among the last `width` values, at least 16.

    It is that of the values around their own straight line: a steady rise within these steps is what is looked for, and
    is not noise. What the line takes away from the noise of few values is added again (count - 3 was measured).
    """
    found = []
    for part in (slice(None, max(width, 16)), slice(-max(width, 16), None)):
        known = 0.0 if errors is None else float((errors[part] ** 2).mean())
        count = len(values[part])
        around = float(noise_until(_without_slope(values[part]))[-1]) * count / (count - 3)
        found.append(max(around, known))
    return found


def _without_slope(values: np.ndarray) -> np.ndarray:
    """The values [n] minus the slope of their least-squares line."""
    places = np.arange(len(values)) - (len(values) - 1) / 2
    return values - places * (places @ values) / (places @ places)


def _collapse(at: Sequence[int], values: np.ndarray, errors: np.ndarray | None) -> Trend | None:
    """The last collapse that was found at any step. None if there is none, or if the curve has recovered by its end."""
    found = find_falls(values, errors)
    if not found.fallen.any():
        return None
    seen = int(np.flatnonzero(found.fallen)[-1])
    end_before = int(found.before_end[seen])
    begin_before = end_before + 1 - int(found.before_width[seen])
    peak = _mean(values[begin_before : end_before + 1])
    low = _mean(values[seen + 1 - int(found.last_width[seen]) : seen + 1])
    # The fall begins after the step up to which the values were, in sum, furthest above the level that is a quarter of
    # the way down.
    above = np.cumsum(values[begin_before:seen] - (peak - (peak - low) / 4))
    since = begin_before + int(above.argmax()) + 1
    size = min(since, max(3, len(values) // 10))
    width = min(len(values) - since, max(8, len(values) // 10))
    start, end = _mean(values[:size]), _mean(values[-width:])
    if not _is_collapse(peak, end, start):
        return None
    top = min(end_before, since - 1)
    return Trend("collapsed", start, end, peak, at[top], at[since], (at[0], at[size - 1]), (at[-width], at[-1]))


def _is_collapse(peak: float, end: float, start: float) -> bool:
    """Whether `end` has lost a third of `peak`, and a third of what had been learnt since `start`."""
    return peak - end > abs(peak) / 3 and peak - end > (peak - start) / 3


def _mean(values: np.ndarray) -> float:
    return math.fsum(values) / len(values)


def _level_since(at: Sequence[int], means: Sequence[float], width: int, error: float) -> int | None:
    """The last step of the first mean over `width` steps that no later mean exceeds by more than `error`. None if it is
    in the last third.
    """
    enough = max(means[width - 1 :]) - error
    first = next(place for place in range(width - 1, len(means)) if means[place] >= enough)
    return at[first] if first < len(means) * 2 // 3 else None


def setbacks_of(
    steps: Sequence[int], series: Sequence[float | None], errors: Sequence[float | None] | None = None
) -> list[Setback]:
    """The setbacks of a curve. In a setback the mean over 3 steps is a third and 5 standard errors below the mean of a
    tenth of the run (at least 6 steps) before it, and later recovers to nine tenths of that. The noise is that of the
    steps before, and at least the `errors` of the values if they are known.
    """
    at, values, known = _present(steps, series, errors)
    width, few = max(6, len(values) // 10), 3
    if len(values) < width + few:
        return []
    noise = noise_until(np.asarray(values)) * (1.0 / few + 1.0 / width)
    squares = np.zeros(len(values)) if known is None else known**2
    means = rolling(values, width)
    found: list[Setback] = []
    place = width
    while place + few <= len(values):
        before = means[place - 1]
        lost = before - math.fsum(values[place : place + few]) / few
        variance = max(float(noise[place - 1]), float(squares[place : place + few].sum()) / few**2)
        if lost > max(5.0 * math.sqrt(variance), abs(before) / 3):
            whole = [math.fsum(values[one : one + few]) / few for one in range(place, len(values) - few + 1)]
            back = next((place + one for one, mean in enumerate(whole) if mean >= 0.9 * before), None)
            if back is None:
                break
            lowest = min(range(place, back + few), key=values.__getitem__)
            enough = 0.9 * before
            good = (one for one in range(lowest, place - width, -1) if values[one] >= enough)
            began = next(good, place - 1) + 1
            again = next((one for one in range(lowest, back + few) if values[one] >= enough), back)
            window = (at[place - width], at[place - 1])
            found.append(Setback(at[lowest], before, values[lowest], at[again], at[began], window))
            place = back + few
        else:
            place += 1
    return found


class Falls(NamedTuple):
    """What is known at each place of a series from the values up to it; all fields are [..., n].

    `fallen`: bool. `before_end`, `before_width`: the last place and the width of the window with the highest lower
    bound before the last window. `last_width`: the width of the last window, which ends at the place itself. Widths are
    0 where `fallen` is False.
    """

    fallen: np.ndarray
    before_end: np.ndarray
    before_width: np.ndarray
    last_width: np.ndarray


class _Noise(NamedTuple):
    """The noise of a curve, from the differences of neighbouring values.

    `squares`: cumulative sums of half the squared differences, [..., n + 1]. `around`: the larger of their means over
    the last steps and over all steps so far, [..., n]. `factor`, `short_factor`: by how much correlation raises the
    variance of a long mean above what follows from these differences, and above what follows from the variance of a
    single value.
    """

    squares: np.ndarray
    around: np.ndarray
    factor: np.ndarray
    short_factor: np.ndarray


def find_falls(values: np.ndarray, errors: np.ndarray | None = None) -> Falls:
    """Whether a noisy curve has fallen, at each place of `values` [..., n] float from the values up to it. `errors`:
    the standard errors of the values, of the same shape, or None if they are not known.

    In runs of 2000 steps in which nothing happened, it says so wrongly in at most 1% of the runs: with rewards of 64 or
    512 responses, with rare ones, with noise of which half stays until the next step, with a rise before a plateau, and
    with groups of different difficulty (`tests/soak/false_alarms.py` measures it). It finds a fall from .5 to .3 of 64
    responses within 50 steps in 95% of runs that were level for 50 steps before, or for 10 after a rise of 100 steps
    from .05.

    For every window of steps it computes a bound that the true mean is certainly above (`lower`) and one that it is
    certainly below (`upper`). The curve has fallen if the lower bound of an earlier window is above the upper bound of
    the last one. Comparing bounds instead of means makes it safe to compare with the best of many earlier windows: a
    window that is high by chance has a low lower bound.

    The noise of a window's mean comes from the curve itself:

    - The variance of a step is half the mean square of the differences of neighbours, over the window, over the last 64
      steps or over all steps so far, whichever is largest. So noise that grows, or rests for a while, is seen.
    - It is multiplied by what correlation of neighbouring steps adds to the variance of long means. For
      x_t = rho x_(t-1) + noise that is (1 + rho) / (1 - rho)^2, which the cube of D4 / D1 follows within 12% up to
      rho = .6, where D_k is the mean square of differences over k steps. Slower waves are measured by how far the mean
      of a block is from the line between its neighbours, so a steady rise does not count as a wave.
    - It is at least the standard errors that a caller knows, such as that of a step's reward.

    For the last window, the noise is what was known before it, or its own if that is larger.
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
        # Use the noise known before this window, or the window's own: a fall just before it must not count as noise.
        around, factor = noise.around[..., : count - width], noise.factor[..., : count - width]
        variance = np.maximum(_trailing(noise.squares, width - 1)[..., here] / (width - 1), around) * factor
        if of_errors is not None:
            known = _trailing(of_errors, width)[..., here] / width
            variance = np.maximum(variance, known * np.minimum(width, noise.short_factor[..., : count - width]))
        reach = _bound(width) * np.sqrt(variance)
        # A level with too little noise, such as a reward of exactly 1, is assumed to have the noise of this window.
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
    """The window with the highest lower bound among those that end at a place or before it; all fields are [..., n].

    `end`, `width`: the last place and the width of the window. `lower`, `mean`: its lower bound and its mean. `learnt`:
    how far the mean is above that of the first tenth of the steps until then.
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
            bound[..., WIDTHS[0] :] = -np.inf  # later a full window tells more
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
    """The variance of a mean of n neighbouring values, times n, estimated at each place from the values up to it.
    Returns [..., n] for `values` [..., n].
    """
    noise = _noise_of(values)
    return noise.around * noise.factor


def _sums(values: np.ndarray) -> np.ndarray:
    """Cumulative sums that begin with 0: [..., n + 1] for `values` [..., n]."""
    return np.concatenate([np.zeros_like(values[..., :1]), np.cumsum(values, axis=-1)], axis=-1)


def _trailing(sums: np.ndarray, width: int) -> np.ndarray:
    """The sum of the last `width` values at each place, of fewer at the beginning: [..., n] for `sums` [..., n + 1]."""
    places = np.arange(1, sums.shape[-1])
    return sums[..., places] - sums[..., np.maximum(places - width, 0)]


def _mean_of_start(sums: np.ndarray) -> np.ndarray:
    """At each place, the mean of the first tenth of the values up to it, at least 3 values: [..., n]."""
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
    """Half the squared difference of each value from the one `lag` places before it, or 0 if there is none."""
    halves = np.zeros_like(values, dtype=float)
    halves[..., lag:] = (values[..., lag:] - values[..., :-lag]) ** 2 / 2
    return halves

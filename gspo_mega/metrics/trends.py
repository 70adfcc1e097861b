"""Whether a curve learns, is flat, falls or collapsed, and since when. Pure functions of series; how it is judged is in
docs/report.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from gspo_mega.metrics.falls import find_falls, noise_until

FEWEST_STEPS = 8
# A difference between the start and the end counts from so many standard errors on. Measured: at most 1 % of runs in
# which nothing happened are said to learn, and as many to fall.
LEAST_ERRORS = 2.4


class Trend(NamedTuple):
    """`kind` of a curve; `since`: the step at which that began, None where it is of the whole run. `start` and `end`
    are means over the steps from the first to the second of `start_steps` and `end_steps`. `level_since`: the step,
    where it is not in the last third, since which the curve has not risen by more than its noise.
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
    """A fall that was made good. `before`: the mean over `before_steps`; `began`: the first step of the fall; `lowest`:
    the lowest value, at `step`; `back`: the first step after it with nine tenths of `before` again.
    """

    step: int
    before: float
    lowest: float
    back: int
    began: int
    before_steps: tuple[int, int]


def rolling(values: Sequence[float], width: int) -> list[float]:
    """Means of windows that end at each place; shorter ones at the beginning."""
    shorter = [math.fsum(values[:end]) / end for end in range(1, min(width, len(values) + 1))]
    if len(values) < width:
        return shorter
    # By NumPy, because a long run has thousands of windows of thousands of steps. Equal windows have equal means.
    whole = np.lib.stride_tricks.sliding_window_view(np.asarray(values, dtype=float), width).mean(axis=-1)
    return [*shorter, *whole.tolist()]


def trend_of(
    steps: Sequence[int], series: Sequence[float | None], errors: Sequence[float | None] | None = None
) -> Trend:
    """Compares means over a tenth of the run (at least 3 steps); a difference counts above `LEAST_ERRORS`. Whether
    the curve collapsed is `falls.find_falls`'s to say, which may be asked after every step. Values that are missing or
    not finite are left out. `errors`: the standard error of each value, where that is known.
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
    return Trend("falls" if start - end > error else "flat", start, end, peak, at[top], None, first, last)


def _present(
    steps: Sequence[int], series: Sequence[float | None], errors: Sequence[float | None] | None
) -> tuple[list[int], list[float], np.ndarray | None]:
    """The steps that have a finite value, these, and their standard errors: [n], None where none is known."""
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
    """Standard errors of values that look like counts of one unit, such as the share of few successes: of k units
    sqrt(k), [n] of [n]. None where the values are too different from each other to be counts, or differ too little from
    step to step to be counts of events that happen by chance.
    """
    distinct = np.unique(np.append(values, 0.0))
    if len(distinct) < 2 or 2 * len(distinct) > len(values) + 2:
        return None
    squares = np.diff(distinct).min() * np.abs(values)
    changes = (np.diff(values) ** 2).mean() / 2 if len(values) > 1 else 0.0
    return np.sqrt(squares) if squares.mean() <= 4 * changes else None


def _variances_of_ends(values: np.ndarray, errors: np.ndarray | None, width: int) -> list[float]:
    """The variance of a mean of n values, times n, in the first and in the last `width` of them, at least 16."""
    found = []
    for part in (slice(None, max(width, 16)), slice(-max(width, 16), None)):
        known = 0.0 if errors is None else float((errors[part] ** 2).mean())
        found.append(max(float(noise_until(values[part])[-1]), known))
    return found


def _collapse(at: Sequence[int], values: np.ndarray, errors: np.ndarray | None) -> Trend | None:
    """The last collapse that was found at any step, None without one, or where the end has come back from it."""
    found = find_falls(values, errors)
    if not found.fallen.any():
        return None
    seen = int(np.flatnonzero(found.fallen)[-1])
    end_before = int(found.before_end[seen])
    begin_before = end_before + 1 - int(found.before_width[seen])
    peak = _mean(values[begin_before : end_before + 1])
    low = _mean(values[seen + 1 - int(found.last_width[seen]) : seen + 1])
    # The fall begins after the step up to which values were, in sum, furthest above what had lost a quarter of it.
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
    """Whether `end` has lost a third of `peak`, and of what had been learnt since `start`."""
    return peak - end > abs(peak) / 3 and peak - end > (peak - start) / 3


def _mean(values: np.ndarray) -> float:
    return math.fsum(values) / len(values)


def _level_since(at: Sequence[int], means: Sequence[float], width: int, error: float) -> int | None:
    """The end of the first mean over `width` steps which none of the later ones exceeds by more than `error`, where it
    is in the first two thirds.
    """
    enough = max(means[width - 1 :]) - error
    first = next(place for place in range(width - 1, len(means)) if means[place] >= enough)
    return at[first] if first < len(means) * 2 // 3 else None


def setbacks_of(
    steps: Sequence[int], series: Sequence[float | None], errors: Sequence[float | None] | None = None
) -> list[Setback]:
    """Where the mean over 3 steps is a third and 5 standard errors below that of a tenth of the run (at least 6 steps)
    before it, and later comes back to nine tenths of that. The noise is what had been seen before, and at least the
    `errors` of the values, where they are known.
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

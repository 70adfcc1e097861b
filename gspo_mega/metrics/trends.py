"""Whether a curve learns, is flat, falls or collapsed, and since when. Pure functions of series; how it is judged is in
docs/report.md.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

FEWEST_STEPS = 8


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
    return [
        math.fsum(part) / len(part) for end in range(1, len(values) + 1) if (part := values[max(0, end - width) : end])
    ]


def noise_of(values: Sequence[float]) -> float:
    """Standard deviation of one value around its trend, from the median of differences of neighbours."""
    steps = sorted(abs(b - a) for a, b in itertools.pairwise(values))
    if not steps:
        return 0.0
    median = steps[len(steps) // 2]
    # A difference has sqrt(2) times the spread; the median of |x| is .6745 of it.
    return max(median / 0.6745, math.fsum(steps) / len(steps) / 0.798 / 4) / math.sqrt(2)


def trend_of(steps: Sequence[int], series: Sequence[float | None]) -> Trend:
    """Compares means over a tenth of the run (at least 3 steps). A difference counts above 3 standard errors; a
    collapse has lost a third of the highest mean, and half of what had been learnt.
    """
    pairs = [(step, value) for step, value in zip(steps, series, strict=True) if value is not None]
    if len(pairs) < FEWEST_STEPS:
        return Trend("short", math.nan, math.nan, math.nan, -1)
    at, values = [step for step, _ in pairs], [value for _, value in pairs]
    width = max(3, len(values) // 10)
    means = rolling(values, width)
    error = 3.0 * noise_of(values) * math.sqrt(2.0 / width)
    start, end = means[width - 1], means[-1]
    first, last = (at[0], at[width - 1]), (at[-width], at[-1])
    top = max(range(width - 1, len(means)), key=means.__getitem__)
    peak = means[top]
    lost = peak - end
    if lost > max(error, abs(peak) / 3) and lost > (peak - start) / 2:
        edge = peak - max(error, lost / 10)
        last_good = max(place for place in range(top, len(means)) if means[place] >= edge)
        # The window ends there; the fall began in it.
        since = at[min(last_good + 1, len(at) - 1)]
        # Of a fall in the first window, which has both sides of it, single steps tell more.
        middle = (max(values[:width]) + end) / 2
        fell = 1 + max(place for place, value in enumerate(values) if value >= middle)
        if fell < width:
            before = values[:fell]
            start = peak = math.fsum(before) / fell
            first = (at[0], at[fell - 1])
            top, since = max(range(fell), key=before.__getitem__), at[fell]
        return Trend("collapsed", start, end, peak, at[top], since, first, last)
    if end - start > error:
        level = _level_since(at, means, width, error)
        since = next(at[place] for place in range(width, len(means)) if means[place] - start > error)
        return Trend("learns", start, end, peak, at[top], since, first, last, level)
    return Trend("falls" if start - end > error else "flat", start, end, peak, at[top], None, first, last)


def _level_since(at: Sequence[int], means: Sequence[float], width: int, error: float) -> int | None:
    """The end of the first mean over `width` steps which none of the later ones exceeds by more than `error`, where it
    is in the first two thirds.
    """
    enough = max(means[width - 1 :]) - error
    first = next(place for place in range(width - 1, len(means)) if means[place] >= enough)
    return at[first] if first < len(means) * 2 // 3 else None


def setbacks_of(steps: Sequence[int], series: Sequence[float | None]) -> list[Setback]:
    """Where the mean over 3 steps is a third and 4 standard errors below that of a tenth of the run (at least 6 steps)
    before it, and later comes back to nine tenths of that.
    """
    pairs = [(step, value) for step, value in zip(steps, series, strict=True) if value is not None]
    values = [value for _, value in pairs]
    width, few = max(6, len(values) // 10), 3
    error = 4.0 * noise_of(values) * math.sqrt(1.0 / few + 1.0 / width)
    found: list[Setback] = []
    place = width
    while place + few <= len(values):
        before = math.fsum(values[place - width : place]) / width
        if before - math.fsum(values[place : place + few]) / few > max(error, abs(before) / 3):
            whole = [math.fsum(values[at : at + few]) / few for at in range(place, len(values) - few + 1)]
            back = next((place + at for at, mean in enumerate(whole) if mean >= 0.9 * before), None)
            if back is None:
                break
            lowest = min(range(place, back + few), key=values.__getitem__)
            enough = 0.9 * before
            good = (one for one in range(lowest, place - width, -1) if values[one] >= enough)
            began = next(good, place - 1) + 1
            again = next((one for one in range(lowest, back + few) if values[one] >= enough), back)
            at = [step for step, _ in pairs]
            window = (at[place - width], at[place - 1])
            found.append(Setback(at[lowest], before, values[lowest], at[again], at[began], window))
            place = back + few
        else:
            place += 1
    return found

"""How often to save: by simulated failures, beside what Young's and Daly's formulas say.

Owns the long run at mean step times: many failures with exponential gaps, the same ones for every interval that is
tried. Young (1974) and Daly (2006) count all lost work at its first price; a run of gspo_mega trains lost steps again
on recorded rollouts, which takes less time, so the best interval is longer than theirs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

_FAILURES = 4000
_TRIED = 25


@dataclass(frozen=True)
class Costs:
    """Seconds: of a step, of the same step when it is trained again, of a save, from a failure to training on, and
    between failures.
    """

    step: float
    redo: float
    save: float
    restart: float
    mtbf: float


@dataclass(frozen=True)
class Intervals:
    """`shares`: the share of time that goes into steps trained for the first time, by steps between saves. `best`: the
    number of steps with the largest. `young`, `daly`: seconds of work between saves.
    """

    shares: dict[int, float]
    best: int
    young: float
    daly: float


def young_seconds(save: float, mtbf: float) -> float:
    """Work between two saves that loses least, to first order."""
    return math.sqrt(2 * save * mtbf)


def daly_seconds(save: float, mtbf: float) -> float:
    """The same to higher order (Daly 2006, equation 37)."""
    if save >= 2 * mtbf:
        return mtbf
    part = save / (2 * mtbf)
    return math.sqrt(2 * save * mtbf) * (1 + math.sqrt(part) / 3 + part / 9) - save


def effective_share(costs: Costs, every: int, gaps: list[float]) -> float:
    """The share of useful time with a save every `every` steps. `gaps`: seconds from each failure to the next."""
    step, redo, save = costs.step, costs.redo, costs.save
    cycle, done, behind, elapsed = every * step + save, 0, 0, 0.0
    for gap in gaps:  # `behind`: steps that were trained since the last save
        elapsed += gap
        left = gap - costs.restart - behind * redo
        if left < 0:
            continue
        first = (every - behind) * step + save
        if left < first:
            more = min(int(left / step), every - behind)
            behind += more
        else:
            cycles, rest = divmod(left - first, cycle)
            last = min(int(rest / step), every)
            more = every - behind + int(cycles) * every + last
            behind = last
        done += more
    return done * step / elapsed


def best_interval(costs: Costs, seed: int = 1) -> Intervals | None:
    """None where nothing fails or saving takes no time: then every step may as well be saved, or none."""
    if not math.isfinite(costs.mtbf) or costs.save <= 0:
        return None
    rng = np.random.default_rng([seed, 2])
    gaps = rng.exponential(costs.mtbf, _FAILURES).tolist()
    middle = daly_seconds(costs.save, costs.mtbf) / costs.step
    tried = sorted({max(1, round(middle * 10 ** (place / 12 - 1))) for place in range(_TRIED)})
    shares = {every: effective_share(costs, every, gaps) for every in tried}
    best = max(tried, key=lambda every: shares[every])
    return Intervals(shares, best, young_seconds(costs.save, costs.mtbf), daly_seconds(costs.save, costs.mtbf))

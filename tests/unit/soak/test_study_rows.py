"""What can be seen between arms whose seeds started from different weights."""

import math
from dataclasses import dataclass

import pytest
import study_rows


@dataclass(frozen=True)
class Run:
    arm: str
    cold_start: str
    accuracy: float
    seed: int = 1
    outcome: str = "trained"


def accuracy(run):
    return run.accuracy


def runs_of(**arms):
    """`a=(("x", .5), ...)`: the runs of arm a, each from its cold start."""
    return [Run(arm, start, value) for arm, found in arms.items() for start, value in found]


def test_one_cold_start_adds_nothing():
    rows = runs_of(a=(("x", 0.5), ("x", 0.7)), b=(("x", 0.4), ("x", 0.2)))
    assert study_rows.start_effects(rows, accuracy) == {"x": 0.0}
    spread, freedom = study_rows.compared_spread(rows, accuracy)
    assert (spread, freedom) == (pytest.approx(math.sqrt(0.02)), 2)


def test_what_a_cold_start_adds_is_no_spread_between_seeds():
    """From y every arm ends .3 higher, and b .1 above a: differences by seed are exact."""
    rows = runs_of(a=(("x", 0.4), ("y", 0.7)), b=(("x", 0.5), ("y", 0.8)))
    effects = study_rows.start_effects(rows, accuracy)
    assert effects == {"x": pytest.approx(-0.15), "y": pytest.approx(0.15)}
    spread, freedom = study_rows.compared_spread(rows, accuracy)
    assert freedom == 1 and spread == pytest.approx(0.0, abs=1e-12)
    # Taken as of one cold start, the same numbers would hide a difference of .1.
    assert study_rows.pooled_spread([[0.4, 0.7], [0.5, 0.8]])[0] > 0.2


def test_the_spread_is_the_residual_of_two_ways():
    """By hand: arms (.40 .70), (.52 .78) have effects -+.14, residuals +-.01: two arms of two, 1 of 2 degrees left."""
    rows = runs_of(a=(("x", 0.40), ("y", 0.70)), b=(("x", 0.52), ("y", 0.78)))
    effects = study_rows.start_effects(rows, accuracy)
    assert effects["y"] == pytest.approx(0.14)
    spread, freedom = study_rows.compared_spread(rows, accuracy)
    assert freedom == 1 and spread == pytest.approx(math.sqrt(4 * 0.01**2 / 1))


def test_arms_that_lack_a_cold_start_or_collapsed_do_not_say_what_it_adds():
    rows = runs_of(a=(("x", 0.4), ("x", 0.42), ("y", 0.7)), b=(("x", 0.9),))
    rows += [Run("c", "x", 0.1, outcome="collapsed"), Run("c", "y", 0.0)]
    assert study_rows.start_effects(rows, accuracy)["x"] == pytest.approx((0.41 - 0.7) / 2)
    with pytest.raises(ValueError, match="no arm has runs from every cold start"):
        study_rows.start_effects([row for row in rows if row.arm != "a"], accuracy)
    with pytest.raises(ValueError, match="no degree of freedom is left"):
        study_rows.compared_spread(runs_of(a=(("x", 0.4), ("y", 0.7))), accuracy)

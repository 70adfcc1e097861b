"""The catalogue's reduction is what computes a step's value."""

from __future__ import annotations

import pytest

from gspo_mega.metrics.reductions import reduced


@pytest.mark.parametrize(
    ("name", "numbers", "expected"),
    [
        ("reward/mean", [1.0, 2.0, 6.0], 3.0),
        ("reward/sd", [1.0, 3.0], 1.0),
        ("response/length_max", [3, 9, 4], 9.0),
        ("response/truncated_fraction", [True, False, False, True], 0.5),
        ("rollout/num_retries", [2, 3], 5.0),
        ("time/rollout/generate_seconds", [1.5], 1.5),
    ],
)
def test_each_reduction(name, numbers, expected):
    assert reduced({name: numbers}) == {name: expected}


@pytest.mark.parametrize(
    ("name", "numbers"), [("time/rollout/generate_seconds", [1.0, 2.0]), ("policy/log_ratio/p99", [1.0]), ("x", [1.0])]
)
def test_what_has_no_single_value_is_refused(name, numbers):
    with pytest.raises(ValueError):
        reduced({name: numbers})

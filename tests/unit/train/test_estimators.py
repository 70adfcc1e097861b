"""pass@k, the majority and their spread against hand-worked numbers and against every subset."""

from __future__ import annotations

import itertools
import math

import pytest

from gspo_mega.train.held_out import ks_of, majority_correct, over_prompts, pass_at


@pytest.mark.parametrize(("n", "c"), [(5, 0), (5, 1), (5, 2), (6, 3), (4, 4)])
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_one(n, c):
    marks = [True] * c + [False] * (n - c)
    for k in range(1, n + 1):
        subsets = [any(subset) for subset in itertools.combinations(marks, k)]
        assert pass_at(n, c, k) == pytest.approx(sum(subsets) / len(subsets))


def test_pass_at_k_of_too_few_samples_is_refused():
    with pytest.raises(ValueError, match="pass@3 of 2 samples: k must be from 1 to 2"):
        pass_at(2, 1, 3)
    assert [ks_of(n) for n in (1, 2, 4, 6, 64)] == [[1], [1, 2], [1, 2, 4], [1, 2, 4, 6], [1, 2, 4, 8, 16, 32, 64]]


def test_the_spread_is_between_prompts():
    mean, error = over_prompts([0.0, 1.0, 1.0, 0.5])
    assert mean == 0.625 and error == pytest.approx(math.sqrt(0.6875 / 3 / 4))
    assert over_prompts([0.25]) == (0.25, 0.0)
    with pytest.raises(ValueError, match="no prompt to take the mean over"):
        over_prompts([])


@pytest.mark.parametrize(
    ("votes", "value"),
    [
        ([("7", False), ("7", False), ("4", True)], 0.0),
        ([("7", False), ("4", True), ("4.0", True)], 1.0),
        ([("7", False), ("4", True)], 0.5),
        ([("7", False), ("4", True), ("9", False)], 1 / 3),
        ([(None, False), (None, False), ("4", True)], 1.0),
        ([(None, False)], 0.0),
    ],
)
def test_the_majority(votes, value):
    """Correct ones agree however they are written; who gives no answer has no vote; a tie counts by its share."""
    assert majority_correct(votes) == pytest.approx(value)

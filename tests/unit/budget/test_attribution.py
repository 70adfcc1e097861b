"""The statistics of a budget against values worked out by hand, and against a second way to compute them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo_mega.budget.attribution import (
    Band,
    Estimate,
    Tokens,
    explained_share,
    make_row,
    prefix_means,
    ratio_estimate,
    sequence_means,
    share_estimate,
    three_lengths,
)

# Sequences of 3, 1 and 2 tokens; the first two answer one prompt.
TOKENS = Tokens(np.array([0, 0, 0, 1, 2, 2]), np.array([7, 7, 9]))
VALUES = np.array([0.3, 0.0, -0.6, 0.2, -0.1, 0.3])


def test_lengths_and_positions():
    assert TOKENS.lengths.tolist() == [3, 1, 2]
    assert TOKENS.positions.tolist() == [0, 1, 2, 0, 0, 1]


def test_log_s_is_the_mean_over_a_sequence():
    assert sequence_means(VALUES, TOKENS) == pytest.approx([-0.1, 0.2, 0.1])


def test_means_of_the_first_tokens_leave_short_sequences_out():
    means, chosen = prefix_means(VALUES, TOKENS, 2)
    assert means == pytest.approx([0.15, 0.1])
    assert chosen.tolist() == [0, 2]


def test_a_ratio_and_its_error_by_hand():
    # Groups 0 and 1 with sums of values 3 and 5 over weights 2 and 2: the ratio is 2, the residuals -1 and 1, and the
    # error sqrt(2 / 1 x 2) / 4 = 1 / 2.
    estimate = ratio_estimate(np.array([1.0, 2.0, 5.0]), np.array([1.0, 1.0, 2.0]), np.array([0, 0, 1]))
    assert estimate == Estimate(2.0, pytest.approx(0.5))


def test_one_group_has_no_error_to_speak_of():
    assert ratio_estimate(np.ones(3), np.ones(3), np.zeros(3, int)) == Estimate(1.0, math.inf)
    assert ratio_estimate(np.zeros(0), np.zeros(0), np.zeros(0, int)).error == math.inf


def test_the_error_is_that_of_independent_values_where_groups_are_single():
    rng = np.random.default_rng(0)
    values = rng.normal(size=50)
    estimate = ratio_estimate(values, np.ones(50), np.arange(50))
    assert estimate.error == pytest.approx(values.std(ddof=1) / math.sqrt(50))


def test_repeating_every_value_in_its_group_does_not_shrink_the_error():
    values, groups = np.arange(6.0), np.arange(6)
    once = ratio_estimate(values, np.ones(6), groups)
    thrice = ratio_estimate(np.repeat(values, 3), np.ones(18), np.repeat(groups, 3))
    assert thrice.error == pytest.approx(once.error)


def test_the_three_lengths_are_thirds_of_what_half_of_the_sequences_reach():
    assert three_lengths(np.array([36, 40, 8])) == (4, 12, 36)
    assert three_lengths(np.array([2, 2, 2])) == (1, 2)
    assert three_lengths(np.array([1])) == (1,)


def test_a_row_by_hand():
    row = make_row(VALUES, TOKENS, Band(-0.05, 0.15), (1, 2))
    terms = [math.exp(x) - 1 - x for x in VALUES]
    assert row.k3.value == pytest.approx(sum(terms) / 6)
    assert row.mean.value == pytest.approx(0.1 / 6)
    # log s is -0.1, 0.2, 0.1: one below the range, one above it; mean |log s| is 0.4 / 3, the range 0.2 wide.
    assert row.negative.value == pytest.approx(1 / 3)
    assert row.positive.value == pytest.approx(1 / 3)
    assert row.band_share.value == pytest.approx(0.4 / 3 / 0.2)
    assert row.maximum == 0.6
    first, second = row.at_length
    assert (first.length, first.count, second.count) == (1, 3, 2)
    assert first.mean.value == pytest.approx(0.4 / 3)
    assert second.sd == pytest.approx(0.025)


def test_a_token_ratio_counts_tokens():
    row = make_row(VALUES, TOKENS, Band(-0.2, 0.25, per_token=True), (1,))
    assert row.negative.value == pytest.approx(1 / 6)
    assert row.positive.value == pytest.approx(2 / 6)


def test_k3_of_tiny_differences_is_half_their_square():
    values = np.full(6, 1e-7)
    assert make_row(values, TOKENS, Band(-1, 1), (1,)).k3.value == pytest.approx(5e-15, rel=1e-6)


def test_a_bound_needs_two_standard_errors():
    assert Estimate(1.0, 0.2).above(0.5) and not Estimate(1.0, 0.3).above(0.5)
    assert Estimate(1.0, 0.2).below(1.5) and not Estimate(1.0, 0.3).below(1.5)
    assert not Estimate(1.0, math.inf).above(0.0)


@given(st.lists(st.tuples(st.floats(-1, 1), st.floats(-1, 1)), min_size=1, max_size=30))
def test_shares_of_parts_add_up_to_one(pairs):
    one, other = np.array(pairs).T
    whole = one + other
    total = explained_share(one, whole) + explained_share(other, whole)
    assert total == pytest.approx(1.0) or not (whole @ whole) > 1e-20


def test_a_part_that_takes_away_has_a_negative_share():
    assert explained_share(np.array([-1.0, -1.0]), np.array([2.0, 2.0])) == pytest.approx(-0.5)
    assert explained_share(np.zeros(2), np.zeros(2)) == 0.0


def test_none_of_a_few_prompts_is_no_certain_zero():
    # The rule of three: none of 10 prompts is at most 3 / 10, whatever the number of samples of each.
    flags, prompts = np.zeros(40, bool), np.repeat(np.arange(10), 4)
    assert share_estimate(flags, prompts) == Estimate(0.0, 0.15)
    assert share_estimate(~flags, prompts) == Estimate(1.0, 0.15)
    flags[0] = True
    assert share_estimate(flags, prompts).error == pytest.approx(0.025)

"""The statistics of a budget against values worked out by hand, and against a second way to compute them."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo_mega.verify.mismatch.attribution import (
    Band,
    PromptEstimate,
    TokenPlaces,
    explained_share,
    make_row,
    prefix_means,
    ratio_estimate,
    sequence_means,
    share_estimate,
    three_lengths,
)

# Sequences of 3, 1 and 2 tokens; the first two answer one prompt. A < 0, A > 0, A < 0.
TOKENS = TokenPlaces(np.array([0, 0, 0, 1, 2, 2]), np.array([7, 7, 9]), np.array([-1, 1, -1]))
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
    assert estimate == PromptEstimate(2.0, pytest.approx(0.5))


def test_one_group_has_no_error_to_speak_of():
    assert ratio_estimate(np.ones(3), np.ones(3), np.zeros(3, int)) == PromptEstimate(1.0, math.inf)
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
    assert row.below.value == pytest.approx(1 / 3)
    assert row.above.value == pytest.approx(1 / 3)
    # The one below is one of two with A < 0, the one above is all of those with A > 0.
    assert row.clipped_negative.value == pytest.approx(1 / 2)
    assert row.clipped_positive.value == pytest.approx(1)
    assert (row.negative, row.positive) == (row.clipped_negative, row.clipped_positive)
    assert row.band_share.value == pytest.approx(0.4 / 3 / 0.2)
    assert row.maximum == 0.6
    first, second = row.at_length
    assert (first.length, first.count, second.count) == (1, 3, 2)
    assert first.mean.value == pytest.approx(0.4 / 3)
    assert second.sd == pytest.approx(0.025)


def test_a_token_ratio_counts_tokens():
    row = make_row(VALUES, TOKENS, Band(-0.2, 0.25, per_token=True), (1,))
    assert row.below.value == pytest.approx(1 / 6)
    assert row.above.value == pytest.approx(2 / 6)
    # One of five tokens with A < 0 is below -.2; the only one with A > 0, .2, is inside.
    assert row.clipped_negative.value == pytest.approx(1 / 5)
    assert row.clipped_positive.value == 0


def test_where_a_response_is_on_the_side_that_its_sign_does_not_clip():
    """min(s A, clip(s) A) keeps the gradient of A > 0 below the range, and of A < 0 above it."""
    other = TokenPlaces(TOKENS.sequence, TOKENS.prompt, -TOKENS.signs)
    row = make_row(VALUES, other, Band(-0.05, 0.15), (1,))
    assert (row.below.value, row.above.value) == (pytest.approx(1 / 3), pytest.approx(1 / 3))
    assert (row.clipped_negative.value, row.clipped_positive.value) == (0, 0)


def test_without_signs_the_shares_are_those_of_all():
    unknown = TokenPlaces(TOKENS.sequence, TOKENS.prompt, np.zeros(3, int))
    row = make_row(VALUES, unknown, Band(-0.05, 0.15), (1,))
    assert row.clipped_negative is None and row.clipped_positive is None
    assert (row.negative, row.positive) == (row.below, row.above)


def test_k3_of_tiny_differences_is_half_their_square():
    values = np.full(6, 1e-7)
    assert make_row(values, TOKENS, Band(-1, 1), (1,)).k3.value == pytest.approx(5e-15, rel=1e-6)


def test_a_bound_needs_two_standard_errors():
    assert PromptEstimate(1.0, 0.2).above(0.5) and not PromptEstimate(1.0, 0.3).above(0.5)
    assert PromptEstimate(1.0, 0.2).below(1.5) and not PromptEstimate(1.0, 0.3).below(1.5)
    assert not PromptEstimate(1.0, math.inf).above(0.0)


@given(st.lists(st.tuples(st.floats(-1, 1), st.floats(-1, 1)), min_size=1, max_size=30))
def test_shares_of_parts_add_up_to_one(pairs):
    one, other = np.array(pairs).T
    whole, groups = one + other, np.arange(len(pairs)) // 3
    total = explained_share(one, whole, groups).value + explained_share(other, whole, groups).value
    assert total == pytest.approx(1.0) or not (whole @ whole) > 1e-20


def test_a_part_that_takes_away_has_a_negative_share():
    assert explained_share(np.array([-1.0, -1.0]), np.array([2.0, 2.0]), np.arange(2)) == PromptEstimate(-0.5, 0.0)
    assert explained_share(np.zeros(2), np.zeros(2), np.arange(2)) == PromptEstimate(0.0, math.inf)


def test_a_share_of_one_prompt_has_no_error_to_speak_of():
    assert explained_share(np.ones(3), np.ones(3), np.zeros(3, int)) == PromptEstimate(1.0, math.inf)


def test_the_error_of_a_share_is_the_spread_between_prompts():
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(60), 20)
    part, whole = rng.normal(size=1200), rng.normal(size=1200)
    whole += part
    # Many prompts of one kind: the linearised error of a ratio of sums says the same.
    linear = ratio_estimate(part * whole, whole * whole, groups)
    found = explained_share(part, whole, groups)
    assert found.value == pytest.approx(linear.value) and found.error == pytest.approx(linear.error, rel=0.15)
    assert explained_share(part, whole, groups) == found  # the same numbers, the same error


def test_a_share_that_one_prompt_makes_is_not_known():
    groups = np.repeat(np.arange(10), 5)
    part = np.where(groups == 0, 1.0, 0.0)
    share = explained_share(part, part + 0.1, groups)
    # Nine tenths and more of the squares are that prompt's: without it nothing is left of the share.
    assert share.value > 0.8 and share.error > 0.25


def test_none_of_a_few_prompts_is_no_certain_zero():
    # Wilson's interval at two standard errors: 4 / (10 + 4) for none of 10, whatever the number of samples of each.
    flags, prompts = np.zeros(40, bool), np.repeat(np.arange(10), 4)
    none, all_of_them = share_estimate(flags, prompts), share_estimate(~flags, prompts)
    assert (none.value, none.low, none.high) == (0.0, 0.0, pytest.approx(2 / 7))
    assert (all_of_them.value, all_of_them.low, all_of_them.high) == (1.0, pytest.approx(5 / 7), 1.0)
    assert none.error == pytest.approx(1 / 7)  # two of them reach the farther end
    assert none.below(0.29) and not none.below(0.28)
    assert share_estimate(np.zeros(0, bool), np.zeros(0, int)).error == math.inf


def test_one_more_that_is_clipped_never_says_less():
    flags, prompts = np.zeros(128, bool), np.repeat(np.arange(32), 4)
    ends = []
    for count in range(40):
        flags[:count] = True
        share = share_estimate(flags, prompts)
        ends.append((share.low, share.high))
    assert all(one[1] < other[1] and one[0] <= other[0] for one, other in itertools.pairwise(ends))


def test_a_bound_on_a_share_is_judged_by_the_end_that_is_nearer():
    # (.25 -+ sqrt(.2 x .8 x 4 / 40 + .05^2)) / 1.1, which is not symmetric about 8 of 40.
    share = share_estimate(np.arange(40) < 8, np.arange(40))
    assert share.low == pytest.approx(0.1036, abs=1e-4) and share.high == pytest.approx(0.3509, abs=1e-4)
    assert share.above(0.1) and not share.above(0.11)


def test_prompts_with_many_tokens_count_as_fewer():
    # (3 + 1)^2 / (9 + 1) = 1.6 prompts of equal weight.
    assert share_estimate(np.zeros(4, bool), np.array([0, 0, 0, 1])).high == pytest.approx(4 / 5.6)

"""What lies exactly on an edge is inside, ranges with two different widths, and metrics of numbers that a person can add.

Where a log-prob of the old policy is 0, a log ratio is the new log-prob to the last bit.
"""

from __future__ import annotations

import math

import pytest
import torch

from gspo_mega.algorithm.advantages import whitened
from gspo_mega.algorithm.correction import (
    MAXIMUM_NAMES,
    MIN_SEGMENTS,
    CorrectionRule,
    correct_around,
    correct_segments,
    mismatch_metrics,
    mismatch_sums,
    segment_centres,
    sequence_mean_log_ratio,
)
from gspo_mega.algorithm.diagnostics import POLICY_SUMS, band_fractions, policy_metrics, policy_sums
from gspo_mega.algorithm.losses import reference_kl, value_loss
from gspo_mega.algorithm.objective import policy_objective
from gspo_mega.algorithm.terms import ObjectiveSettings

F64 = torch.float64
E = math.exp


def summed(surrogate, log_ratios, advantage, clip_low, clip_high, old=None, **changes):
    """(J, gradient, clipped high, clipped low) of one response whose tokens' terms are summed. `old`: log-probs."""
    old = torch.zeros(len(log_ratios), dtype=F64) if old is None else torch.tensor(old, dtype=F64)
    new = (old + torch.tensor(log_ratios, dtype=F64)).requires_grad_()
    output = policy_objective(
        ObjectiveSettings(
            "token",
            clip_low,
            clip_high,
            aggregation="sequence_mean_token_sum",
            surrogate=surrogate,
            **changes,
        ),
        log_probs=new,
        old_log_probs=old,
        rollout_log_probs=old,
        mask=torch.ones(len(log_ratios)),
        segment_ids=torch.zeros(len(log_ratios), dtype=torch.int64),
        num_sequences=1,
        advantages=torch.tensor([advantage]),
        lengths=torch.tensor([len(log_ratios)]),
        denominator=1,
    )
    output.objective_sum.backward()
    assert new.grad is not None
    dual = output.dual_clipped.tolist()
    return float(output.value), new.grad.tolist(), output.clipped_high.tolist(), output.clipped_low.tolist(), dual


def near(values):
    return pytest.approx(values, rel=1e-12, abs=1e-15)


def test_cispo_has_a_lower_bound_of_its_own():
    """r = .25, .9, 2 with weights in [.5, 1.25]: .5, .9 and 1.25, whatever the sign of A."""
    log_ratios, old = [math.log(r) for r in (0.25, 0.9, 2.0)], [-1.0, -1.0, -1.0]
    logs = [-1 + d for d in log_ratios]
    weights = [0.5, 0.9, 1.25]
    for advantage in (2.0, -3.0):
        value, gradient, high, low, _ = summed("cispo", log_ratios, advantage, 0.5, 0.25, old)
        assert gradient == near([advantage * w for w in weights])
        assert value == near(advantage * sum(w * log for w, log in zip(weights, logs, strict=True)))
        assert (high, low) == ([False, False, True], [True, False, False])


def test_gmpo_has_two_bounds():
    """d is cut at .5 above where A > 0, and at -.25 below where A < 0; L = 2, and J = A L exp(mean d)."""
    value, gradient, high, low, _ = summed("gmpo", [0.375, 0.75], 1.0, 0.25, 0.5)
    mean = (0.375 + 0.5) / 2
    assert value == near(2 * E(mean)) and gradient == near([E(mean), 0.0])
    assert (high, low) == ([False, True], [False, False])
    value, gradient, high, low, _ = summed("gmpo", [-0.375, 0.75], -1.0, 0.25, 0.5)
    mean = (-0.25 + 0.75) / 2
    assert value == near(-2 * E(mean)) and gradient == near([0.0, -E(mean)])
    assert (high, low) == ([False, False], [True, False])
    # The other bound is not looked at on either side.
    assert summed("gmpo", [-9.0, 0.0], 1.0, 0.25, 0.5)[2:4] == ([False] * 2, [False] * 2)
    assert summed("gmpo", [9.0, 0.0], -1.0, 0.25, 0.5)[2:4] == ([False] * 2, [False] * 2)


def test_dppo_has_two_bounds():
    """Probabilities: .5 -> .75 and .5 -> .875 with A > 0, at most .3 up; .5 -> .25 and .5 -> .125 with A < 0, .3 down;
    with the widths the other way round all four or none of them would be cut.
    """
    old, up, down = [math.log(0.5)] * 2, [math.log(1.5), math.log(1.75)], [math.log(0.5), math.log(0.25)]
    assert summed("dppo", up, 1.0, 0.1, 0.3, old)[2:4] == ([False, True], [False, False])
    assert summed("dppo", up, 1.0, 0.9, 0.3, old)[2:4] == ([False, True], [False, False])
    assert summed("dppo", down, -1.0, 0.3, 0.1, old)[2:4] == ([False, False], [False, True])
    assert summed("dppo", down, -1.0, 0.3, 0.9, old)[2:4] == ([False, False], [False, True])


def test_minirl_drops_below_its_own_lower_edge():
    """1 - .5 and 1 + .25: r = .7 stays and r = .4 goes where A < 0; r = 1.5 goes and r = 1.2 stays where A > 0."""
    old = [-1.0, -1.0]
    found = summed("minirl", [math.log(0.7), math.log(0.4)], -1.0, 0.5, 0.25, old, weight_limit=None)
    assert found[1] == near([-0.7, 0.0]) and found[2:4] == ([False, False], [False, True])
    found = summed("minirl", [math.log(1.5), math.log(1.2)], 1.0, 0.5, 0.25, old, weight_limit=None)
    assert found[1] == near([0.0, 1.2]) and found[2:4] == ([True, False], [False, False])


@pytest.mark.parametrize(
    ("surrogate", "high_edge", "low_edge"),
    [
        ("clip", math.log1p(0.5), math.log1p(-0.25)),
        ("cispo", math.log1p(0.5), math.log1p(-0.25)),
        ("minirl", math.log1p(0.5), math.log1p(-0.25)),
        ("gmpo", 0.5, -0.25),
    ],
)
def test_a_ratio_on_the_edge_is_inside_and_the_next_number_is_outside(surrogate, high_edge, low_edge):
    for advantage, edge, which in ((1.0, high_edge, 2), (-1.0, low_edge, 3)):
        on = summed(surrogate, [edge], advantage, 0.25, 0.5)
        assert on[which] == [False] and on[1][0] != 0
        past = summed(surrogate, [math.nextafter(edge, math.copysign(9, edge))], advantage, 0.25, 0.5)
        assert past[which] == [True] and (past[1][0] != 0) == (surrogate == "cispo")


def test_a_change_of_a_probability_on_the_edge_is_inside():
    """1 -> .5 and 1 -> 1.5 are exactly .5 apart; a probability above 1 is for the arithmetic alone."""
    assert math.exp(math.log(0.5)) == 0.5 and math.exp(math.log(1.5)) == 1.5
    assert summed("dppo", [math.log(1.5)], 1.0, 0.5, 0.5)[2] == [False]
    assert summed("dppo", [math.log(0.5)], -1.0, 0.5, 0.5)[3] == [False]
    assert summed("dppo", [math.log(1.5)], 1.0, 0.5, 0.49)[2] == [True]
    assert summed("dppo", [math.log(0.5)], -1.0, 0.49, 0.5)[3] == [True]


def test_a_ratio_on_the_dual_edge_still_has_a_gradient():
    edge = math.log(3.0)
    value, gradient, *_, dual = summed("clip", [edge], -2.0, 0.2, 0.2, dual_clip=3.0)
    assert (value, gradient, dual) == (near(-6.0), near([-6.0]), [False])
    value, gradient, *_, dual = summed("clip", [math.nextafter(edge, 9)], -2.0, 0.2, 0.2, dual_clip=3.0)
    assert (value, gradient, dual) == (near(-6.0), [0.0], [True])


def test_shares_outside_the_band_leave_its_edges_inside():
    edges = torch.tensor([math.log1p(0.5), math.log1p(-0.25)], dtype=F64)
    assert band_fractions(edges, 0.25, 0.5) == (0.0, 0.0)
    assert band_fractions(edges * 1.01, 0.25, 0.5) == (0.5, 0.5)


def test_every_metric_of_two_short_responses():
    """Token ratios 2 | .5, 1, 6; sequence ratios 2 and 3. A ratio of 2 is not above the cap of 2, and .5 is kept."""
    trainer = torch.tensor([math.log(2), math.log(0.5), 0.0, math.log(6)], dtype=F64)
    assert trainer.exp()[:2].tolist() == [2.0, 0.5]
    ids = torch.tensor([0, 1, 1, 1])
    sums, maxima = mismatch_sums(trainer, torch.zeros(4, dtype=F64), torch.ones(4), ids, 3, 2.0)
    names = ("abs_log_ratio", "abs_prob_difference", "negative_log_ratio")
    assert names == MAXIMUM_NAMES
    wanted = [[math.log(2), 1.0, -math.log(2)], [math.log(6), 5.0, math.log(2)]]
    assert maxima[:2].tolist() == [near(row) for row in wanted] and maxima[2].tolist() == [-math.inf] * 3
    found = mismatch_metrics(sums, maxima)
    third = math.log(3) / 3  # mean log ratio of the second
    assert found == near(
        {
            "k1": -math.log(6) / 4,
            "k2": (2 * math.log(2) ** 2 + math.log(6) ** 2) / 8,
            "k3": (9.5 - 4 - math.log(6)) / 4,
            "abs_log_ratio_mean": (2 * math.log(2) + math.log(6)) / 4,
            "abs_log_ratio_max": math.log(6),
            "abs_prob_difference_max": 5.0,
            "log_ppl_difference_mean": -(math.log(2) + third) / 2,
            "ppl_ratio_mean": (1 / 2 + E(-third)) / 2,
            "chi2_token": (4 + 0.25 + 1 + 36) / 4 - 1,
            "chi2_sequence": (4 + 9) / 2 - 1,
            "chi2_sequence_log1p": math.log(6.5),
            "chi2_sequence_length_normalised": (4 + E(2 * third)) / 2 - 1,
            "token_truncated_ratio_mean": (2 + 0.5 + 1 + 2) / 4,
            "token_truncated_fraction": 1 / 4,
            "ess_token": 9.5**2 / (4 * 41.25),
            "ess_sequence": 25 / 26,
            "icepop_kept_fraction": 3 / 4,
        }
    )


def test_what_was_clipped_by_sign_and_what_is_left_of_the_advantages():
    """Five responses of one token: A = -1 at r = 4 (dual), e^-1 (low) and e^.1 (inside), A = 1 at e (high), and one with
    A = -2 that was dropped.
    """
    d = [math.log(4.0), -1.0, 0.1, 1.0, 0.0]
    arguments = dict(
        mask=torch.ones(5),
        segment_ids=torch.arange(5),
        advantages=torch.tensor([-1.0, -1.0, -1.0, 1.0, -2.0]),
        lengths=torch.ones(5, dtype=torch.int64),
        keep=torch.tensor([1, 1, 1, 1, 0]),
    )
    output = policy_objective(
        ObjectiveSettings("sequence", 0.2, 0.2, dual_clip=3.0),
        log_probs=torch.tensor(d, dtype=F64, requires_grad=True),
        old_log_probs=torch.zeros(5, dtype=F64),
        num_sequences=5,
        denominator=5,
        **arguments,
    )
    sums = policy_sums(output, **arguments)
    assert len(sums) == len(POLICY_SUMS)
    found = policy_metrics(sums)
    wanted = {
        "objective": (-3 - 0.8 - E(0.1) + 1.2) / 5,
        "num_sequences": 5,
        "num_tokens": 5,
        "kept_fraction": 4 / 5,
        "clip_fraction": 3 / 5,
        "clip_fraction_high": 1 / 5,
        "clip_fraction_low": 1 / 5,
        "dual_clip_fraction": 1 / 5,
        "clip_fraction_positive": 1.0,
        "clip_fraction_negative": 2 / 4,
        "token_clip_fraction": 3 / 5,
        "token_clip_fraction_high": 1 / 5,
        "token_clip_fraction_low": 1 / 5,
        "k1": -sum(d) / 5,
        "k2": sum(x * x for x in d) / 10,
        "k3": sum(E(x) - 1 - x for x in d) / 5,
        "chi2_token": sum(E(2 * x) for x in d) / 5 - 1,
        "positive_mass_left": 0.0,
        "negative_mass_left": 1 / 3,
    }
    assert found == near(wanted)


def test_a_response_on_the_bound_is_kept_and_the_bound_falls_with_the_root_of_its_length():
    """L = 4 around a centre of 0: a sum of 2 deviates by (2/4) sqrt 4 = 1, and the largest weight is exp(1 / sqrt 4)."""
    lengths, none = torch.tensor([4, 4, 16]), torch.zeros(3, dtype=torch.bool)
    sums = torch.tensor([2.0, -2.0, 16.0], dtype=F64)
    result = correct_around(CorrectionRule("mask", 1.0), sums, lengths, none, 0.0)
    assert result.deviations.tolist() == [1.0, -1.0, 4.0] and result.keep.tolist() == [True, True, False]
    result = correct_around(CorrectionRule("truncate", 1.0), sums * 2, lengths, none, 0.0)
    assert result.weights.tolist() == near([E(0.5), E(-1.0), E(0.25)])


@pytest.mark.parametrize(("num_segments", "own"), [(MIN_SEGMENTS - 1, False), (MIN_SEGMENTS, True)])
def test_a_version_has_a_centre_of_its_own_from_its_eighth_segment_on(num_segments, own):
    """Thirty segments at 0 of one version, and few at .5 nats per token of another, all inside a wide bound."""
    lengths = torch.zeros(30, 2)
    lengths[:, 0], lengths[:num_segments, 1] = 4.0, 4.0
    sums = torch.zeros(30, 2, dtype=F64)
    sums[:num_segments, 1] = 2.0
    pooled = 0.5 * num_segments / (30 + num_segments)
    centres = segment_centres(sums, lengths, bound=100.0).tolist()
    assert centres == near([0.0, 0.5 if own else pooled]) and MIN_SEGMENTS == 8


def test_one_token_is_whitened_to_nothing_with_either_divisor():
    for std_ddof in (0, 1):
        assert whitened(torch.tensor([5.0], dtype=F64), std_ddof=std_ddof).tolist() == [0.0]


@pytest.mark.parametrize("d", [-40.0, -1.0, -0.25, 0.25])
def test_a_ratio_far_below_one_keeps_its_digits(d):
    value, gradient, *_ = summed("clip", [d], 1.0, 0.2, 0.5)
    assert value == pytest.approx(E(d), rel=1e-12, abs=0) and gradient == [pytest.approx(E(d), rel=1e-12, abs=0)]


def test_masked_tokens_of_a_clipped_response_are_no_clipped_tokens():
    arguments = dict(
        mask=torch.tensor([1, 0, 1, 1]),
        segment_ids=torch.tensor([0, 0, 0, 1]),
        advantages=torch.tensor([1.0, -1.0]),
        lengths=torch.tensor([2, 1]),
    )
    output = policy_objective(
        ObjectiveSettings("sequence", 0.2, 0.2),
        log_probs=torch.tensor([1.0, 5.0, 1.0, -1.0], dtype=F64, requires_grad=True),
        old_log_probs=torch.zeros(4, dtype=F64),
        num_sequences=2,
        denominator=2,
        **arguments,
    )
    found = policy_metrics(policy_sums(output, **arguments))
    wanted = {"token_clip_fraction": 1.0, "token_clip_fraction_high": 2 / 3, "token_clip_fraction_low": 1 / 3}
    wanted |= {"clip_fraction_high": 1 / 2, "clip_fraction_low": 1 / 2, "num_tokens": 3}
    assert {name: found[name] for name in wanted} == near(wanted)


def test_the_mean_gap_of_a_response_is_over_its_own_tokens():
    trainer = torch.tensor([0.25, 0.5, 9.0, 1.0], dtype=F64)
    mask, ids = torch.tensor([1, 1, 0, 1]), torch.tensor([0, 0, 0, 1])
    sums, _ = mismatch_sums(trainer, torch.zeros(4, dtype=F64), mask, ids, 3)
    assert sequence_mean_log_ratio(sums).tolist() == [0.375, 1.0, 0.0]


def test_masked_tokens_count_in_no_kl():
    log_probs = torch.tensor([-1.0, -2.0, -3.0], dtype=F64, requires_grad=True)
    found = reference_kl(
        ObjectiveSettings(),
        "k1",
        log_probs=log_probs,
        reference_log_probs=torch.tensor([-1.5, -9.0, -3.25], dtype=F64),
        mask=torch.tensor([1, 0, 1]),
        segment_ids=torch.zeros(3, dtype=torch.int64),
        num_sequences=1,
        lengths=torch.tensor([2]),
        denominator=1,
    )
    assert found.sums.tolist() == [0.75, 2.0] and float(found.value) == 0.375


def test_values_are_clipped_in_both_directions():
    """From 0 to -1 where the return is -2, and from 0 to 1 where it is 2: half of 1.8^2 each, without a gradient."""
    values = torch.tensor([-1.0, 1.0, -1.0], dtype=F64, requires_grad=True)
    loss = value_loss(
        values,
        torch.zeros(3),
        torch.tensor([-2.0, 2.0, 0.0]),
        sequence_ids=torch.arange(3),
        lengths=torch.ones(3),
        coefficients=torch.ones(3, dtype=F64),
        clip_range=0.2,
    )
    loss.loss.backward()
    assert values.grad is not None
    assert float(loss.loss) == near(1.8**2 + 0.5) and values.grad.tolist() == [0.0, 0.0, -1.0]
    assert loss.clipped.tolist() == [True, True, False]


def test_a_segment_too_short_to_be_judged_is_not_cut():
    """Beside 20 responses without a gap, one of a segment of 2 tokens, sum 3, and one of 8, sum 0, cut at a bound of 1:
    3 / 10 is less than 1 / sqrt 10.
    """
    lengths, sums = torch.tensor([[4, 4]] * 20 + [[2, 8]]), torch.zeros(21, 2, dtype=F64)
    sums[20, 0] = 3.0
    rule = CorrectionRule("truncate", 1.0, segment_tokens=4)
    result = correct_segments(rule, sums, lengths, torch.zeros(21)).result
    assert result.weights[20].item() == near(E(0.3)) and result.weights[:20].tolist() == near([1.0] * 20)


def test_a_version_of_few_segments_takes_the_centre_of_segments_and_not_of_responses():
    """The lone segment of the second version lies outside, though its response as a whole would not: 2.4 / sqrt 8."""
    lengths, sums = torch.zeros(21, 2), torch.zeros(21, 2, dtype=F64)
    lengths[:, 0] = 4
    lengths[20, 1], sums[20, 1] = 4, 2.4
    assert segment_centres(sums, lengths, bound=1.0).tolist() == [0.0, 0.0]

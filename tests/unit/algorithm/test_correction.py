"""The rule of the mismatch correction: hand-computed cases, and what must not change it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_mega.algorithm.correction import (
    GRID_NATS,
    CorrectionRule,
    batch_centre,
    bounded_centre,
    changed_by_rule,
    correct,
    correct_around,
    exact_sums,
)
from gspo_mega.base.errors import NumericsError


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


# Means 0.2, -0.1, 0.05 over 1, 4, 16 tokens.
SUMS, LENGTHS, NO_VETO = tensor(0.2, -0.4, 0.8), tensor(1, 4, 16), tensor(0, 0, 0)


def decided(rule, sums=SUMS, lengths=LENGTHS, vetoes=NO_VETO):
    return correct(rule, sums, lengths, vetoes)


def test_all_within_the_bound():
    """m = 0.6 / 21 = 0.0285714..., z = sqrt(L) (mean - m)."""
    result = decided(CorrectionRule(bound_nats=0.5))
    assert result.centre == pytest.approx(0.6 / 21, rel=1e-14)
    assert result.deviations.tolist() == pytest.approx([0.171428571428571, -0.257142857142857, 0.085714285714286])
    assert result.keep.all() and result.weights.tolist() == [1.0, 1.0, 1.0]


def test_one_beyond_the_bound_is_dropped_and_leaves_the_centre():
    """The start is 0.04, from (0.2 - m) - 0.2 + 4 (0.05 - m) = 0. There z_2 = 2 (-0.1 - 0.04) = -0.28 < -0.2, so that m
    is the mean of the others, (0.2 + 0.8) / 17.
    """
    m = 1 / 17
    result = decided(CorrectionRule(bound_nats=0.2, kept_weight="ratio"))
    assert result.centre == pytest.approx(m, rel=1e-13)
    assert result.keep.tolist() == [True, False, True]
    assert result.weights.tolist() == pytest.approx([math.exp(0.2 - m), 0.0, math.exp(0.05 - m)], rel=1e-13)
    assert decided(CorrectionRule(bound_nats=0.2)).weights.tolist() == [1.0, 0.0, 1.0]


def test_truncation_cuts_above_only():
    """0.1 - 0.1 + 4 (0.05 - m) = 0, so it starts at 0.05, where only the third is inside: m = 0.8 / 16; the bounds are 0.1, 0.05, 0.025 by length."""
    rule = CorrectionRule("truncate", bound_nats=0.1)
    result = decided(rule)
    assert result.centre == pytest.approx(0.05, rel=1e-13) and result.keep.all()
    assert result.weights.tolist() == pytest.approx([math.exp(0.1), math.exp(-0.15), 1.0], rel=1e-13)
    assert changed_by_rule("truncate", 0.1, result.keep, result.deviations).tolist() == [True, False, False]


def test_no_correction_weighs_one_and_drops_nothing():
    result = decided(CorrectionRule("none", bound_nats=1e-3, token_veto_nats=0.1), vetoes=tensor(0, 3, 0))
    assert result.keep.all() and result.weights.tolist() == [1.0] * 3
    assert not changed_by_rule("none", 1e-3, result.keep, result.deviations).any()


@pytest.mark.parametrize("mode", ["mask", "truncate"])
def test_a_vetoed_token_drops_its_response_and_leaves_the_centre(mode):
    """Without the second response m = (0.2 + 0.8) / 17."""
    result = decided(CorrectionRule(mode), vetoes=tensor(0, 1, 0))
    assert result.centre == pytest.approx(1 / 17, rel=1e-14)
    assert result.keep.tolist() == [True, False, True] and result.weights[1] == 0
    assert changed_by_rule(mode, 0.5, result.keep, result.deviations).tolist() == [False, True, False]


@pytest.mark.parametrize("broken_by", [-3.0, 3.0])
@pytest.mark.parametrize(("healthy_length", "broken_length"), [(64, 16384), (256, 16384), (16384, 64), (256, 256)])
def test_one_broken_response_of_any_length_leaves_the_others_theirs(healthy_length, broken_length, broken_by):
    """15 healthy responses; one is off by 3 nats per token: it does not move m. The plain mean of 15 x 64 and 1 x 16384
    tokens is -2.8.
    """
    sums = tensor(*[healthy_length * -1e-3] * 15, broken_length * broken_by)
    lengths = tensor(*[healthy_length] * 15, broken_length)
    result = correct(CorrectionRule(), sums, lengths, torch.zeros(16))
    assert result.centre == pytest.approx(-1e-3, rel=1e-12)
    assert result.keep.tolist() == [True] * 15 + [False]


MIXED = [64, 128, 512, 2048, 16384, 64, 300, 1000]


@pytest.mark.parametrize("broken_length", [64, 16384])
def test_it_breaks_down_at_half_of_the_responses_however_long(broken_length):
    for num_broken in range(1, 2 * len(MIXED)):
        sums = tensor(*[length * -1e-3 for length in MIXED], *[broken_length * 1e3] * num_broken)
        lengths = tensor(*MIXED, *[broken_length] * num_broken)
        result = correct(CorrectionRule(), sums, lengths, torch.zeros(len(lengths)))
        healthy, broken = result.keep[: len(MIXED)], result.keep[len(MIXED) :]
        if num_broken < len(MIXED):
            assert result.centre == pytest.approx(-1e-3, rel=1e-9) and healthy.all() and not broken.any()
        elif num_broken > len(MIXED):
            assert result.centre == pytest.approx(1e3, rel=1e-9) and broken.all() and not healthy.any()


def test_two_that_contradict_each_other():
    assert batch_centre(tensor(0, 10), tensor(1, 1), 0.5) == pytest.approx(5.0)
    assert not correct(CorrectionRule(), tensor(0, 10), tensor(1, 1), tensor(0, 0)).keep.any()


def test_of_one_of_equal_ones_and_of_none():
    assert batch_centre(tensor(3.0), tensor(4), 0.5) == 0.75
    assert batch_centre(tensor(), tensor(), 0.5) == batch_centre(tensor(0.0), tensor(0), 0.5) == 0.0
    equal = correct(CorrectionRule(bound_nats=1e-9), tensor(-0.3, -1.2, -0.3), tensor(1, 4, 1), tensor(0, 0, 0))
    assert equal.keep.all() and equal.deviations.abs().max() < 1e-15
    empty = correct(CorrectionRule(), tensor(0.0, 2.0), tensor(0, 4), tensor(0, 0))
    assert empty.keep.all() and empty.weights.tolist() == [1.0, 1.0] and empty.centre == 0.5


# Four responses of 4, 9, 1 and 16 tokens with means 0.1, -0.2, 0.9 and 0.05; a token of the last is 10 below. Around
# m = 0.05 they deviate by 2 x 0.05, 3 x -0.25, 1 x 0.85 and 4 x 0.
D = [[0.1, 0.3, -0.1, 0.1], [-0.2] * 9, [0.9], [-10.0] + [10.8 / 15] * 15]
BY_HAND = {
    ("mask", "one", 9.2): [1.0, 1.0, 0.0, 0.0],
    ("mask", "ratio", 9.2): [1.0512710963760241, 0.7788007830714049, 0.0, 0.0],  # e^0.05, e^-0.25
    ("mask", "ratio", None): [1.0512710963760241, 0.7788007830714049, 0.0, 1.0],
    ("truncate", "one", 9.2): [1.0512710963760241, 0.7788007830714049, 2.225540928492468, 0.0],  # e^0.8 of e^0.85
    ("truncate", "one", None): [1.0512710963760241, 0.7788007830714049, 2.225540928492468, 1.0],
    ("none", "one", 9.2): [1.0] * 4,
}


@pytest.mark.parametrize(("mode", "kept_weight", "veto"), BY_HAND)
def test_around_a_known_centre_by_hand(mode, kept_weight, veto):
    """From tokens to weights with a bound of 0.8: the lengths, the centre and the veto all count."""
    rule = CorrectionRule(mode, 0.8, veto, kept_weight)
    ids = torch.tensor([i for i, row in enumerate(D) for _ in row])
    d = tensor(*[value for row in D for value in row])
    lengths = tensor(*[len(row) for row in D])
    vetoed = torch.tensor([any(abs(value) > rule.veto_limit for value in row) for row in D])
    result = correct_around(rule, exact_sums(d, ids, 4), lengths, vetoed, centre=0.05)
    assert result.deviations.tolist() == pytest.approx([0.1, -0.75, 0.85, 0.0], abs=1e-8)
    assert result.weights.tolist() == pytest.approx(BY_HAND[mode, kept_weight, veto], rel=1e-8)


def test_the_centre_of_four_by_hand():
    """Bound 0.8, no veto. All pulls inside: 2 (0.1 - m) + 3 (-0.2 - m) + (0.9 - m) + 4 (0.05 - m) = 0 gives 0.07, where
    the second pulls by -0.81: so 2 (0.1 - m) - 0.8 + 0.9 - m + 4 (0.05 - m) = 0, and the start is 0.5 / 7, where the
    third is 0.829 above: 2 (0.1 - m) - 0.8 + 0.8 + 4 (0.05 - m) = 0, the start is 0.4 / 6. The first and the last are
    inside of it: m = (0.4 + 0.8) / 20 = 0.06. There the second is at 3 x -0.26 = -0.78, inside: m = (1.2 - 1.8) / 29.
    """
    sums, lengths = tensor(0.4, -1.8, 0.9, 0.8), tensor(4, 9, 1, 16)
    assert bounded_centre(sums / lengths, lengths.sqrt(), 0.8) == pytest.approx(0.4 / 6, rel=1e-12)
    assert batch_centre(sums, lengths, 0.8) == pytest.approx(-0.6 / 29, rel=1e-12)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_sum_that_is_not_finite_is_an_error_that_names_the_trajectory(value):
    with pytest.raises(NumericsError, match=r"is -?(nan|inf) for trajectory 1 of the rollout batch"):
        decided(CorrectionRule(), sums=tensor(0.2, value, 0.8))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (dict(mode="clip"), "valid: none, truncate, mask"),
        (dict(kept_weight="w"), "valid: one, ratio"),
        (dict(bound_nats=0.0), "bound_nats must be > 0"),
        (dict(bound_nats=math.inf), "bound_nats must be > 0"),
        (dict(token_veto_nats=-1.0), "token_veto_nats must be > 0"),
    ],
)
def test_a_rule_without_meaning_is_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        CorrectionRule(**arguments)


# Multiples of two numbers without a simple ratio, so that no response lies at the edge of its band to the last bit.
means = st.floats(-2, 2, allow_nan=False).map(lambda x: 0.7390851332151607 * x)
bounds = st.floats(0.05, 3).map(lambda x: 1.0471975511965976 * x)
batches = st.lists(st.tuples(st.integers(1, 300), means, st.booleans()), min_size=1, max_size=12)
modes = st.sampled_from([("mask", "one"), ("mask", "ratio"), ("truncate", "one")])


def columns(batch):
    lengths, means, vetoed = (tensor(*column) for column in zip(*batch, strict=True))
    return (lengths * means / GRID_NATS).round() * GRID_NATS, lengths, vetoed


def away_from_the_edge(result, bound):
    return (result.deviations.abs() - bound).abs() > 1e-9


@settings(max_examples=60, deadline=None)
@given(batches, modes, bounds, st.integers(-(2**34), 2**34))
def test_a_shift_common_to_all_tokens_changes_nothing(batch, mode, bound, steps):
    rule = CorrectionRule(mode[0], bound, kept_weight=mode[1])
    sums, lengths, vetoed = columns(batch)
    plain = correct(rule, sums, lengths, vetoed)
    shift = steps * GRID_NATS
    shifted = correct(rule, sums + shift * lengths, lengths, vetoed)
    safe = away_from_the_edge(plain, bound)
    if not vetoed.all():
        assert shifted.centre == pytest.approx(plain.centre + shift, abs=1e-10)
        assert torch.equal(shifted.keep[safe], plain.keep[safe])
        assert torch.allclose(shifted.weights[safe], plain.weights[safe], rtol=1e-9, atol=1e-10)


@settings(max_examples=60, deadline=None)
@given(batches, modes, bounds, st.randoms(use_true_random=False))
def test_the_order_of_the_responses_and_empty_ones_change_nothing(batch, mode, bound, random):
    rule = CorrectionRule(mode[0], bound, kept_weight=mode[1])
    plain = correct(rule, *columns(batch))
    order = list(range(len(batch)))
    random.shuffle(order)
    sums, lengths, vetoed = columns([batch[i] for i in order])
    empty = [torch.cat([values, tensor(0.0)]) for values in (sums, lengths, vetoed)]
    other = correct(rule, *empty)
    safe = away_from_the_edge(plain, bound)[order]
    assert other.centre == pytest.approx(plain.centre, abs=1e-11)
    assert torch.equal(other.keep[:-1][safe], plain.keep[order][safe])
    assert torch.allclose(other.weights[:-1][safe], plain.weights[order][safe], rtol=1e-10, atol=1e-11)
    assert other.keep[-1] and other.weights[-1] == 1


@settings(max_examples=60, deadline=None)
@given(batches, bounds)
def test_the_start_is_where_the_bounded_pulls_cancel(batch, bound):
    sums, lengths, _ = columns(batch)
    means, roots = sums / lengths, lengths.sqrt()
    m = bounded_centre(means, roots, bound)

    def pull(at):
        return float((roots * (means - at)).clamp(-bound, bound).sum())

    assert pull(m - 1e-9) >= -1e-12 and pull(m + 1e-9) <= 1e-12


@settings(max_examples=60, deadline=None)
@given(batches, bounds)
def test_the_centre_is_the_mean_of_those_inside_and_no_worse_than_its_start(batch, bound):
    sums, lengths, _ = columns(batch)
    means, roots = sums / lengths, lengths.sqrt()
    m, start = batch_centre(sums, lengths, bound), bounded_centre(means, roots, bound)
    inside = (roots * (means - m)).abs() <= bound
    if inside.any():
        assert m == pytest.approx(float(sums[inside].sum() / lengths[inside].sum()), abs=1e-14)
    else:
        assert m == start

    def loss(at):
        return float((roots * (means - at)).square().clamp(max=bound**2).sum())

    assert loss(m) <= loss(start) + 1e-12


def test_sums_are_the_same_in_every_order_and_division():
    """Which packs, which context-parallel ranks: not a bit changes. Plain float64 sums differ."""
    generator = torch.Generator().manual_seed(3)
    d = torch.randn(5000, generator=generator, dtype=torch.float64) * torch.tensor([1e-3, 1.0]).repeat(2500).double()
    ids = torch.arange(5000) % 7
    whole = exact_sums(d, ids, 7)
    order = torch.randperm(5000, generator=generator)
    assert torch.equal(exact_sums(d[order], ids[order], 7), whole)
    half = torch.arange(5000) < 1700
    assert torch.equal(exact_sums(d[half], ids[half], 7) + exact_sums(d[~half], ids[~half], 7), whole)
    plain = torch.zeros(7, dtype=torch.float64).index_add_(0, ids, d)
    assert (whole - plain).abs().max() < 5000 / 7 * GRID_NATS
    assert not torch.equal(plain, torch.zeros(7, dtype=torch.float64).index_add_(0, ids[order], d[order]))

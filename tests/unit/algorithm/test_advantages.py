"""Group-relative advantages."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_mega.algorithm.advantages import decoupled_advantages, group_advantages
from gspo_mega.base.episodes import Group, one_turn_row
from gspo_mega.base.records import Prompt

REWARDS = st.lists(st.tuples(st.sampled_from([0.0, 0.1, 0.5, 1.0]), st.integers(0, 3)), min_size=1, max_size=30)


def advantages(rewards, groups, **options):
    return group_advantages(torch.tensor(rewards), torch.tensor(groups), **options)


@given(pairs=REWARDS, seed=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_groups_are_by_id_in_any_order_and_size(pairs, seed):
    rewards, groups = torch.tensor([r for r, _ in pairs]), torch.tensor([g for _, g in pairs])
    result = group_advantages(rewards, groups)
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(
        group_advantages(rewards[order], groups[order] * -7), result[order], rtol=1e-12, atol=1e-15
    )
    for group in groups.unique():
        members = result[groups == group]
        assert abs(float(members.sum())) < 1e-12
        if float(members.abs().sum()) > 0:
            assert float(members.square().mean()) == pytest.approx(1.0, rel=1e-12)


def test_the_papers_example():
    torch.testing.assert_close(
        advantages([1.0, 0.0, 0.0, 1.0], [0] * 4), torch.tensor([1.0, -1, -1, 1], dtype=torch.float64)
    )
    expected = [math.sqrt(3)] * 2 + [-1 / math.sqrt(3)] * 6
    torch.testing.assert_close(
        advantages([1.0, 1.0] + [0.0] * 6, [5] * 8), torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=0
    )


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e300, -2.5e-10])
@pytest.mark.parametrize("size", [3, 6, 7, 10])
def test_a_constant_group_is_exactly_zero(value, size):
    rewards = torch.full((size,), value, dtype=torch.float64)
    assert torch.equal(group_advantages(rewards, torch.zeros(size)), torch.zeros(size, dtype=torch.float64))


def test_ddof_eps_and_plain_difference():
    rewards = [1.0, 0.0, 0.5]
    sample = advantages(rewards, [0, 0, 0], std_ddof=1)
    assert sample.tolist() == pytest.approx([1.0, -1.0, 0.0], abs=1e-15)
    assert advantages(rewards, [0, 0, 0], divide_by_std=False).tolist() == [0.5, -0.5, 0.0]
    assert advantages(rewards, [0, 0, 0], std_ddof=1, std_eps=0.5).tolist() == pytest.approx([0.5, -0.5, 0.0])
    assert advantages([1.0, 3.0], [0, 1], std_ddof=1).tolist() == [0.0, 0.0]
    assert advantages([1.0, 3.0], [0, 1]).tolist() == [0.0, 0.0]


def test_tiny_and_large_rewards_scale():
    for scale in (1e-200, 1e200):
        rewards = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64) * scale
        assert group_advantages(rewards, torch.zeros(4)).tolist() == [1.0, -1.0, -1.0, 1.0]


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="reward 1 is not finite"):
        advantages([1.0, math.nan], [0, 0])
    with pytest.raises(ValueError, match=r"must be \[N\]"):
        advantages([1.0, 0.0], [0])


def group_of(rewards):
    prompt = Prompt("p:0", "p", (1,), "x")
    return Group.from_rows(
        0,
        prompt,
        [one_turn_row(str(i), 0, prompt, [1], [1], [0.0], [0], "stop", reward=r) for i, r in enumerate(rewards)],
    )


def test_a_tenth_and_two_tenths_are_three_tenths():
    assert 0.1 + 0.2 != 0.3
    assert group_advantages(torch.tensor([0.1 + 0.2, 0.3], dtype=torch.float64), torch.zeros(2)).tolist() == [0.0, 0.0]
    assert group_of([0.1 + 0.2, 0.3]).is_constant


TERMS = st.lists(st.fractions(min_value=0, max_value=100, max_denominator=1000), min_size=1, max_size=40).filter(any)


@given(
    terms=TERMS,
    seed=st.integers(0, 1000),
    sign=st.sampled_from([1, -1]),
    size=st.integers(2, 8),
    ddof=st.sampled_from([0, 1]),
)
@settings(max_examples=150, deadline=None)
def test_equal_fractions_summed_in_any_order_have_no_advantage(terms, seed, sign, size, ddof):
    """Terms of one sign: what cancels is the pool's to judge, which knows the terms."""
    order = random.Random(seed)
    rewards = []
    for _ in range(size):
        order.shuffle(terms)
        rewards.append(sum(sign * float(term) for term in terms))
    assert (
        group_advantages(torch.tensor(rewards, dtype=torch.float64), torch.zeros(size), std_ddof=ddof).tolist()
        == [0.0] * size
    )
    assert group_of(rewards).is_constant


@given(
    value=st.floats(-1e12, 1e12).filter(lambda v: abs(v) > 1e-12),
    difference=st.floats(1e-6, 1.0),
    size=st.integers(2, 8),
    odd=st.integers(0, 7),
)
@settings(max_examples=150, deadline=None)
def test_rewards_a_millionth_apart_are_not_flattened(value, difference, size, odd):
    rewards = [value] * size
    rewards[odd % size] = value * (1 + difference)
    result = group_advantages(torch.tensor(rewards, dtype=torch.float64), torch.zeros(size))
    expected = (size - 1) ** 0.5 * (1 if value > 0 else -1)
    assert float(result[odd % size]) == pytest.approx(expected, rel=1e-9)
    assert not group_of(rewards).is_constant


REWARDS, GROUPS = [1.0, 0.0, 0.0, 5.0, 3.0, 7.0], [4, 4, 4, 9, 9, 2]


def advantages_of(**settings):
    return group_advantages(torch.tensor(REWARDS), torch.tensor(GROUPS), **settings).tolist()


def test_leave_one_out_by_hand():
    """RLOO: 1 - (0 + 0) / 2, 0 - (1 + 0) / 2 twice; 5 - 3 and 3 - 5; nobody else is in the last group."""
    got = advantages_of(baseline="leave_one_out", divide_by_std=False)
    assert got == pytest.approx([1.0, -0.5, -0.5, 2.0, -2.0, 0.0], rel=1e-14)


def test_a_group_baseline_over_the_batchs_deviation_by_hand():
    """REINFORCE++ with a baseline: r - mean_g = 2/3, -1/3, -1/3, 1, -1, 0, whose squares sum to 6/9 + 2 = 8/3."""
    centred = [2 / 3, -1 / 3, -1 / 3, 1.0, -1.0, 0.0]
    got = advantages_of(std_over="batch")
    assert got == pytest.approx([a / (8 / 3 / 6) ** 0.5 for a in centred], rel=1e-14)
    got = advantages_of(std_over="batch", std_ddof=1)
    assert got == pytest.approx([a / (8 / 3 / 5) ** 0.5 for a in centred], rel=1e-14)


def test_a_baseline_of_the_batch_by_hand():
    """REINFORCE++: the mean is 8/3, the squares of r - 8/3 sum to 84 - 6 (8/3)^2 = 124/3."""
    centred = [r - 8 / 3 for r in REWARDS]
    assert advantages_of(baseline="batch", divide_by_std=False) == pytest.approx(centred, rel=1e-14)
    got = advantages_of(baseline="batch", std_over="batch")
    assert got == pytest.approx([a / (124 / 3 / 6) ** 0.5 for a in centred], rel=1e-14)


@pytest.mark.parametrize("settings", [{"std_over": "batch"}, {"baseline": "batch", "std_over": "batch"}])
def test_a_batch_of_equal_rewards_has_no_signal(settings):
    rewards = torch.tensor([0.1 + 0.2, 0.3, 0.3], dtype=torch.float64)
    assert group_advantages(rewards, torch.tensor([0, 0, 1]), **settings).tolist() == [0.0, 0.0, 0.0]


# --- each reward function by itself: GDPO -----------------------------------------------------------------------------


def separate(parts, weights, groups):
    tensors = {name: torch.tensor(values, dtype=torch.float64) for name, values in parts.items()}
    return decoupled_advantages(tensors, weights, torch.tensor(groups)).tolist()


def test_gdpo_tells_apart_what_the_sum_does_not():
    """Two rewards, three responses: (1, 0), (0, 1), (1, 1) in the first group have sums 1, 1, 2. The first reward is
    (1, 0, 1): deviations 1/3, -2/3, 1/3 over sqrt(2)/3; so a = 1/sqrt(2) - 2/sqrt(2), the same, and 2/sqrt(2) twice.
    """
    parts = {"right": [1, 0, 1, 0, 0], "short": [0, 1, 1, 3, 3]}
    root = math.sqrt(2)
    a = [1 / root - 2 / root, 1 / root - 2 / root, 2 / root, 0, 0]
    sd = math.sqrt(sum(x * x for x in a) / 5)
    assert separate(parts, {"right": 1, "short": 1}, [0, 0, 0, 1, 1]) == pytest.approx([x / sd for x in a], rel=1e-12)
    # With weight 1/2 on the second the first two differ, although the sums 1 and 1/2 would give three levels too.
    a = [1 / root - 1 / root, -2 / root + 1 / (2 * root), 1 / root + 1 / (2 * root)]
    sd = math.sqrt(sum(x * x for x in a) / 3)
    got = separate({"right": [1, 0, 1], "short": [0, 1, 1]}, {"right": 1, "short": 0.5}, [0, 0, 0])
    assert got == pytest.approx([x / sd for x in a], rel=1e-12, abs=1e-15)


def test_gdpo_of_one_function_is_the_groups_own_advantage_over_its_deviation():
    rewards, groups = [0.0, 1.0, 1.0, 5.0, 5.0, 7.0, 2.0, 2.0], [0, 0, 0, 1, 1, 1, 2, 2]
    own = group_advantages(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups))
    want = own / own.square().mean().sqrt()
    assert separate({"one": rewards}, {"one": 0.3}, groups) == pytest.approx(want.tolist(), rel=1e-12)


def test_gdpo_is_its_equation_on_random_rewards():
    generator = torch.Generator().manual_seed(3)
    groups = torch.tensor([4] * 5 + [1] * 2 + [9] * 6)
    parts = {name: torch.randn(13, generator=generator, dtype=torch.float64) for name in "abc"}
    weights = {"a": 1.0, "b": 0.2, "c": -2.0}
    sums = [0.0] * 13
    for name, weight in weights.items():
        for group in (4, 1, 9):
            rows = [i for i in range(13) if groups[i] == group]
            mean = sum(float(parts[name][i]) for i in rows) / len(rows)
            sd = math.sqrt(sum((float(parts[name][i]) - mean) ** 2 for i in rows) / len(rows))
            for i in rows:
                sums[i] += weight * (float(parts[name][i]) - mean) / sd
    whole = math.sqrt(sum(x * x for x in sums) / 13)
    got = decoupled_advantages(parts, weights, groups).tolist()
    assert got == pytest.approx([x / whole for x in sums], rel=1e-12)


def test_gdpo_without_a_signal_is_zero_and_a_function_that_was_not_asked_counts_as_zero():
    assert separate({"a": [1, 1], "b": [2, 2]}, {"a": 1, "b": 1}, [0, 0]) == [0, 0]
    asked = separate({"a": [1.0, 0.0], "b": [float("nan"), 3.0]}, {"a": 2, "b": 1}, [0, 0])
    assert asked == separate({"a": [1.0, 0.0], "b": [0.0, 3.0]}, {"a": 2, "b": 1}, [0, 0]) == [1, -1]
    with pytest.raises(ValueError, match="no response has a value of b"):
        separate({"a": [1.0]}, {"a": 1, "b": 1}, [0])

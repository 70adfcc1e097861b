"""GAE by hand, against a slow obvious implementation, and what must not change it; whitening over parts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_mega.algorithm.advantages import generalised_advantages, penalised_rewards, token_rewards, whitened

NUMBERS = st.floats(-4, 4, allow_nan=False, width=32)
SHARES = st.sampled_from([0.0, 0.25, 0.95, 1.0])


def of(sequences, **options):
    """[[A], [R]] of each sequence of (rewards, values), packed in one call."""
    rewards = [r for one, _ in sequences for r in one]
    values = [v for _, one in sequences for v in one]
    ids = [number for number, (one, _) in enumerate(sequences) for _ in one]
    advantages, returns = generalised_advantages(
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor(values, dtype=torch.float64),
        torch.tensor(ids, dtype=torch.int64),
        len(sequences),
        **options,
    )
    lengths = [len(one) for one, _ in sequences]
    parts = zip(advantages.split(lengths), returns.split(lengths), strict=True)
    return [(a.tolist(), r.tolist()) for a, r in parts]


def by_definition(rewards, values, discount, trace, behind):
    """A by its sum, token by token: no recursion, no pairs."""
    after = [*values[1:], behind][: len(values)]
    deltas = [r + discount * n - v for r, v, n in zip(rewards, values, after, strict=True)]
    return [
        sum((discount * trace) ** (later - t) * deltas[later] for later in range(t, len(deltas)))
        for t in range(len(deltas))
    ]


def test_one_reward_at_the_end_by_hand():
    # delta = (1/2 x 1/2 - 1/4, 1/2 x 1 - 1/2, 2 - 1) = (0, 0, 1); gamma lambda = 1/4.
    ((advantages, returns),) = of([([0, 0, 2], [0.25, 0.5, 1.0])], discount=0.5, trace=0.5)
    assert advantages == [1 / 16, 1 / 4, 1.0]
    assert returns == [5 / 16, 3 / 4, 2.0]


def test_rewards_of_two_turns_by_hand():
    # gamma = 1, lambda = 1/2. delta = (1 + 2 - 1, 0 + 0 - 2, 3 + 0 - 0) = (2, -2, 3).
    ((advantages, returns),) = of([([1, 0, 3], [1.0, 2.0, 0.0])], trace=0.5)
    assert advantages == [2 - 1 + 0.75, -2 + 1.5, 3.0]
    assert returns == [2.75, 1.5, 3.0]


def test_a_truncated_sequence_by_hand_with_and_without_bootstrap():
    sequence = ([0, 0], [1.0, 2.0])
    # gamma = lambda = 1/2. Ended: delta = (0, -2). Bootstrapped with 8: delta = (0, 1/2 x 8 - 2) = (0, 2).
    assert of([sequence], discount=0.5, trace=0.5)[0][0] == [-0.5, -2.0]
    behind = torch.tensor([8.0])
    assert of([sequence], discount=0.5, trace=0.5, values_after=behind)[0][0] == [0.5, 2.0]


def test_without_trace_it_is_the_one_step_error_and_with_all_of_it_the_return_less_the_value():
    sequence = ([1, 0, 4], [3.0, -1.0, 2.0])
    assert of([sequence], trace=0.0)[0][0] == [1 - 1 - 3, 2 + 1, 4 - 2]
    assert of([sequence], trace=1.0)[0][1] == [5.0, 4.0, 4.0]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=0, max_size=19), min_size=1, max_size=4),
    SHARES,
    SHARES,
    NUMBERS,
)
def test_packed_sequences_are_what_the_definition_says_of_each(tokens, discount, trace, behind):
    sequences = [([r for r, _ in one], [v for _, v in one]) for one in tokens]
    values_after = torch.full((len(sequences),), behind, dtype=torch.float64)
    packed = of(sequences, discount=discount, trace=trace, values_after=values_after)
    for (rewards, values), (advantages, returns) in zip(sequences, packed, strict=True):
        expected = by_definition(rewards, values, discount, trace, behind)
        assert advantages == pytest.approx(expected, abs=1e-12)
        assert returns == pytest.approx([a + v for a, v in zip(expected, values, strict=True)], abs=1e-12)


def test_a_neighbour_in_the_pack_changes_no_bit():
    sequence = ([0.1, 0.2, 0.7], [0.3, 0.5, 0.9])
    alone = of([sequence], discount=0.9, trace=0.8)[0]
    assert of([([1.0], [2.0]), sequence, ([5.0] * 9, [6.0] * 9)], discount=0.9, trace=0.8)[1] == alone


def test_no_gradient_reaches_the_values():
    values = torch.ones(2, requires_grad=True)
    advantages, returns = generalised_advantages(torch.ones(2), values, torch.zeros(2, dtype=torch.int64), 1)
    assert not advantages.requires_grad and not returns.requires_grad


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"discount": 1.5}, "discount must be in"),
        ({"trace": -0.1}, "trace must be in"),
        ({"values_after": torch.zeros(2)}, r"values_after must be \[1\]"),
    ],
)
def test_wrong_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        of([([1.0], [1.0])], **options)


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"must be \[T\]"):
        generalised_advantages(torch.ones(2), torch.ones(3), torch.zeros(2, dtype=torch.int64), 1)


# --- rewards of tokens ------------------------------------------------------------------------------------------


def test_each_turn_pays_its_last_token():
    assert token_rewards(5, [2, 5], [1.0, -2.0]).tolist() == [0, 1, 0, 0, -2]


def test_rewards_with_one_end_add_up():
    assert token_rewards(2, [2, 2], [1.0, 0.5]).tolist() == [0, 1.5]


@pytest.mark.parametrize("ends", [[0], [4], [2, 1]])
def test_an_end_outside_the_tokens_or_before_the_last_is_refused(ends):
    with pytest.raises(ValueError, match="active tokens; expected"):
        token_rewards(3, ends, [1.0] * len(ends))


def test_every_turn_has_a_reward():
    with pytest.raises(ValueError, match="1 turns have 2 rewards"):
        token_rewards(3, [3], [1.0, 2.0])


def test_the_penalty_is_the_gap_to_the_reference_in_nats():
    rewards = penalised_rewards(
        torch.tensor([0.0, 1.0]), torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0]), coefficient=0.5
    )
    assert rewards.tolist() == [-0.25, 1.5]


# --- whitening --------------------------------------------------------------------------------------------------


def test_whitening_by_hand():
    values = torch.tensor([1.0, 3.0], dtype=torch.float64)
    assert whitened(values).tolist() == [-1.0, 1.0]
    assert whitened(values, std_ddof=1).tolist() == pytest.approx([-1 / math.sqrt(2), 1 / math.sqrt(2)])


@pytest.mark.parametrize("values", [[], [7.0], [0.1 + 0.2, 0.3], [1e9, 1e9]])
def test_equal_advantages_have_no_signal(values):
    assert whitened(torch.tensor(values, dtype=torch.float64)).tolist() == [0.0] * len(values)


def test_ranks_that_share_a_mini_batch_whiten_as_one():
    whole = torch.tensor([1.0, -2.0, 0.5, 4.0, 9.0], dtype=torch.float64)
    parts = [whole[:2], whole[2:], whole[:0]]
    expected = whitened(whole)
    mean = whole.mean()
    of_all = [
        torch.tensor([5.0], dtype=torch.float64),
        whole.sum()[None],
        torch.stack([(whole - mean).square().sum(), whole.square().sum()]),
    ]
    for part, mine in zip(parts, expected.split([2, 3, 0]), strict=True):
        totals = iter(of_all)
        assert whitened(part, lambda _sums, totals=totals: next(totals)).tolist() == pytest.approx(mine.tolist())
        assert next(totals, None) is None

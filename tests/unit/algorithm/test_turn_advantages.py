"""Advantages of turns: the vectors by hand, an implementation of their own in numpy, and what must not change them."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gspo_mega.algorithm.advantages import group_advantages, turn_advantages, turn_returns

ROOT3 = math.sqrt(3)


def chain(*turns):
    """An episode that did not branch, from (tokens, reward) of each turn, as (parent, tokens, reward)."""
    return [(k - 1, tokens, reward) for k, (tokens, reward) in enumerate(turns)]


def advantages_of(*groups, compute=turn_advantages, **options):
    """[[A of each turn] of each episode] of groups of episodes of (parent in the episode, tokens, reward)."""
    parents, tokens, rewards, episodes, group_ids = [], [], [], [], []
    for group_id, group in enumerate(groups):
        for episode in group:
            first, number = len(parents), len({*episodes})
            for parent, n, reward in episode:
                parents.append(parent if parent < 0 else first + parent)
                tokens.append(n)
                rewards.append(reward)
                episodes.append(number)
                group_ids.append(group_id)
    got = compute(
        torch.tensor(rewards, dtype=torch.float64),
        parents=torch.tensor(parents),
        episode_ids=torch.tensor(episodes),
        group_ids=torch.tensor(group_ids),
        num_tokens=torch.tensor(tokens),
        **options,
    ).tolist()
    sizes = [len(episode) for group in groups for episode in group]
    edges = np.cumsum([0, *sizes])
    return [got[a:b] for a, b in itertools.pairwise(edges)]


# V1: R = (1, 1), (0); mu = sigma = 1/2.
V1 = [chain((3, 0.0), (1, 1.0)), chain((2, 0.0))]
# V2: R = (1, 0), (1); mu = 3/4; sigma^2 = ((1/16 + 9/16)/2 + 1/16)/2 = 3/16.
V2 = [chain((2, 1.0), (2, 0.0)), chain((4, 1.0))]
# V3: V2, whose second episode is cut in turns of 1 and 3 tokens with the reward on the second.
V3 = [chain((2, 1.0), (2, 0.0)), chain((1, 0.0), (3, 1.0))]
# V4, gamma = 1/2: R = (0 + 1/2 + 1/4 x 2, 1 + 1/2 x 2, 2) = (1, 2, 2), (0); weights (1/2, 1/4, 1/4), 1:
# mu = (1/2 + 1/2 + 1/2 + 0)/2 = 3/4; sigma^2 = (1/2 x 1/16 + 1/2 x 25/16 + 9/16)/2 = 11/16.
V4 = [chain((2, 0.0), (1, 1.0), (1, 2.0)), chain((5, 0.0))]
# V5, branches: behind the first turn (2 tokens) one of 1 token with reward 4, and one of 2 that is followed by one of 1
# token with reward 8: they weigh 1 and 2 + 1. R = ((1 x 4 + 3 x 8)/4, 4, 8, 8) = (7, 4, 8, 8) with weights (2, 1, 2,
# 1)/6; the other episode's is 1. mu = ((14 + 4 + 16 + 8)/6 + 1)/2 = 4; sigma^2 = ((2 x 9 + 0 + 3 x 16)/6 + 9)/2 = 10.
V5 = [[(-1, 2, 0.0), (0, 1, 4.0), (0, 2, 0.0), (2, 1, 8.0)], chain((3, 1.0))]


@pytest.mark.parametrize(
    "group, discount, expected",
    [
        (V1, 1.0, [[1, 1], [-1]]),
        (V2, 1.0, [[1 / ROOT3, -ROOT3], [1 / ROOT3]]),
        (V3, 1.0, [[1 / ROOT3, -ROOT3], [1 / ROOT3, 1 / ROOT3]]),
        (V4, 0.5, [[x / math.sqrt(11 / 16) for x in (0.25, 1.25, 1.25)], [-0.75 / math.sqrt(11 / 16)]]),
        (V5, 1.0, [[x / math.sqrt(10) for x in (3, 0, 4, 4)], [-3 / math.sqrt(10)]]),
    ],
    ids=["V1", "V2", "V3", "V4", "V5"],
)
def test_vectors_by_hand(group, discount, expected):
    got = advantages_of(group, discount=discount)
    for one, other in zip(got, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-14)


def test_ddof_and_plain_difference_by_hand():
    # V2 with G - 1: sigma^2 = 3/8.
    got = advantages_of(V2, std_ddof=1)
    assert got[0] == pytest.approx([0.25 / math.sqrt(3 / 8), -0.75 / math.sqrt(3 / 8)], rel=1e-14)
    assert advantages_of(V2, divide_by_std=False) == [[0.25, -0.75], [0.25]]
    assert advantages_of([V2[0]], std_ddof=1) == [[0.0, 0.0]], "one episode has no sample deviation"


# ------------------------------------------------------------------------------------------------------------------
# An implementation of its own: paths to the leaves in Fractions, then numpy's averages.

TURN = st.tuples(st.integers(1, 40), st.sampled_from([0.0, 0.25, 0.5, 1.0, -1.0, 3.0]))


@st.composite
def trees(draw):
    """An episode's turns as (parent, tokens, reward)."""
    turns = draw(st.lists(TURN, min_size=1, max_size=6))
    branches = draw(st.booleans())
    return [
        (draw(st.integers(-1, k - 1)) if branches else k - 1, tokens, reward)
        for k, (tokens, reward) in enumerate(turns)
    ]


GROUPS = st.lists(trees(), min_size=2, max_size=5)


def oracle_returns(episode, discount):
    """A turn's return as the mean of its paths': each leaf below it weighs the product of the shares on its way."""
    children = {k: [c for c, (parent, _, _) in enumerate(episode) if parent == k] for k in range(len(episode))}

    def tokens_below(k):
        return episode[k][1] + sum(tokens_below(c) for c in children[k])

    def paths(k):
        if not children[k]:
            return [(Fraction(1), [k])]
        total = sum(tokens_below(c) for c in children[k])
        return [(Fraction(tokens_below(c), total) * w, [k, *path]) for c in children[k] for w, path in paths(c)]

    gamma = Fraction(discount)
    return [
        sum(w * sum(gamma**j * Fraction(episode[turn][2]) for j, turn in enumerate(path)) for w, path in paths(k))
        for k in range(len(episode))
    ]


def oracle(group, discount, ddof, divide):
    returns = [oracle_returns(episode, discount) for episode in group]
    if len({r for episode in returns for r in episode}) == 1 or len(group) <= ddof:
        return [[0.0] * len(episode) for episode in group]
    values = np.concatenate([np.array(episode, dtype=np.float64) for episode in returns])
    weights = np.concatenate([np.array([n for _, n, _ in e]) / sum(n for _, n, _ in e) / len(group) for e in group])
    mean = np.average(values, weights=weights)
    sd = math.sqrt(np.average((values - mean) ** 2, weights=weights) * len(group) / (len(group) - ddof))
    result = (values - mean) / (sd if divide else 1.0)
    return [part.tolist() for part in np.split(result, np.cumsum([len(e) for e in group])[:-1])]


@given(groups=st.lists(GROUPS, min_size=1, max_size=3), discount=st.sampled_from([0.0, 0.5, 0.75, 1.0]), data=st.data())
@settings(max_examples=150, deadline=None)
def test_it_equals_the_oracle(groups, discount, data):
    ddof, divide = data.draw(st.sampled_from([0, 1])), data.draw(st.booleans())
    got = advantages_of(*groups, discount=discount, std_ddof=ddof, divide_by_std=divide)
    expected = [episode for group in groups for episode in oracle(group, discount, ddof, divide)]
    for one, other in zip(got, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-9, abs=1e-9)


@given(group=GROUPS, discount=st.sampled_from([0.0, 0.5, 1.0]))
@settings(max_examples=60, deadline=None)
def test_the_tokens_mean_is_zero_and_their_variance_one(group, discount):
    got = advantages_of(group, discount=discount)
    assume(any(a != 0 for episode in got for a in episode))
    means = [np.average(a, weights=[n for _, n, _ in e]) for a, e in zip(got, group, strict=True)]
    squares = [np.average(np.square(a), weights=[n for _, n, _ in e]) for a, e in zip(got, group, strict=True)]
    assert np.mean(means) == pytest.approx(0, abs=1e-12) and np.mean(squares) == pytest.approx(1, rel=1e-12)


@given(
    shapes=GROUPS,
    rewards=st.lists(st.sampled_from([0.0, 1.0, 0.1, -2.5]), min_size=5, max_size=5),
    ddof=st.integers(0, 1),
)
@settings(max_examples=60, deadline=None)
def test_one_reward_an_episode_gives_the_advantages_of_equation_6(shapes, rewards, ddof):
    group = []
    for turns, reward in zip(shapes, rewards, strict=False):
        inner = {parent for parent, _, _ in turns}
        group.append([(parent, n, 0.0 if k in inner else reward) for k, (parent, n, _) in enumerate(turns)])
    plain = group_advantages(
        torch.tensor(rewards[: len(group)], dtype=torch.float64), torch.zeros(len(group)), std_ddof=ddof
    )
    for got, a in zip(advantages_of(group, std_ddof=ddof), plain.tolist(), strict=True):
        assert got == pytest.approx([a] * len(got), rel=1e-12, abs=1e-15)


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=9), st.integers(0, 1))
@settings(max_examples=60, deadline=None)
def test_of_one_turn_an_episode_it_is_equation_6_to_the_bit(rewards, ddof):
    got = [a for (a,) in advantages_of([chain((n + 1, r)) for n, r in enumerate(rewards)], std_ddof=ddof)]
    values = torch.tensor(rewards, dtype=torch.float64)
    assert got == group_advantages(values, torch.zeros(len(rewards)), std_ddof=ddof).tolist()


@given(group=GROUPS, data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_turn_cut_in_two_changes_nothing(group, data):
    which = data.draw(st.integers(0, len(group) - 1))
    turn = data.draw(st.integers(0, len(group[which]) - 1))
    _, tokens, reward = group[which][turn]
    assume(tokens > 1)
    first = data.draw(st.integers(1, tokens - 1))
    episode = []
    for k, (above, n, r) in enumerate(group[which]):
        above = above + (above >= turn)  # behind the cut turn is behind its second part
        episode += [(above, first, 0.0), (k, tokens - first, reward)] if k == turn else [(above, n, r)]
    cut = [*group[:which], episode, *group[which + 1 :]]
    before, after = advantages_of(group), advantages_of(cut)
    joined = after[which][:turn] + after[which][turn + 1 :]
    assert after[which][turn] == pytest.approx(after[which][turn + 1], rel=1e-9, abs=1e-9)
    for one, other in zip([*after[:which], joined, *after[which + 1 :]], before, strict=True):
        assert one == pytest.approx(other, rel=1e-9, abs=1e-9)


def test_equal_returns_have_no_advantage_and_rounding_is_no_difference():
    assert advantages_of([chain((1, 0.1 + 0.2)), chain((4, 0.3))]) == [[0.0], [0.0]]
    # Equal sums, and turns that are not.
    assert advantages_of([chain((1, 1.0), (1, 0.0)), chain((1, 0.0), (1, 1.0))])[1] != [0.0, 0.0]


def pooled_turns(rewards, *, parents, num_tokens, discount, **inputs):
    """Every turn weighs as much as an episode."""
    returns, alone = turn_returns(rewards, parents, num_tokens, discount), torch.arange(len(rewards))
    inputs |= {"parents": torch.full_like(parents, -1), "episode_ids": alone}
    return turn_advantages(returns, num_tokens=num_tokens, **inputs)


def by_place(rewards, *, parents, num_tokens, discount, **_):
    """Each turn compared with the turns of the same place."""
    places = []
    for parent in parents.tolist():
        places.append(0 if parent < 0 else places[parent] + 1)
    return group_advantages(turn_returns(rewards, parents, num_tokens, discount), torch.tensor(places))


def no_discount(rewards, **inputs):
    return turn_advantages(rewards, **inputs | {"discount": 1.0})


def one_path(rewards, *, parents, **inputs):
    """Branches in the order of sampling, as if each followed the one before."""
    inputs["parents"] = torch.where(parents < 0, parents, torch.arange(len(parents)) - 1)
    return turn_advantages(rewards, **inputs)


@pytest.mark.parametrize(
    "group, discount, wrong",
    [(V2, 1.0, pooled_turns), (V3, 1.0, by_place), (V4, 0.5, no_discount), (V5, 1.0, one_path)],
)
def test_a_wrong_rule_misses_its_vector(group, discount, wrong):
    right = itertools.chain(*advantages_of(group, discount=discount))
    got = itertools.chain(*advantages_of(group, compute=wrong, discount=discount))
    assert max(abs(a - b) for a, b in zip(got, right, strict=True)) > 0.1


ONE = dict(
    parents=torch.tensor([-1, 0]),
    episode_ids=torch.tensor([0, 0]),
    group_ids=torch.tensor([0, 0]),
    num_tokens=torch.tensor([1, 1]),
)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(rewards=torch.tensor([0.0, math.nan])), "reward of turn 1 is not finite"),
        (dict(parents=torch.tensor([-1, 1])), "turn 1: its parent 1 does not precede it"),
        (dict(num_tokens=torch.tensor([1, 0])), "turn 1: 0 sampled tokens"),
        (dict(num_tokens=torch.tensor([1])), "all arguments must be"),
        (dict(episode_ids=torch.tensor([0, 1])), "follows a turn of another episode"),
        (dict(parents=torch.tensor([-1, -1]), group_ids=torch.tensor([0, 1])), "turns in two groups"),
        (dict(discount=1.5), r"discount must be in \[0, 1\]"),
    ],
)
def test_bad_input_is_refused(changes, message):
    arguments = {"rewards": torch.zeros(2), **ONE, **changes}
    with pytest.raises(ValueError, match=message):
        turn_advantages(arguments.pop("rewards"), **arguments)

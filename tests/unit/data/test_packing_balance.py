"""Balance and whole-pack padding: how even the ranks are on long-tailed lengths, and that nothing is padded in vain."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_mega.base.errors import PlanError
from gspo_mega.data.packing import (
    balanced_packs,
    build_micro_batch,
    fewest_bins,
    fill_cheapest,
    padded_length,
    plan_packs,
    plan_rollout_batch,
    sequence_cost,
    waiting_costs,
)

CROSSOVER = 50_000
LONGEST = 32_768


def long_tailed(num: int, seed: int) -> list[int]:
    """Log-normal lengths, median 4k, most of the tokens in the tail, cut at 32k."""
    lengths = np.random.default_rng(seed).lognormal(np.log(4000), 1.0, num)
    return np.clip(lengths, 16, LONGEST).astype(int).tolist()


def costs_of(lengths, pad):
    return [sequence_cost(padded_length(n, pad), CROSSOVER) for n in lengths]


@pytest.mark.parametrize("num_ranks", [8, 64])
@pytest.mark.parametrize("seed", range(4))
def test_long_tails_cost_under_five_percent(num_ranks, seed):
    lengths = long_tailed(512, seed)
    plan = plan_packs(lengths, LONGEST, 8, num_ranks, CROSSOVER, pack_multiple=128)
    spent, at_every_pack = waiting_costs(plan, costs_of(lengths, 8))
    useful = sum(sequence_cost(n, CROSSOVER) for n in lengths)
    assert 1 - useful / (num_ranks * spent) < 0.05
    assert at_every_pack >= spent


def test_one_longest_sequence_is_the_bound_and_is_met():
    lengths = [LONGEST] + [100] * 64
    plan = plan_packs(lengths, LONGEST, 1, 8, CROSSOVER)
    assert waiting_costs(plan, costs_of(lengths, 1))[0] == sequence_cost(LONGEST, CROSSOVER)
    assert [pack for rank in plan for pack in rank if 0 in pack] == [[0]]


@pytest.mark.parametrize("num_ranks", [8, 64])
def test_packs_that_are_synchronised_are_made_alike(num_ranks):
    lengths = long_tailed(512, 0)
    costs = costs_of(lengths, 8)
    alone, together = (
        plan_packs(lengths, LONGEST, 8, num_ranks, CROSSOVER, synchronised_packs=s) for s in (False, True)
    )
    assert waiting_costs(together, costs)[1] < waiting_costs(alone, costs)[1]
    assert waiting_costs(together, costs)[0] >= waiting_costs(alone, costs)[0]


def test_each_of_a_hundred_thousand_sequences_is_in_one_pack():
    plan = plan_packs(long_tailed(100_000, 0), LONGEST, 8, 64, CROSSOVER)
    assert sorted(i for rank in plan for pack in rank for i in pack) == list(range(100_000))


@given(
    lengths=st.lists(st.integers(1, 64), max_size=40),
    room=st.integers(64, 200),
    ranks=st.integers(1, 6),
    together=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_bins_keep_their_room_and_no_item_is_lost(lengths, room, ranks, together):
    costs = [n + n * n / 30 for n in lengths]
    plan = balanced_packs(lengths, costs, room, ranks, together)
    assert len(plan) == ranks and len({len(packs) for packs in plan}) == 1
    assert sorted(i for packs in plan for pack in packs for i in pack) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in pack) <= room for packs in plan for pack in packs)
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    assert len(plan[0]) == max(1, -(-len(fewest_bins(order, lengths, room)) // ranks))
    for packs in plan:
        by_cost = [sum(costs[i] for i in pack) for pack in packs]
        assert by_cost == sorted(by_cost, reverse=True)
    spent = waiting_costs(plan, costs)
    assert spent[1] >= spent[0] - 1e-9 and spent[0] >= max([*costs, sum(costs) / ranks], default=0) - 1e-9


@given(
    lengths=st.lists(st.integers(1, 64), min_size=1, max_size=40), room=st.integers(64, 200), bins=st.integers(1, 12)
)
@settings(max_examples=150, deadline=None)
def test_spread_is_the_greedy_it_says(lengths, room, bins):
    """Against the plain loop: every item to the cheapest bin that has room."""
    costs = [n + n * n / 30 for n in lengths]
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    left, spent, want = [room] * bins, [0.0] * bins, [[] for _ in range(bins)]
    for item in order:
        fitting = [b for b in range(bins) if left[b] >= lengths[item]]
        if not fitting:
            want = None
            break
        target = min(fitting, key=lambda b: (spent[b], b))
        left[target] -= lengths[item]
        spent[target] += costs[item]
        want[target].append(item)
    assert fill_cheapest(order, lengths, costs, room, bins) == want


def trajectory(num_tokens):
    response = num_tokens - 1
    return {
        "prompt_token_ids": [1],
        "response_token_ids": list(range(2, 2 + response)),
        "response_mask": [1] * response,
        "rollout_log_probs": [-1.0] * response,
    }


@given(
    lengths=st.lists(st.integers(2, 60), min_size=1, max_size=20),
    pad=st.sampled_from([1, 2, 4]),
    blocks=st.sampled_from([1, 4, 8]),
    ranks=st.integers(1, 3),
)
@settings(max_examples=80, deadline=None)
def test_packs_are_padded_to_their_multiple_and_no_further(lengths, pad, blocks, ranks):
    multiple, budget = pad * blocks, 130
    plans = plan_rollout_batch(
        lengths,
        num_mini_batches=1,
        budget_tokens=budget,
        pad_multiple=pad,
        num_data_parallel=ranks,
        seed=1,
        step=0,
        pack_multiple=multiple,
    )
    trajectories = [trajectory(length) for length in lengths]
    for plan in plans:
        for rows in plan.mini_batches[0]:
            batch = build_micro_batch(trajectories, rows, pad, (), multiple)
            sizes = np.diff(batch.cu_seqlens)
            assert batch.num_tokens == sizes.sum() <= budget and batch.num_tokens % multiple == 0
            needed = sum(padded_length(lengths[row], pad) for row in rows)
            assert batch.num_tokens - needed < multiple or not rows
            for s, row in enumerate(rows[:-1]):
                assert sizes[s] == padded_length(lengths[row], pad)
            if not rows:
                assert batch.num_tokens == multiple and batch.trajectory_index.tolist() == [-1]
            assert batch.sequence["length"].sum() == batch.loss_mask.sum() == sum(lengths[row] - 1 for row in rows)
            for name in ("token_ids", "labels", "loss_mask", "rollout_log_probs", "position_ids", "sequence_ids"):
                assert getattr(batch, name).shape == (batch.num_tokens,)


def test_a_pack_of_one_is_padded_behind_its_sequence():
    batch = build_micro_batch([trajectory(5), trajectory(3)], [0, 1], 2, (), 16)
    assert batch.cu_seqlens.tolist() == [0, 6, 16]
    assert batch.position_ids.tolist() == [*range(6), *range(10)]
    assert batch.loss_mask.tolist() == [1, 1, 1, 1, 0, 0] + [1, 1] + [0] * 8
    assert batch.labels.tolist() == [2, 3, 4, 5, 0, 0] + [2, 3] + [0] * 8


def test_the_budget_is_what_whole_multiples_of_it_hold():
    # 24 tokens hold one multiple of 16: two sequences of 10 do not share a pack, and one of 17 fits in none.
    assert plan_packs([10, 10], 24, 2, 1, pack_multiple=16) == [[[0], [1]]]
    with pytest.raises(
        PlanError,
        match=(
            r"sequence 0 has 17 tokens \(32 padded to a multiple of 16\); batch.micro_batch_tokens is 24 .* at least 32"
        ),
    ):
        plan_packs([17], 24, 2, 1, pack_multiple=16)

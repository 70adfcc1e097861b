"""Mini-batches, packs and micro-batches: nothing lost, nothing twice, budgets kept, labels aligned."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_mega.base.errors import PlanError
from gspo_mega.data.packing import (
    build_micro_batch,
    padded_length,
    plan_packs,
    plan_rollout_batch,
    response_values,
    sequence_cost,
    split_mini_batches,
)

LENGTHS = st.lists(st.integers(1, 200), min_size=1, max_size=60)


@given(lengths=LENGTHS, budget=st.integers(208, 900), pad=st.sampled_from([1, 2, 4, 8]), ranks=st.integers(1, 5))
@settings(max_examples=120, deadline=None)
def test_packs_hold_every_sequence_once_within_the_budget(lengths, budget, pad, ranks):
    packs = plan_packs(lengths, budget, pad, ranks)
    assert len(packs) == ranks
    assert len({len(rank) for rank in packs}) == 1 and len(packs[0]) >= 1
    assert sorted(i for rank in packs for pack in rank for i in pack) == list(range(len(lengths)))
    for rank in packs:
        for pack in rank:
            assert sum(padded_length(lengths[i], pad) for i in pack) <= budget
    assert packs == plan_packs(list(lengths), budget, pad, ranks)
    needed = -(-sum(padded_length(n, pad) for n in lengths) // budget)
    assert len(packs[0]) <= 2 * -(-needed // ranks) + 1  # not one sequence a pack


def test_costs_are_balanced_over_ranks_and_within_a_turn():
    lengths = np.random.default_rng(0).integers(100, 4000, size=256).tolist()
    packs = plan_packs(lengths, 16384, 8, 4)
    cost = np.array(
        [[sum(sequence_cost(padded_length(lengths[i], 8)) for i in pack) for pack in rank] for rank in packs]
    )
    assert cost.sum(axis=1).max() / cost.sum(axis=1).min() < 1.02
    assert (cost.max(axis=0) / cost.min(axis=0)).max() < 1.1


def test_attention_makes_one_long_sequence_as_dear_as_many_short_ones():
    assert sequence_cost(8192) == 2 * 8192
    packs = plan_packs([8000] + [1000] * 12, 16000, 1, 2)
    long_rank = next(rank for rank in packs if any(0 in pack for pack in rank))
    other = next(rank for rank in packs if rank is not long_rank)
    assert sum(len(p) for p in other) > sum(len(p) for p in long_rank)
    tokens = [sum(([8000] + [1000] * 12)[i] for p in rank for i in p) for rank in (long_rank, other)]
    cost = [sum(sequence_cost(([8000] + [1000] * 12)[i]) for p in rank for i in p) for rank in (long_rank, other)]
    assert abs(cost[0] - cost[1]) / sum(cost) < 0.1 and tokens[0] != tokens[1]


def test_fewer_sequences_than_ranks_leave_filler():
    assert plan_packs([5, 3], 8, 1, 4) == [[[0]], [[1]], [[]], [[]]]


def test_a_sequence_beyond_the_budget_is_an_error_that_says_what_is_needed():
    with pytest.raises(
        PlanError,
        match=(
            r"sequence 1 has 9 tokens \(12 padded to a multiple of 4\); batch.micro_batch_tokens is 10 .* at least 12"
        ),
    ):
        plan_packs([2, 9], 10, 4, 1)
    with pytest.raises(PlanError, match="sequence 0 has no tokens"):
        plan_packs([0], 10, 4, 1)


@given(n=st.integers(1, 200), parts=st.integers(1, 8), seed=st.integers(0, 2**31 - 1), step=st.integers(0, 10_000))
@settings(max_examples=80, deadline=None)
def test_mini_batches_deal_every_trajectory_once(n, parts, seed, step):
    if parts > n:
        with pytest.raises(PlanError, match="num_mini_batches"):
            split_mini_batches(n, parts, seed, step)
        return
    split = split_mini_batches(n, parts, seed, step)
    assert sorted(i for part in split for i in part) == list(range(n))
    assert max(map(len, split)) - min(map(len, split)) <= 1
    assert split == split_mini_batches(n, parts, seed, step)


def test_mini_batches_depend_on_seed_and_step():
    splits = {str(split_mini_batches(64, 4, seed, step)) for seed in (1, 2) for step in (0, 1)}
    assert len(splits) == 4
    assert split_mini_batches(6, 1, 3, 0) != [[0, 1, 2, 3, 4, 5]]


def trajectory(rng, index):
    prompt, response = rng.integers(1, 6), rng.integers(0, 9)
    return {
        "prompt_token_ids": rng.integers(1, 100, prompt).tolist(),
        "response_token_ids": rng.integers(1, 100, response).tolist(),
        "response_mask": rng.integers(0, 2, response).tolist(),
        "rollout_log_probs": (-rng.random(response)).tolist(),
        "advantage": float(index) - 3.5,
    }


@given(
    seed=st.integers(0, 10_000),
    n=st.integers(1, 30),
    pad=st.sampled_from([1, 2, 8]),
    ranks=st.integers(1, 3),
    mini=st.integers(1, 4),
)
@settings(max_examples=60, deadline=None)
def test_a_planned_and_packed_rollout_batch_is_restored(seed, n, pad, ranks, mini):
    rng = np.random.default_rng(seed)
    trajectories = [trajectory(rng, i) for i in range(n)]
    lengths = [len(t["prompt_token_ids"]) + len(t["response_token_ids"]) for t in trajectories]
    plans = plan_rollout_batch(
        lengths,
        num_mini_batches=min(mini, n),
        budget_tokens=40,
        pad_multiple=pad,
        num_data_parallel=ranks,
        seed=seed,
        step=3,
    )
    assert sorted(row for plan in plans for row in plan.rows) == list(range(n))
    for m in range(min(mini, n)):
        assert len({len(plan.mini_batches[m]) for plan in plans}) == 1
    for plan in plans:
        seen = {}
        for packs in plan.mini_batches:
            for rows in packs:
                batch = build_micro_batch(trajectories, rows, pad, ("advantage",))
                assert batch.num_tokens <= 40
                check_arrays(batch, trajectories, pad)
                # token and label arrays give back every trajectory in its row of the batch
                for row, labels in response_values(batch, batch.labels).items():
                    assert row not in seen
                    seen[row] = labels.tolist()
        assert seen == {row: trajectories[row]["response_token_ids"] for row in plan.rows}


def check_arrays(batch, trajectories, pad):
    assert batch.cu_seqlens[0] == 0 and batch.cu_seqlens[-1] == batch.num_tokens and batch.cu_seqlens.dtype == np.int32
    for s, row in enumerate(batch.trajectory_index):
        start, end = batch.cu_seqlens[s], batch.cu_seqlens[s + 1]
        assert (end - start) % pad == 0 and (batch.sequence_ids[start:end] == s).all()
        assert batch.position_ids[start:end].tolist() == list(range(end - start))
        if row < 0:
            assert end - start == pad and not batch.loss_mask[start:end].any() and batch.sequence["advantage"][s] == 0
            continue
        t = trajectories[row]
        tokens = t["prompt_token_ids"] + t["response_token_ids"]
        mask = [0] * len(t["prompt_token_ids"]) + t["response_mask"]
        log_probs = [0.0] * len(t["prompt_token_ids"]) + t["rollout_log_probs"]
        assert batch.sequence["advantage"][s] == t["advantage"]
        assert batch.sequence["length"][s] == sum(mask) == batch.loss_mask[start:end].sum()
        for p in range(end - start):
            following = p + 1 < len(tokens)
            assert batch.token_ids[start + p] == (tokens[p] if p < len(tokens) else 0)
            assert batch.labels[start + p] == (tokens[p + 1] if following else 0)
            assert batch.loss_mask[start + p] == (mask[p + 1] if following else 0)
            assert batch.rollout_log_probs[start + p] == np.float32(
                log_probs[p + 1] if following and mask[p + 1] else 0
            )


def test_trajectories_that_contradict_themselves_are_refused():
    good = {
        "prompt_token_ids": [1],
        "response_token_ids": [2, 3],
        "response_mask": [1, 1],
        "rollout_log_probs": [-1.0, -1.0],
    }
    with pytest.raises(ValueError, match="row 1: 2 response tokens, 2 mask entries, 1 log-probs"):
        build_micro_batch([good, good | {"rollout_log_probs": [-1.0]}], [0, 1], 2)
    with pytest.raises(ValueError, match="row 0: no prompt token"):
        build_micro_batch([good | {"prompt_token_ids": []}], [0], 2)

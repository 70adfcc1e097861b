"""Forests of packs: against a trie that is built token by token, and packs of trees that lose and repeat nothing."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_mega.base.errors import PlanError
from gspo_mega.data.forest import forest_cost, in_tree_order, lay_out, tree_pieces
from gspo_mega.data.packing import (
    build_micro_batch,
    plan_packs,
    plan_rollout_batch,
    plan_tree_packs,
    response_values,
    sequence_cost,
    shareable_tokens,
)

ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=10)


def common_prefix(one: list[int], other: list[int]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other)))


@given(rows=ROWS)
@settings(max_examples=150, deadline=None)
def test_a_forest_is_the_trie_of_its_rows(rows):
    rows = sorted(rows)  # in tree order
    shared = [0, *(common_prefix(one, other) for one, other in itertools.pairwise(rows))]
    forest = lay_out([len(row) for row in rows], shared)
    prefixes = {tuple(row[: k + 1]) for row in rows for k in range(len(row))}
    assert forest.node_starts[-1] == len(prefixes)
    # Two positions of rows are computed at one place exactly if they end the same prefix.
    place_of: dict[tuple[int, ...], int] = {}
    at = iter(forest.computed_at.tolist())
    for row in rows:
        for k in range(len(row)):
            assert place_of.setdefault(tuple(row[: k + 1]), place := next(at)) == place
    assert sorted(place_of.values()) == list(range(len(prefixes)))
    # A token's ancestors are those of its node whose range of descendants holds it, and nothing else.
    prefix_at = {place: prefix for prefix, place in place_of.items()}
    spans = list(itertools.pairwise(forest.node_starts.tolist()))
    for place, prefix in prefix_at.items():
        seen = [
            earlier
            for (start, stop), end in zip(spans, forest.node_ends.tolist(), strict=True)
            if start <= place < end
            for earlier in range(start, min(stop, place + 1))
        ]
        assert [prefix_at[one] for one in seen] == [prefix[: k + 1] for k in range(len(prefix))]
    leaving = [sum(1 for other in rows if other[: len(p)] == list(p)) for p in map(tuple, rows)]
    assert all(count >= 1 for count in leaving)


def test_rows_that_claim_to_share_more_than_they_have_are_refused():
    for sizes, shared in (([3, 5], [0, 4]), ([5, 3], [0, 4]), ([5], [1])):
        with pytest.raises(ValueError, match="cannot share"):
            lay_out(sizes, shared)


def test_rows_with_the_same_prompt_become_neighbours_in_the_order_of_the_first():
    assert in_tree_order([(1, 2), (3,), (1, 2), (1,), (3,)], "prompts") == ([0, 2, 1, 4, 3], [0, 2, 0, 1, 0])


def test_the_cost_of_a_forest_is_that_of_its_rows_without_what_they_share():
    assert forest_cost([8192], [0], 8192) == sequence_cost(8192)
    # Three rows of 100 tokens after 1000: the prefix once, and each row's own tokens attend to 1000 to 1100.
    own = 100 + (1100**2 - 1000**2) / 8192
    assert forest_cost([1100] * 3, [0, 1000, 1000], 8192) == pytest.approx(sequence_cost(1000) + 3 * own)


GROUPS = st.lists(
    st.tuples(st.integers(1, 60), st.lists(st.integers(1, 60), min_size=1, max_size=8)), min_size=1, max_size=8
)


@given(groups=GROUPS, budget=st.integers(120, 400), ranks=st.integers(1, 4), multiple=st.sampled_from([1, 2, 8]))
@settings(max_examples=100, deadline=None)
def test_packs_of_trees_hold_every_row_once_within_the_budget(groups, budget, ranks, multiple):
    prompts = [(g,) * prompt for g, (prompt, responses) in enumerate(groups) for _ in responses]
    units = [g for g, (_, responses) in enumerate(groups) for _ in responses]
    lengths = [prompt + response for prompt, responses in groups for response in responses]
    packs = plan_tree_packs(lengths, prompts, units, "prompts", budget, ranks, pack_multiple=multiple)
    assert len(packs) == ranks and len({len(rank) for rank in packs}) == 1
    assert sorted(i for rank in packs for pack in rank for i in pack) == list(range(len(lengths)))
    for pack in (pack for rank in packs for pack in rank if pack):
        own = sum(lengths[i] - len(prompts[i]) for i in pack) + sum(map(len, {prompts[i] for i in pack}))
        assert -(-own // multiple) * multiple <= budget
    assert packs == plan_tree_packs(
        list(lengths), list(prompts), list(units), "prompts", budget, ranks, pack_multiple=multiple
    )


def test_whole_trees_stay_in_one_pack_on_one_rank_if_they_fit():
    prompts = [(g,) * 50 for g in range(6) for _ in range(8)]
    packs = plan_tree_packs([60] * 48, prompts, [g for g in range(6) for _ in range(8)], "prompts", 300, 1)
    for g in range(6):
        assert sum(any(prompts[i] == (g,) * 50 for i in pack) for pack in packs[0]) == 1
    assert len(packs[0]) == 3 and len(plan_packs([60] * 48, 300, 1, 1)[0]) == 10


def test_one_group_is_cut_for_ranks_that_would_have_nothing():
    packs = plan_tree_packs([132] * 16, [(7,) * 100] * 16, [0] * 16, "prompts", 4096, 4)
    assert [len(pack) for rank in packs for pack in rank] == [4, 4, 4, 4]


def test_ranks_are_balanced_by_what_trees_cost_and_not_by_rows():
    # A group of 8 costs 256 + 8 x 64 tokens: five such groups on four ranks are cut, because two on one rank would
    # leave the others waiting.
    prompts = [(g,) * 256 for g in range(5) for _ in range(8)]
    packs = plan_tree_packs([320] * 40, prompts, [0] * 40, "prompts", 8192, 4, attention_crossover_tokens=10**9)
    loads = [
        sum(64 for pack in rank for _ in pack) + 256 * sum(len({prompts[i] for i in pack}) for pack in rank)
        for rank in packs
    ]
    assert loads == [768 + 256 + 128] * 4


def test_a_tree_beyond_a_pack_is_cut_with_its_prefix_repeated():
    pieces = tree_pieces([4, 5, 6, 7], [130] * 4, [0, 100, 100, 100], 165, float("inf"), 8192)
    assert [(piece.rows, piece.size) for piece in pieces] == [([4, 5], 160), ([6, 7], 160)]
    with pytest.raises(PlanError, match="micro_batch_tokens is 120 and must be at least 130"):
        plan_tree_packs([130], [(1,) * 100], [0], "prompts", 120, 1)


def test_a_group_is_in_one_mini_batch():
    prompts = [(g, g) for g in range(6) for _ in range(4)]
    plans = plan_rollout_batch(
        [5] * 24,
        num_mini_batches=3,
        budget_tokens=64,
        pad_multiple=1,
        num_data_parallel=2,
        seed=3,
        step=1,
        unit_of=[g for g in range(6) for _ in range(4)],
        share_prefixes="prompts",
        shareable=prompts,
    )
    for m in range(3):
        rows = [row for plan in plans for pack in plan.mini_batches[m] for row in pack]
        assert len(rows) == 8 and len({prompts[row] for row in rows}) == 2


@given(rows=ROWS, multiple=st.sampled_from([1, 4]))
@settings(max_examples=80, deadline=None)
def test_a_pack_that_shares_everything_computes_each_prefix_once(rows, multiple):
    rows = [row for row in rows if len(row) > 1] or [[1, 2]]
    records = [trajectory(row[:1], row[1:]) for row in rows]
    pack = build_micro_batch(records, range(len(rows)), 1, pack_multiple=multiple, share_prefixes="full")
    prefixes = {tuple(row[: k + 1]) for row in rows for k in range(len(row))}
    assert len(prefixes) <= pack.num_computed < len(prefixes) + multiple and pack.num_computed % multiple == 0
    first = pack.first_rows()
    computed_at = np.arange(pack.num_tokens) if pack.computed_at is None else pack.computed_at
    assert np.array_equal(pack.token_ids[first][computed_at], pack.token_ids)
    assert np.array_equal(pack.position_ids[first][computed_at], pack.position_ids)
    # Each row has its own labels, whatever it shares.
    assert sorted(pack.trajectory_index.tolist()) == list(range(len(rows)))
    for row, values in response_values(pack, pack.rollout_log_probs).items():
        assert values.tolist() == [-float(token) for token in rows[row][1:]]
    for row, values in response_values(pack, pack.labels).items():
        assert values.tolist() == rows[row][1:]


@given(
    rows=st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=12), min_size=1, max_size=14),
    mode=st.sampled_from(["prompts", "full"]),
    budget=st.integers(12, 40),
    ranks=st.integers(1, 3),
    routed=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=120, deadline=None)
def test_planned_packs_are_built_within_the_budget(rows, mode, budget, ranks, routed, seed):
    rng = np.random.default_rng(seed)
    records = [trajectory(row[:2], row[2:]) for row in rows]
    for record, row in zip(records, rows, strict=True):
        record["routed_experts"] = rng.integers(0, 2, (len(row) - 1, 1, 1), dtype=np.uint8) if routed else None
    packs = plan_tree_packs(
        [len(row) for row in rows],
        [shareable_tokens(record, mode) for record in records],
        rng.integers(0, 3, len(rows)).tolist(),
        mode,
        budget,
        ranks,
        routes=[record["routed_experts"] for record in records] if routed else (),
    )
    assert sorted(row for rank in packs for pack in rank for row in pack) == list(range(len(rows)))
    for pack in (pack for rank in packs for pack in rank if pack):
        built = build_micro_batch(records, pack, 1, share_prefixes=mode)
        assert built.num_computed <= budget
        if not routed:
            continue
        # A shared position has one route, that of every row which shares it.
        first = built.first_rows()
        stands = first if built.computed_at is None else first[built.computed_at]
        routes = [np.append(records[row]["routed_experts"][:, 0, 0], 255) for row in built.trajectory_index]
        flat = np.concatenate(routes)
        known = flat != 255
        assert np.array_equal(flat[stands][known], flat[known])


def test_branches_of_an_episode_are_one_tree_and_cut_with_what_they_share():
    history = list(range(10, 40))
    rows = [history + [1] * 5, history + [2] * 5, [*history[:20], *[3] * 15], [*history[:20], *[4] * 5]]
    assert in_tree_order(rows, "full") == ([2, 3, 0, 1], [0, 20, 20, 30])
    lengths = [len(row) for row in rows]
    (whole,) = plan_tree_packs(lengths, rows, [0] * 4, "full", 64, 1)[0]
    assert sorted(whole) == [0, 1, 2, 3]  # 20 + 5 + 15 + 10 + 2 x 5 tokens are 60
    packs = plan_tree_packs(lengths, rows, [0] * 4, "full", 40, 1)[0]
    assert sorted(row for pack in packs for row in pack) == [0, 1, 2, 3] and len(packs) == 2


def trajectory(prompt, response, mask=None):
    return {
        "prompt_token_ids": prompt,
        "response_token_ids": response,
        "response_mask": mask or [1] * len(response),
        "rollout_log_probs": [-float(token) for token in response],
    }


def test_a_pack_with_a_shared_prompt_by_hand():
    rows = [
        trajectory([1, 2, 3], [11, 12]),
        trajectory([4, 5], [21]),
        trajectory([1, 2, 3], [13, 14, 15], [1, 0, 1]),
    ]
    pack = build_micro_batch(rows, [0, 1, 2], 4, pack_multiple=4, share_prefixes="prompts")
    assert pack.trajectory_index.tolist() == [0, 2, 1]
    # Rows as they were, without padding but for the last, which brings the computed tokens from 11 to 12.
    assert pack.token_ids.tolist() == [1, 2, 3, 11, 12, 1, 2, 3, 13, 14, 15, 4, 5, 21, 0]
    assert pack.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 0, 1, 2, 3]
    assert pack.cu_seqlens.tolist() == [0, 5, 11, 15]
    assert pack.computed_at is not None and pack.node_starts is not None and pack.node_ends is not None
    assert pack.computed_at.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 7, 8, 9, 10, 11]
    assert pack.node_starts.tolist() == [0, 3, 5, 8, 12] and pack.node_ends.tolist() == [8, 5, 8, 12]
    assert pack.num_computed == 12 and pack.num_tokens == 15
    # The prompt's last token, computed at 2, predicts the first token of both responses.
    predicting = [(int(pack.computed_at[p]), int(pack.labels[p])) for p in np.flatnonzero(pack.loss_mask)]
    assert predicting == [(2, 11), (3, 12), (2, 13), (6, 15), (9, 21)]
    values = response_values(pack, np.arange(15.0))
    assert {row: part.tolist() for row, part in values.items()} == {0: [2, 3], 2: [7, 8, 9], 1: [12]}


def test_without_a_common_prompt_a_pack_is_what_it_is_without_sharing():
    rows = [trajectory([1, 2], [3]), trajectory([1, 2, 2], [4, 5])]
    shared, plain = (build_micro_batch(rows, [0, 1], 1, share_prefixes=mode) for mode in ("prompts", "off"))
    assert shared.computed_at is None and shared.node_starts is None
    for name, array in vars(plain).items():
        if isinstance(array, np.ndarray):
            assert np.array_equal(array, getattr(shared, name)), name

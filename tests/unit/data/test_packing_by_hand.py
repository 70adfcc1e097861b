"""Bins that an item fills exactly, and what a pack has where nobody trains."""

from __future__ import annotations

import numpy as np

from gspo_mega.data.packing import balanced_packs, build_micro_batch, fewest_bins, fill_cheapest, waiting_costs


def test_an_item_may_fill_the_room_that_is_left_exactly():
    assert fewest_bins([0, 1], [6, 4], 10) == [[0, 1]]
    assert fewest_bins([0, 1, 2], [6, 5, 4], 10) == [[0, 2], [1]]
    assert fewest_bins([0, 1], [6, 5], 10) == [[0], [1]]


def test_a_bin_that_was_too_full_comes_back_for_an_item_that_fits_exactly():
    """Room 10. The cheaper bin has 2 left, the other 3: the item of 3 goes to the second, that of 2 to the first."""
    sizes, costs = [8, 7, 3, 2], [1.0, 9.0, 1.0, 1.0]
    assert fill_cheapest([0, 1, 2, 3], sizes, costs, 10, 2) == [[0, 3], [1, 2]]
    assert fill_cheapest([0, 1, 2], [8, 7, 4], costs, 10, 2) is None


def test_packs_of_unlike_cost_are_dealt_back_and_forth():
    """Seven sequences on two ranks in four turns: the dearest rank costs 69.5; in one direction it would be 73.75."""
    sizes = [6, 7, 8, 9, 5, 7, 7]
    costs = [size + size * size / 4 for size in sizes]
    plan = balanced_packs(sizes, costs, 10, 2)
    assert waiting_costs(plan, costs) == (69.5, 79.0)
    assert sorted(item for rank in plan for pack in rank for item in pack) == list(range(7))


def test_values_of_tokens_that_nobody_trains_are_zero_in_a_pack():
    row = {
        "prompt_token_ids": [1, 2],
        "response_token_ids": [5, 6, 7],
        "response_mask": [1, 0, 1],
        "rollout_log_probs": [-0.5, -9.0, -0.25],
        "token_advantages": [2.0, 8.0, 3.0],
        "token_rewards": [0.5, 8.0, 1.5],
        "version_index": [1, 3, 2],
    }
    keys = ("token_advantages", "token_rewards", "version_index")
    pack = build_micro_batch([row], [0], 8, (), 1, keys)
    assert pack.labels.tolist() == [2, 5, 6, 7, 0, 0, 0, 0]
    assert pack.loss_mask.tolist() == [0, 1, 0, 1, 0, 0, 0, 0]
    assert pack.rollout_log_probs.tolist() == [0, -0.5, 0, -0.25, 0, 0, 0, 0]
    assert pack.token_advantages is not None and pack.token_rewards is not None and pack.version_index is not None
    assert pack.token_advantages.tolist() == [0, 2.0, 0, 3.0, 0, 0, 0, 0]
    assert pack.token_rewards.tolist() == [0, 0.5, 0, 1.5, 0, 0, 0, 0]
    assert pack.version_index.tolist() == [0, 1, 0, 2, 0, 0, 0, 0]
    assert np.array_equal(pack.sequence["length"], [2])

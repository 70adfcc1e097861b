"""What counts as a change of a token's experts, by hand."""

import torch

from gspo_mega.engine.routing import changed_sums, count_changed


def routes(*tokens):
    return torch.tensor(tokens, dtype=torch.int16)


def test_order_is_no_change_and_tokens_that_do_not_count_are_left_out():
    before = {3: routes([0, 1], [2, 3], [4, 5], [6, 7]), 0: routes([0, 1], [0, 1], [0, 1], [0, 1])}
    after = {0: routes([1, 0], [0, 1], [1, 0], [5, 6]), 3: routes([1, 0], [3, 4], [6, 7], [0, 1])}
    counts = count_changed(before, after, torch.tensor([1, 1, 1, 0]))
    # Layer 3: its second token keeps one expert of two, its third none; the fourth does not count.
    assert counts.tolist() == [[2, 3, 3, 6], [0, 3, 0, 6]]
    assert changed_sums("old", before, counts) == {
        "changed_since_old": 2.0,
        "compared_with_old": 6.0,
        "replaced/3": 3.0,
        "choices/3": 6.0,
        "replaced/0": 0.0,
        "choices/0": 6.0,
    }
    assert changed_sums("rollout", before, counts) == {"changed_since_rollout": 2.0, "compared_with_rollout": 6.0}


def test_a_token_counts_for_each_row_that_shares_it():
    before, after = {0: routes([0, 1], [2, 3], [4, 5])}, {0: routes([2, 1], [2, 3], [6, 7])}
    # The first token is in three rows and keeps one expert, the second in two, and the third in one, with no expert kept.
    assert count_changed(before, after, torch.tensor([3, 2, 1])).tolist() == [[3 + 1, 6, 3 * 1 + 1 * 2, 12]]


def test_a_rank_without_experts_has_nothing_to_tell():
    counts = count_changed({}, {}, torch.ones(4, dtype=torch.int64))
    assert counts.shape == (0, 4)
    assert changed_sums("old", {}, counts) == {"changed_since_old": 0.0, "compared_with_old": 0.0}

"""The critic's loss and explained variance: by hand, value and gradient."""

from __future__ import annotations

import pytest
import torch

from gspo_mega.algorithm.losses import VALUE_SUMS, explained_variance, value_loss, value_sums


def of(values, old, returns, *, ids, lengths, coefficients, clip_range=None):
    tensor = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    got = value_loss(
        tensor,
        torch.tensor(old, dtype=torch.float64),
        torch.tensor(returns, dtype=torch.float64),
        sequence_ids=torch.tensor(ids, dtype=torch.int64),
        lengths=torch.tensor(lengths, dtype=torch.int64),
        coefficients=torch.tensor(coefficients, dtype=torch.float64),
        clip_range=clip_range,
    )
    got.loss.backward()
    assert tensor.grad is not None
    return float(got.loss.detach()), tensor.grad.tolist(), got.clipped.tolist()


def test_the_squared_error_by_hand():
    # Mean over tokens of two sequences of 2 and 1: c_i = L_i / 3. 1/2 (4 + 0 + 1) / 3; the gradient is (V - R) / 3.
    loss, gradient, clipped = of(
        [2.0, 1.0, 0.0], [0.0] * 3, [0.0, 1.0, 1.0], ids=[0, 0, 1], lengths=[2, 1], coefficients=[2 / 3, 1 / 3]
    )
    assert loss == pytest.approx(5 / 6)
    assert gradient == pytest.approx([2 / 3, 0.0, -1 / 3])
    assert clipped == [False] * 3


def test_a_sequence_counts_by_its_coefficient():
    # Mean over sequences of their means: c_i = 1/2. 1/2 x (1/2 (4 + 0)) / 2 + 1/2 x 1/2 = 3/4.
    loss, gradient, _ = of(
        [2.0, 1.0, 0.0], [0.0] * 3, [0.0, 1.0, 1.0], ids=[0, 0, 1], lengths=[2, 1], coefficients=[1 / 2, 1 / 2]
    )
    assert loss == pytest.approx(3 / 4)
    assert gradient == pytest.approx([1 / 2, 0.0, -1 / 2])


def test_a_value_that_moved_too_far_towards_its_return_has_no_gradient():
    # eps = 1/2, V' = 0, R = 2. V = 1 is clipped to 1/2: 9/8 against 1/2, no gradient. V = -1 moved away: 9/2 stands.
    # V = 1/4 is within the range.
    loss, gradient, clipped = of(
        [1.0, -1.0, 0.25], [0.0] * 3, [2.0] * 3, ids=[0, 0, 0], lengths=[3], coefficients=[3.0], clip_range=0.5
    )
    assert clipped == [True, False, False]
    assert loss == pytest.approx(9 / 8 + 9 / 2 + 49 / 32)
    assert gradient == pytest.approx([0.0, -3.0, -1.75])


def test_tokens_of_other_ranks_are_in_the_length_only():
    loss, gradient, _ = of([1.0], [0.0], [0.0], ids=[0], lengths=[4], coefficients=[1.0])
    assert (loss, gradient) == (1 / 8, [1 / 4])


def test_a_rank_without_tokens_has_no_loss():
    assert of([], [], [], ids=[], lengths=[], coefficients=[])[0] == 0.0


def test_a_clip_range_is_above_nought():
    with pytest.raises(ValueError, match="clip_range must be above 0; got 0.0"):
        of([1.0], [0.0], [0.0], ids=[0], lengths=[1], coefficients=[1.0], clip_range=0.0)


def sums_of(values, returns):
    return {name: float(one) for name, one in value_sums(torch.tensor(values), torch.tensor(returns)).items()}


@pytest.mark.parametrize(
    ("values", "expected"),
    [([1.0, 3.0], 1.0), ([2.0, 2.0], 0.0), ([3.0, 1.0], -3.0), ([11.0, 13.0], 1.0), ([1.5, 2.5], 0.75)],
)
def test_explained_variance_by_hand(values, expected):
    assert explained_variance(sums_of(values, [1.0, 3.0])) == pytest.approx(expected)


def test_parts_add_up():
    whole, first, rest = (
        sums_of(*part) for part in (([1.0, 2.0, 4.0], [1.0, 3.0, 3.5]), ([1.0], [1.0]), ([2.0, 4.0], [3.0, 3.5]))
    )
    assert explained_variance({name: first[name] + rest[name] for name in VALUE_SUMS}) == explained_variance(whole)


@pytest.mark.parametrize("returns", [[0.5, 0.5, 0.5], [0.0, 0.0, 0.0], []])
def test_equal_returns_have_no_variance_to_explain(returns):
    assert explained_variance(sums_of([1.0] * len(returns), returns)) is None

"""Sums by sequence and the search for non-finite numbers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_mega.algorithm.losses import supervised_loss
from gspo_mega.algorithm.objective import segment_sum, sequence_log_ratio_sums
from gspo_mega.algorithm.terms import exp_minus_linear


@given(ids=st.lists(st.integers(0, 6), max_size=200), seed=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_segment_sum_equals_an_exact_sum(ids, seed):
    values = torch.randn(len(ids), generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()
    result = segment_sum(values, torch.tensor(ids, dtype=torch.int64), 7)
    for segment in range(7):
        exact = math.fsum(v for v, i in zip(values.tolist(), ids, strict=True) if i == segment)
        assert float(result[segment]) == pytest.approx(exact, rel=1e-13, abs=1e-14)
    if ids:
        (result * torch.arange(7)).sum().backward()
        assert values.grad.tolist() == [float(i) for i in ids]


def test_a_long_segment_keeps_its_digits():
    values = torch.full((200_003,), 0.1, dtype=torch.float64)
    ids = torch.zeros(200_003, dtype=torch.int64)
    ids[-3:] = 1
    assert segment_sum(values, ids, 2).tolist() == pytest.approx([20_000.0, 0.3], rel=2e-15)


def test_log_ratio_sums_ignore_masked_garbage_and_give_old_no_gradient():
    new = torch.tensor([-1.0, math.nan, -2.0], requires_grad=True)
    old = torch.tensor([-1.5, math.inf, -2.25], requires_grad=True)
    sums = sequence_log_ratio_sums(new, old, torch.tensor([1, 0, 1]), torch.tensor([0, 0, 1]), 3)
    assert sums.tolist() == [0.5, 0.25, 0.0] and sums.dtype == torch.float64
    sums.sum().backward()
    assert new.grad.tolist() == [1.0, 0.0, 1.0] and old.grad is None


@pytest.mark.parametrize("d", [0.0, 1e-12, -1e-7, 1e-4, 0.0199, -0.0201, 0.3, 5.0, -40.0])
def test_exp_minus_linear_to_full_precision(d):
    import mpmath as mp

    with mp.workdps(50):
        exact = float(mp.exp(mp.mpf(d)) - 1 - mp.mpf(d))
    assert float(exp_minus_linear(torch.tensor(d, dtype=torch.float64))) == pytest.approx(exact, rel=3e-14, abs=0)


def test_supervised_loss_shares_add_up():
    log_probs = torch.tensor([-1.0, -2.0, math.nan, -3.0], requires_grad=True)
    mask = torch.tensor([1.0, 1.0, 0.0, 1.0])
    loss = supervised_loss(log_probs, mask, 3)
    loss.backward()
    assert float(loss) == 2.0
    assert log_probs.grad.tolist() == pytest.approx([-1 / 3, -1 / 3, 0.0, -1 / 3])
    parts = supervised_loss(log_probs[:2], mask[:2], 3) + supervised_loss(log_probs[2:], mask[2:], 3)
    assert float(parts) == float(loss)
    with pytest.raises(ValueError, match="denominator"):
        supervised_loss(log_probs, mask, 0)

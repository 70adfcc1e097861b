"""The metrics of the engine gap."""

from __future__ import annotations

import math

import pytest
import torch

from gspo_mega.algorithm.correction import effective_sample_fraction, mismatch_metrics, mismatch_sums


def test_parts_of_context_parallel_ranks_combine_to_the_whole():
    g = torch.Generator().manual_seed(0)
    train, rollout = (
        -torch.rand(40, generator=g, dtype=torch.float64),
        -torch.rand(40, generator=g, dtype=torch.float64),
    )
    mask, ids = torch.rand(40, generator=g) < 0.7, torch.arange(40) // 10
    train[~mask] = math.nan
    sums, maxima = mismatch_sums(train, rollout, mask, ids, 5, 2.0)
    half = torch.arange(40) % 2 == 0
    parts = [mismatch_sums(train[h], rollout[h], mask[h], ids[h], 5, 2.0) for h in (half, ~half)]
    together = mismatch_metrics(parts[0][0] + parts[1][0], torch.maximum(parts[0][1], parts[1][1]))
    whole = mismatch_metrics(sums, maxima)
    assert together.keys() == whole.keys() and len(whole) > 10
    for key, value in whole.items():
        assert together[key] == pytest.approx(value, rel=1e-12), key
        assert math.isfinite(value)


def test_chi_squared_of_a_long_gap_is_reported_as_a_logarithm():
    new, old = torch.zeros(500, dtype=torch.float64), torch.full((500,), -1.0, dtype=torch.float64)
    metrics = mismatch_metrics(*mismatch_sums(new, old, torch.ones(500), torch.zeros(500, dtype=torch.int64), 1, 2.0))
    assert metrics["chi2_sequence"] == math.inf
    assert metrics["chi2_sequence_log1p"] == pytest.approx(1000.0)
    assert metrics["ess_sequence"] == 1.0


def test_of_nothing():
    empty = mismatch_metrics(
        *mismatch_sums(torch.zeros(2), torch.zeros(2), torch.zeros(2), torch.zeros(2, dtype=torch.int64), 1, 2.0)
    )
    some = mismatch_metrics(
        *mismatch_sums(torch.zeros(2), torch.zeros(2), torch.ones(2), torch.zeros(2, dtype=torch.int64), 1, 2.0)
    )
    assert empty == some  # no token and no gap read the same
    assert effective_sample_fraction(torch.zeros(0)) == 1.0


def test_ess_of_weights_beyond_float64():
    assert effective_sample_fraction(torch.tensor([5000.0, 5000.0, 0.0])) == pytest.approx(2 / 3)

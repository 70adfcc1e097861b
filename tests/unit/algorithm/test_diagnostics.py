"""Numbers about one mini-batch: they add over ranks and mean what they say."""

from __future__ import annotations

import pytest
import torch
from algorithm_cases import RATIOS, Batch, settings_of

from gspo_mega.algorithm.diagnostics import POLICY_SUMS, band_fractions, log_ratio_summary, policy_metrics, policy_sums


def sums_of(batch, settings, tokens=None, partial=None):
    output, _ = batch.run(
        settings, tokens=tokens, **({} if partial is None else {"reduce_sequences": lambda p: p + partial})
    )
    tokens = torch.arange(batch.segment_ids.numel()) if tokens is None else tokens
    return policy_sums(
        output,
        mask=batch.mask[tokens],
        segment_ids=batch.segment_ids[tokens],
        lengths=batch.lengths,
        advantages=batch.advantages,
        keep=batch.keep,
    )


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("seed", range(5))
def test_sums_add_up_over_context_parallel_ranks(ratio, seed):
    batch, settings = Batch(seed), settings_of(ratio)
    whole = sums_of(batch, settings)
    halves = [torch.arange(batch.segment_ids.numel())[k::2] for k in (0, 1)]
    d = torch.where(batch.mask, batch.new - batch.old, 0.0)
    partial = [
        torch.zeros(batch.num_sequences, dtype=torch.float64).index_add(0, batch.segment_ids[h], d[h]) for h in halves
    ]
    parts = sums_of(batch, settings, halves[0], partial[1]) + sums_of(batch, settings, halves[1], partial[0])
    torch.testing.assert_close(whole, parts, rtol=1e-11, atol=1e-14)


def test_clip_fractions_by_hand():
    """Three sequences of 1, 3 and 4 tokens: the first clipped high, the second low, the third inside the band."""
    batch = Batch(0, num_sequences=3)
    batch.segment_ids = torch.tensor([0, 1, 1, 1, 2, 2, 2, 2])
    batch.mask = torch.ones(8, dtype=torch.bool)
    batch.old = torch.zeros(8, dtype=torch.float64)
    batch.new = torch.tensor([0.1, -0.1, -0.1, -0.1, 0, 0, 0, 0], dtype=torch.float64)
    batch.lengths = torch.tensor([1, 3, 4])
    batch.keep = torch.ones(3, dtype=torch.bool)
    batch.weights = torch.ones(3)
    batch.advantages = torch.tensor([2.0, -1.0, -3.0])
    metrics = policy_metrics(sums_of(batch, settings_of()))
    assert metrics["num_sequences"] == pytest.approx(3) and metrics["num_tokens"] == 8
    assert metrics["clip_fraction"] == pytest.approx(2 / 3)
    assert metrics["clip_fraction_high"] == pytest.approx(1 / 3) and metrics["clip_fraction_low"] == pytest.approx(
        1 / 3
    )
    assert metrics["token_clip_fraction"] == 0.5
    assert metrics["token_clip_fraction_high"] == 1 / 8 and metrics["token_clip_fraction_low"] == 3 / 8
    assert metrics["positive_mass_left"] == 0.0 and metrics["negative_mass_left"] == pytest.approx(0.75)
    assert metrics["k1"] == pytest.approx(0.025) and metrics["k2"] == pytest.approx(0.0025)
    assert metrics["kept_fraction"] == 1.0 and metrics["dual_clip_fraction"] == 0.0


def test_a_token_ratio_clips_sequences_by_their_share_of_tokens():
    """10 tokens of which 1 is clipped, and 1000 of which none is: .05 of the two sequences, where 1 of 1010 tokens is."""
    batch = Batch(0, num_sequences=2)
    lengths = [10, 1000]
    batch.segment_ids = torch.repeat_interleave(torch.arange(2), torch.tensor(lengths))
    batch.mask = torch.ones(1010, dtype=torch.bool)
    batch.old = torch.zeros(1010, dtype=torch.float64)
    batch.new = batch.old.clone()
    batch.new[0] = -0.5
    batch.lengths = torch.tensor(lengths)
    batch.keep = torch.ones(2, dtype=torch.bool)
    batch.weights = torch.ones(2)
    batch.advantages = torch.tensor([-1.0, -1.0])
    metrics = policy_metrics(sums_of(batch, settings_of("token")))
    assert metrics["clip_fraction_negative"] == metrics["clip_fraction"] == pytest.approx(0.05)
    assert metrics["token_clip_fraction"] == pytest.approx(1 / 1010)


def test_a_rejected_sequence_is_not_counted_as_clipped():
    batch = Batch(4, scale=0.1)
    batch.keep[:] = False
    metrics = policy_metrics(sums_of(batch, settings_of()))
    assert metrics["clip_fraction"] == 0.0 and metrics["kept_fraction"] == 0.0 and metrics["num_sequences"] > 0


@pytest.mark.parametrize("dropped", [0, 1, 2])
def test_clip_fractions_of_both_signs_add_up_to_that_of_all(dropped):
    """Of A = 2, 1, -1, -3 the first is above the band and the third below; a dropped one stays in every denominator."""
    batch = Batch(0, num_sequences=4)
    batch.segment_ids, batch.mask = torch.arange(4), torch.ones(4, dtype=torch.bool)
    batch.old = torch.zeros(4, dtype=torch.float64)
    batch.new = torch.tensor([0.1, 0.0, -0.1, 0.0], dtype=torch.float64)
    batch.lengths, batch.weights = torch.ones(4, dtype=torch.int64), torch.ones(4)
    batch.keep = torch.arange(4) != dropped
    batch.advantages = torch.tensor([2.0, 1.0, -1.0, -3.0])
    metrics = policy_metrics(sums_of(batch, settings_of()))
    assert metrics["clip_fraction_positive"] == (0.0 if dropped == 0 else 0.5)
    assert metrics["clip_fraction_negative"] == (0.0 if dropped == 2 else 0.5)
    assert 4 * metrics["clip_fraction"] == 2 * (metrics["clip_fraction_positive"] + metrics["clip_fraction_negative"])


def test_of_nothing():
    metrics = policy_metrics(torch.zeros(len(POLICY_SUMS), dtype=torch.float64))
    assert metrics["clip_fraction"] == 0.0 and metrics["kept_fraction"] == 1.0 and metrics["positive_mass_left"] == 1.0
    assert log_ratio_summary(torch.zeros(0))["p99"] == 0.0
    assert band_fractions(torch.zeros(0), 0.1, 0.1) == (0.0, 0.0)


def test_summary_of_log_ratios():
    values = torch.randperm(1001, generator=torch.Generator().manual_seed(1)).double()
    summary = log_ratio_summary(values)
    assert summary["p1"] == pytest.approx(10.0) and summary["p99"] == pytest.approx(990.0)
    assert (summary["min"], summary["max"], summary["mean"]) == (0.0, 1000.0, 500.0)
    assert summary["sd"] == pytest.approx(float(values.numpy().std()))
    assert log_ratio_summary(torch.tensor([0.0, 1.0]))["p1"] == pytest.approx(0.01)


def test_band_fractions_are_blind_to_the_advantage():
    assert band_fractions(torch.tensor([0.5, -0.5, 0.0, 0.05]), 0.1, 0.1) == (0.25, 0.25)
    assert band_fractions(torch.tensor([-100.0]), 1.0, 0.1) == (0.0, 0.0)

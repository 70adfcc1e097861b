"""The correction by version segments: by hand, equal to the rule of one version, no length filter, and it acts."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_mega.algorithm.correction import (
    MIN_SEGMENTS,
    CorrectionRule,
    changed_by_rule,
    correct,
    correct_segments,
    segment_centres,
)
from gspo_mega.base.errors import NumericsError

F64 = torch.float64


def tensor(*rows):
    return torch.tensor(rows, dtype=F64)


def test_two_versions_by_hand():
    """Too few segments for centres of their own: the pooled one. All inside it: m = (4 - 1.6 + 0.8) / 320 = 0.01."""
    sums, lengths = tensor((4.0, -1.6), (0.8, 0.0)), tensor((100, 64), (156, 0))
    found = correct_segments(CorrectionRule(bound_nats=0.5), sums, lengths, torch.zeros(2))
    assert found.centres.tolist() == pytest.approx([0.01, 0.01])
    # z of the segments: (4 - 1) / 10 = .3 and (-1.6 - .64) / 8 = -.28; together (3 - 2.24) / sqrt(164).
    assert found.result.deviations.tolist() == pytest.approx([0.3, (0.8 - 1.56) / math.sqrt(156)])
    assert found.result.keep.all() and found.num_judged.tolist() == [2, 1] and not found.by_segment.any()
    assert found.result.centre == pytest.approx(0.01)


@pytest.mark.parametrize("least, kept", [(64, False), (65, True)])
def test_a_segment_alone_drops_its_response_from_the_least_length_on(least, kept):
    """64 tokens of an old version that are .2 nats off each, in a response of 1,664: z of the whole is .31, of the
    segment 1.6."""
    rng = np.random.default_rng(0)
    lengths = torch.full((20, 2), 64.0, dtype=F64)
    lengths[:, 1] = 1600.0
    sums = torch.from_numpy(0.02 * rng.standard_normal((20, 2))) * lengths.sqrt()
    sums[3, 0] += 64 * 0.2
    found = correct_segments(CorrectionRule(segment_tokens=least), sums, lengths, torch.zeros(20))
    assert bool(found.result.keep[3]) is kept and found.result.keep.sum() == 19 + kept
    assert found.by_segment.tolist() == [row == 3 and not kept for row in range(20)]
    # Without segments nothing is seen of it.
    assert correct(CorrectionRule(), sums.sum(1), lengths.sum(1), torch.zeros(20)).keep.all()


@given(
    seed=st.integers(0, 10_000),
    mode=st.sampled_from(["none", "mask", "truncate"]),
    weight=st.sampled_from(["one", "ratio"]),
)
@settings(max_examples=60, deadline=None)
def test_one_version_is_the_rule_of_one_version(seed, mode, weight):
    rng = np.random.default_rng(seed)
    lengths = torch.from_numpy(rng.integers(0, 400, 24).astype(float))
    sums = torch.where(
        lengths > 0, torch.from_numpy(rng.standard_normal(24)) * lengths.sqrt() * 0.4 - 0.01 * lengths, 0.0
    )
    vetoes = torch.from_numpy((rng.random(24) < 0.1).astype(float))
    rule = CorrectionRule(mode, 0.5, 9.2, weight, segment_tokens=1)
    want = correct(rule, sums, lengths, vetoes)
    empty = torch.zeros(24, dtype=F64)
    got = correct_segments(rule, torch.stack([empty, sums], 1), torch.stack([empty, lengths], 1), vetoes)
    assert got.result.keep.equal(want.keep) and not got.by_segment.any()
    torch.testing.assert_close(got.result.weights, want.weights, rtol=1e-12, atol=0)
    torch.testing.assert_close(got.result.deviations, want.deviations, rtol=0, atol=1e-12)
    assert got.result.centre == pytest.approx(want.centre, abs=1e-12)


KL, MOVED = 1.5e-3, (6e-3, 2e-3, 0.0)  # of the engines; of the two older versions and the present one to the policy


def stale_batch(seed: int, num_responses: int = 6000) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of d and tokens by version: responses of 16 to 65,536 tokens cut at random between up to three versions."""
    rng = np.random.default_rng(seed)
    total = np.exp(rng.uniform(math.log(16), math.log(65536), num_responses)).round()
    cuts = np.sort(rng.random((num_responses, 2)), axis=1)
    cuts[rng.random(num_responses) < 0.3, 0] = 0.0
    ends = np.stack([np.zeros(num_responses), *(np.floor(total * cut) for cut in cuts.T), total], axis=1)
    lengths = np.diff(ends, axis=1)
    kl = KL + np.array(MOVED)
    sums = np.sqrt(2 * kl * lengths) * rng.standard_normal(lengths.shape) - kl * lengths
    return torch.from_numpy(sums), torch.from_numpy(lengths)


def kept_by_length(keep, lengths):
    total = lengths.sum(1)
    edges = [16, 128, 1024, 8192, 65537]
    return [float(keep[(total >= low) & (total < high)].double().mean()) for low, high in itertools.pairwise(edges)]


def test_stale_responses_are_kept_at_every_length_and_with_one_centre_they_would_not_be():
    sums, lengths = stale_batch(1)
    vetoes = torch.zeros(len(sums))
    found = correct_segments(CorrectionRule(), sums, lengths, vetoes)
    assert min(kept_by_length(found.result.keep, lengths)) > 0.998
    # Four standard errors of the mean noise of three million tokens.
    assert found.centres.tolist() == pytest.approx([-(KL + moved) for moved in MOVED], abs=3e-4)
    shares = kept_by_length(correct(CorrectionRule(), sums.sum(1), lengths.sum(1), vetoes).keep, lengths)
    assert shares[0] > 0.998 and shares[-1] < 0.97, "the control: staleness is taken for a fault, by length"


def test_a_version_that_went_wrong_is_found_in_long_responses_too():
    """One response in fifty has 200 tokens of the oldest version with .06 nats of error each, as of a stale cache."""
    sums, lengths = stale_batch(2)
    broken = torch.arange(len(sums)) % 50 == 0
    lengths[broken, 0] = 200.0
    sums[broken, 0] = -(KL + MOVED[0]) * 200 + 0.06 * 200
    found = correct_segments(CorrectionRule(), sums, lengths, torch.zeros(len(sums)))
    assert not found.result.keep[broken].any() and found.result.keep[~broken].double().mean() > 0.998
    assert found.by_segment[broken].double().mean() > 0.2, "the whole alone does not show it"


def test_truncate_cuts_a_segment_at_its_own_bound():
    lengths = torch.full((MIN_SEGMENTS, 2), 100.0, dtype=F64)
    sums = torch.zeros_like(lengths)
    sums[0] = torch.tensor([9.0, -6.0])  # z .9 and -.6, together .21
    rule = CorrectionRule("truncate", bound_nats=0.5, segment_tokens=100)
    found = correct_segments(rule, sums, lengths, torch.zeros(MIN_SEGMENTS))
    # Both are outside their bands, so that the centres are those of the others, 0.
    assert found.centres.tolist() == [0.0, 0.0]
    assert float(found.result.weights[0]) == pytest.approx(math.exp((5.0 - 6.0) / 200))
    assert found.result.keep.all() and found.by_segment.tolist() == [True] + [False] * (MIN_SEGMENTS - 1)
    assert changed_by_rule("truncate", 0.5, found.result.keep, found.result.deviations).tolist()[0]


def test_a_lone_segment_is_not_its_own_centre():
    lengths = torch.full((12, 2), 0.0, dtype=F64)
    lengths[:, 1], lengths[0] = 100.0, torch.tensor([100.0, 0.0], dtype=F64)
    sums = torch.zeros_like(lengths)
    sums[0, 0] = 50.0
    centres = segment_centres(sums, lengths, 0.5)
    assert centres.tolist() == pytest.approx([0.0, 0.0])
    assert not correct_segments(CorrectionRule(), sums, lengths, torch.zeros(12)).result.keep[0]


def test_a_vetoed_response_enters_no_centre_and_a_sum_that_is_not_finite_is_named():
    lengths = torch.full((9, 2), 100.0, dtype=F64)
    sums = torch.zeros_like(lengths)
    sums[0] = 1000.0
    vetoes = torch.zeros(9)
    vetoes[0] = 1
    found = correct_segments(CorrectionRule(), sums, lengths, vetoes)
    assert found.centres.tolist() == [0.0, 0.0] and found.result.keep.tolist() == [False] + [True] * 8
    sums[4, 1] = math.nan
    with pytest.raises(NumericsError, match="trajectory 4"):
        correct_segments(CorrectionRule(), sums, lengths, vetoes)


@pytest.mark.parametrize("mode", ["none", "mask", "truncate"])
def test_a_version_that_only_dropped_responses_have_leaves_every_number_finite(mode):
    sums, lengths = torch.zeros(12, 2, dtype=F64), torch.full((12, 2), 100.0, dtype=F64)
    lengths[1:, 0] = 0.0
    sums[0, 0], vetoes = 50.0, torch.zeros(12)
    vetoes[0] = 1
    found = correct_segments(CorrectionRule(mode=mode), sums, lengths, vetoes)
    assert torch.isfinite(found.result.deviations).all() and math.isfinite(found.result.centre)
    assert found.centres.tolist() == [0.0, 0.0] and found.result.keep[1:].all()

"""The correction keeps short and long responses alike: token noise of any tail, lengths 16 to 16,384.

The control is the band that the rule replaces, of one width for every length and around 0: on the same noise, the same
test sees that it is a length filter.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gspo_mega.algorithm.correction import CorrectionRule, correct

# Responses of each length. The standard error of a kept share of .955 is .003 for the short ones, .012 for the longest.
COUNTS = {16: 4000, 64: 4000, 256: 2000, 1024: 1000, 4096: 500, 16384: 300}
LENGTHS = np.repeat(list(COUNTS), list(COUNTS.values()))
# Chi-squared of a share that is the same in six bins: above this in one of 1000 cases.
CHI_SQUARED_5 = 20.5
# Size of the gap, KL(rollout || trainer) per token: BF16, BF16 with experts, FP8 weights and KV cache.
GAPS = {"bf16": 6.4e-4, "moe": 1.5e-3, "kv_fp8": 4.5e-3}


def unit_noise(kind: str, num_responses: int, num_tokens: int, rng: np.random.Generator) -> np.ndarray:
    """[num_responses, num_tokens] float32 of mean 0 and sd 1: Gaussian, or Student's t with 3 degrees of freedom, whose
    fourth moment is infinite.
    """
    shape = (num_responses, num_tokens)
    noise = rng.standard_normal(shape, dtype=np.float32)
    if kind == "student3":
        noise /= np.sqrt(rng.standard_gamma(1.5, shape, dtype=np.float32) / 1.5) * math.sqrt(3)
    return noise


def sums_of(kind: str, seed: int) -> np.ndarray:
    """Sum of the noise over each response, [sum of COUNTS] float64."""
    rng = np.random.default_rng(seed)
    parts = []
    for length, count in COUNTS.items():
        step = max(1, 400_000 // length)
        parts += [
            unit_noise(kind, min(step, count - start), length, rng).sum(1, dtype=np.float64)
            for start in range(0, count, step)
        ]
    return np.concatenate(parts)


@pytest.fixture(scope="module", params=["gaussian", "student3"])
def unit_sums(request):
    return sums_of(request.param, seed=11)


def d_sums(unit: np.ndarray, kl: float) -> torch.Tensor:
    """Sums of d, a token's mean being -KL and its variance 2 KL."""
    return torch.from_numpy(math.sqrt(2 * kl) * unit - kl * LENGTHS)


def kept_by_length(keep: np.ndarray) -> np.ndarray:
    return np.array([keep[length == LENGTHS].mean() for length in COUNTS])


def chi_squared(keep: np.ndarray) -> float:
    """Of the hypothesis that the kept share is the same at every length, 5 degrees of freedom."""
    share, counts = keep.mean(), np.array(list(COUNTS.values()))
    return float((counts * (kept_by_length(keep) - share) ** 2).sum() / (share * (1 - share)))


@pytest.mark.parametrize("gap", GAPS)
def test_the_kept_share_is_the_same_at_every_length(unit_sums, gap):
    """With the bound at two standard deviations of the noise, so that the rule drops enough to be judged by."""
    kl = GAPS[gap]
    rule = CorrectionRule(bound_nats=2 * math.sqrt(2 * kl))
    keep = correct(rule, d_sums(unit_sums, kl), torch.from_numpy(LENGTHS), torch.zeros(len(LENGTHS))).keep.numpy()
    assert 0.94 < keep.mean() < 0.97
    assert chi_squared(keep) < CHI_SQUARED_5, kept_by_length(keep)


@pytest.mark.parametrize("gap", GAPS)
def test_a_fixed_band_is_a_length_filter_and_the_test_sees_it(unit_sums, gap):
    """Ten clip bands wide, as geometric masks are set elsewhere."""
    means = d_sums(unit_sums, GAPS[gap]).numpy() / LENGTHS
    keep = np.abs(means) <= 10 * (3e-4 + 4e-4)
    shares = kept_by_length(keep)
    assert chi_squared(keep) > 1000 and shares[0] < 0.7 < 0.9 < shares[3:].max()


def test_the_centre_is_what_keeps_long_responses():
    """Scaled by the length but around 0, the band drops long responses: their mean is -KL whatever their number."""
    kl = GAPS["kv_fp8"]
    unit = sums_of("gaussian", seed=12)
    keep = np.abs(d_sums(unit, kl).numpy()) / np.sqrt(LENGTHS) <= 2 * math.sqrt(2 * kl)
    assert kept_by_length(keep)[-1] < 0.1 and chi_squared(keep) > 1000


@pytest.mark.parametrize("gap", GAPS)
def test_the_default_bound_drops_next_to_nothing_of_the_usual_gaps(unit_sums, gap):
    sums = d_sums(unit_sums, GAPS[gap])
    keep = correct(CorrectionRule(), sums, torch.from_numpy(LENGTHS), torch.zeros(len(LENGTHS))).keep.numpy()
    assert kept_by_length(keep).min() > 0.998
    # And it acts: on one response in ten whose noise is eight times that of FP8, at every length.
    is_broken = np.arange(len(LENGTHS)) % 10 == 0
    mixed = torch.where(torch.from_numpy(is_broken), d_sums(unit_sums, 64 * GAPS["kv_fp8"]), sums)
    keep = correct(CorrectionRule(), mixed, torch.from_numpy(LENGTHS), torch.zeros(len(LENGTHS))).keep.numpy()
    assert keep[~is_broken].mean() > 0.998 and keep[is_broken].mean() < 0.6


@pytest.mark.parametrize("which", ["any", "longest", "shortest"])
def test_two_in_five_off_to_one_side_drop_none_of_the_others(which):
    """64 responses of 64 to 16,384 tokens with the noise of FP8; 25 of them are 3 nats per token below, which moves
    the start of the centre by a good part of the band of the long ones.
    """
    rng = np.random.default_rng(5)
    kl = GAPS["kv_fp8"]
    for _ in range(20):
        lengths = np.exp(rng.uniform(math.log(64), math.log(16384), 64)).round()
        order = {"any": rng.permutation(64), "longest": np.argsort(-lengths), "shortest": np.argsort(lengths)}[which]
        is_broken = np.isin(np.arange(64), order[:25])
        d = -kl + math.sqrt(2 * kl) * rng.standard_normal(64) / np.sqrt(lengths) - 3.0 * is_broken
        keep = correct(CorrectionRule(), torch.from_numpy(d * lengths), torch.from_numpy(lengths), torch.zeros(64)).keep
        assert np.array_equal(keep.numpy(), ~is_broken)

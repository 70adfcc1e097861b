"""Clip-Cov: covariances, draws and the choice, by hand; and what a chosen token is to the objective."""

from __future__ import annotations

import pytest
import torch

from gspo_mega.algorithm.covariance import (
    covariance_sums,
    covariances,
    draw_bound,
    num_chosen,
    token_draws,
    trajectory_key,
)
from gspo_mega.algorithm.objective import ObjectiveSettings, policy_objective

F64 = torch.float64


def test_covariances_by_hand():
    """log pi = -1, -2, -3 with mean -2; A = 3, 0, -3 with mean 0. Two ranks have a part of the tokens each."""
    log_probs, advantages = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([3.0, 0.0, -3.0], dtype=F64)
    sums = covariance_sums(log_probs[:1], advantages[:1]) + covariance_sums(log_probs[1:], advantages[1:])
    assert sums.tolist() == [3.0, -6.0, 0.0]
    assert covariances(log_probs, advantages, sums).tolist() == [3.0, 0.0, 3.0]
    shifted = covariance_sums(log_probs, advantages + 1)
    assert covariances(log_probs, advantages + 1, shifted).tolist() == [3.0, 0.0, 3.0], "only differences count"


def test_how_many_are_chosen():
    assert [num_chosen(2e-4, count) for count in (0, 1, 4999, 10_000, 100_000)] == [0, 1, 1, 2, 20]


@pytest.mark.parametrize("most", [0, 1, 3, 5, 9])
def test_the_smallest_draws_are_chosen_whichever_rank_has_them(most):
    parts = [torch.tensor([50, 7, 2**62 - 1]), torch.tensor([8, 3]), torch.zeros(0, dtype=torch.int64)]
    draws = torch.cat(parts)
    bound = draw_bound(most, draws)
    assert sorted(draws[draws <= bound].tolist()) == sorted(draws.tolist())[:most]
    assert draw_bound(most, draws.flip(0)) == bound


def test_splitmix_by_hand():
    """The first number of SplitMix64 with seed 0 is e220a8397b1dcdaf; a key of 1 at position 0 has that state."""
    got = int(token_draws(torch.tensor([1]), torch.tensor([0])))
    assert got == 0xE220A8397B1DCDAF >> 2


def test_draws_are_of_trajectory_step_seed_and_position_and_look_uniform():
    keys = [trajectory_key(seed, step, name) for seed in (1, 2) for step in (0, 1) for name in ("a", "b")]
    assert len(set(keys)) == 8 and all(0 <= key < 2**48 and float(key) == key for key in keys)
    draws = token_draws(torch.tensor(keys[:1]).expand(20_000), torch.arange(20_000))
    assert draws.unique().numel() == 20_000 and int(draws.min()) >= 0 and int(draws.max()) < 2**62
    shares = torch.histc(draws.double() / 2**62, bins=20, min=0, max=1) / 20_000
    assert (shares - 0.05).abs().max() < 0.006  # 4 standard deviations of a share
    other = token_draws(torch.tensor(keys[1:2]).expand(20_000), torch.arange(20_000))
    assert abs(float(torch.corrcoef(torch.stack([draws.double(), other.double()]))[0, 1])) < 0.03


def test_a_chosen_token_has_no_term_and_no_gradient_and_stays_in_the_average():
    """Three tokens of two responses, r = 1, A = 2 and -1: J = (2 + 2 - 1) / 3; without the second (2 - 1) / 3."""
    log_probs = torch.tensor([-1.0, -2.0, -3.0], dtype=F64, requires_grad=True)
    settings = ObjectiveSettings(
        ratio="token", clip_low=1.0, clip_high=1.0, aggregation="token_mean", covariance_share=0.5
    )
    shared = dict(
        log_probs=log_probs,
        old_log_probs=log_probs.detach(),
        mask=torch.ones(3),
        segment_ids=torch.tensor([0, 0, 1]),
        num_sequences=2,
        advantages=torch.tensor([2.0, -1.0]),
        lengths=torch.tensor([2, 1]),
        denominator=3.0,
    )
    assert policy_objective(settings, **shared).objective_sum.item() == pytest.approx(1.0, rel=1e-12)
    out = policy_objective(settings, **shared, token_weights=torch.tensor([1.0, 0.0, 1.0]))
    out.objective_sum.backward()
    assert out.objective_sum.item() == pytest.approx(1 / 3, rel=1e-12)
    assert log_probs.grad is not None and log_probs.grad.tolist() == pytest.approx([2 / 3, 0.0, -1 / 3], rel=1e-12)

"""The critic's metrics from the parts of two ranks, by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from gspo_mega.engine.optimizer import StepResult
from gspo_mega.metrics.catalogue import find_metric
from gspo_mega.train.critic_step import CriticPart
from gspo_mega.train.reports import critic_metrics, fill_mean_advantages

RESULTS = [StepResult(3.0, 2e-5, False), StepResult(1.0, 1e-5, True)]


def steps(tokens, clipped, losses):
    """One row per mini-batch: its active tokens, the five sums that are not read here, its clipped tokens, its loss."""
    rows = [[t, 0, 0, 0, 0, 0, c, loss] for t, c, loss in zip(tokens, clipped, losses, strict=True)]
    return np.array(rows, np.float64)


def two_ranks():
    """Values 1, 2 of returns 1, 3 on one rank, 2, 2 of 3, 1 on the other: of errors 0, 1 and 1, -1."""
    return [
        CriticPart(
            old_sums=np.array([2.0, 3, 4, 10, 1, 1]),
            step_sums=steps([2, 2], [1, 0], [0.2, 0.4]),
            penalty=np.array([0.6, 2]),
        ),
        CriticPart(
            old_sums=np.array([2.0, 4, 4, 10, 0, 2]),
            step_sums=steps([2, 4], [0, 2], [0.1, 0.1]),
            penalty=np.array([-0.2, 2]),
        ),
    ]


def test_sums_of_all_ranks_become_the_steps_metrics():
    """Var R = 20/4 - 2^2 = 1 and Var (R - V) = 3/4 - (1/4)^2 = 11/16. A mini-batch's loss is the sum of its ranks', .3
    and .5, and a step's the mean of its mini-batches'; 3 of 10 tokens were clipped.
    """
    found = critic_metrics(two_ranks(), RESULTS, 7, kl_coefficient=0.05)
    assert found == pytest.approx(
        {
            "critic/value_loss": 0.4,
            "critic/clip_fraction": 0.3,
            "critic/value_mean": 7 / 4,
            "critic/return_mean": 2.0,
            "critic/explained_variance": 5 / 16,
            "critic/grad_norm": 2.0,
            "critic/grad_norm_max": 3.0,
            "critic/lr": 1e-5,
            "critic/num_optimizer_steps": 7,
            "critic/num_skipped": 1,
            "critic/kl_reference": 0.1,
        }
    )
    assert all(find_metric(name) for name in found)


def test_what_was_not_measured_is_not_named():
    """Without a penalty no KL; returns that are all equal explain nothing and leave nothing to explain."""
    equal = CriticPart(old_sums=np.array([2.0, 1, 4, 8, 3, 5]), step_sums=steps([2], [0], [0.5]))
    found = critic_metrics([equal], RESULTS[:1], 1, kl_coefficient=0.0)
    assert "critic/kl_reference" not in found and "critic/explained_variance" not in found
    assert (found["critic/value_mean"], found["critic/return_mean"], found["critic/value_loss"]) == (0.5, 2.0, 0.5)


def test_a_row_has_the_mean_advantage_that_its_rank_says_and_zero_where_none_does():
    rows = [SimpleNamespace(advantage=9.0) for _ in range(4)]
    parts = [
        CriticPart(rows=np.array([2]), advantages=np.array([-1.5])),
        CriticPart(rows=np.array([0, 3]), advantages=np.array([0.25, 2.0])),
    ]
    fill_mean_advantages(SimpleNamespace(trajectories=rows), parts)
    assert [row.advantage for row in rows] == [0.25, 0.0, -1.5, 2.0]

"""What an objective does with single responses: dropped, weakened, how many carry the gradient."""

from __future__ import annotations

import math

import numpy as np
import pytest
from compare_rows import batch, config

from gspo_mega.train.batches import fill_advantages
from gspo_mega.verify.compare.run import config_of
from gspo_mega.verify.compare.token_shares import TokenLogProbs, pull_of


def pull(name, ratios):
    """`ratios` of the ten tokens of the batch: responses of 2, 1, 3 and 4 tokens with A = -1, 1, 1, -1."""
    run = config_of(config(), name)
    rows = batch()
    fill_advantages(rows, run, 0)
    old = np.full(10, -2.0)
    return pull_of(run.algorithm, run.objective, rows, TokenLogProbs(old + np.log(ratios), old, old))


def test_a_response_that_is_clipped_is_dropped_and_named():
    ratios = [0.99] * 2 + [1.01] + [0.99] * 3 + [1.01] * 4
    got = pull("gspo", ratios)
    assert got.dropped == ["g0-s0", "g0-s1"] and got.weakened == []
    shares = (got.clip_fraction, got.clip_fraction_positive, got.clip_fraction_negative)
    assert shares == pytest.approx((0.5, 0.5, 0.5))
    assert got.num_with_advantage == 4 and got.num_effective == pytest.approx(1.9992, abs=1e-3)


def test_a_response_with_some_clipped_tokens_is_weakened():
    got = pull("grpo", [1.0, 0.5, 1.0, 1.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    assert got.weakened == ["g0-s0", "g1-s0"] and got.dropped == []
    assert got.token_clip_fraction == pytest.approx(0.2)
    # g is L times its share of tokens with a gradient, over L: 1/2, 1, 2/3, 1
    assert got.num_effective == pytest.approx((1 / 2 + 1 + 2 / 3 + 1) ** 2 / (1 / 4 + 1 + 4 / 9 + 1))


def test_equal_policies_give_every_response_its_weight():
    assert pull("gspo", [1.0] * 10).num_effective == pytest.approx(4.0)
    by_token = pull("dapo", [1.0] * 10)  # 2, 1, 3 and 4 tokens
    assert by_token.num_effective == pytest.approx(100 / 30)
    assert by_token.objective == pytest.approx((-2 + 1 + 3 - 4) / 10)


def test_an_algorithm_that_clips_nothing_drops_nothing():
    got = pull("sapo", [math.e] * 10)
    assert got.dropped == got.weakened == [] and got.clip_fraction == 0.0

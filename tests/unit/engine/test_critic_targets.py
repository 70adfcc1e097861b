"""From values and rewards to advantages in the packs, by hand: what is bootstrapped, penalised and whitened."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gspo_mega.base.records import MicroBatch
from gspo_mega.engine.critic import AdvantageEstimator, LogProbs, TokenRewards, Values, estimate_returns

ALONE = SimpleNamespace(context=SimpleNamespace(size=1), data=SimpleNamespace(size=1))


def pack(mask, ids, rewards, truncated):
    zeros = np.zeros(len(mask), np.int64)
    lengths = np.bincount(ids)
    return MicroBatch(
        token_ids=zeros,
        position_ids=zeros,
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        sequence_ids=np.array(ids),
        labels=zeros,
        loss_mask=np.array(mask, np.float32),
        trajectory_index=np.arange(len(lengths)),
        rollout_log_probs=np.zeros(len(mask), np.float32),
        sequence={"truncated": np.array(truncated, np.float64)},
        token_rewards=np.array(rewards, np.float64),
    )


def two_sequences():
    """Active tokens with rewards 0, 1 (cut off) and 0, 2 (ended, with a token of an environment between), values .5,
    .25 and 1, 0, and .8 and 3 behind them.
    """
    one = pack([1, 1, 0, 1, 0, 1], [0, 0, 0, 1, 1, 1], [0, 1, 0, 0, 0, 2], [1, 0])
    return one, Values(torch.tensor([0.5, 0.25, 1.0, 0.0]), torch.tensor([0.8, 3.0]))


def estimator(**changes):
    plain = dict(discount=0.5, trace=0.5, bootstraps=False, whitens=False, kl_coefficient=0.0, std_ddof=0)
    return AdvantageEstimator(**plain | changes)


def estimated(how, packs, values, log_probs=None):
    returns = estimate_returns(packs, values, [TokenRewards.from_pack(one) for one in packs], how, ALONE, log_probs)
    return [one.token_advantages.tolist() for one in packs], [one.tolist() for one in returns]


def test_a_sequence_that_was_cut_off_goes_on_with_the_value_behind_it_only_on_request():
    """gamma = lambda = 1/2. Ended: delta = 0 + 0/2 - 1, 2 - 0, A = -1 + 2/4, 2. Cut off: delta = 0 + .25/2 - .5 and
    1 - .25, or with the value behind it 1 + .8/2 - .25; the value behind the one that ended is never read.
    """
    one, values = two_sequences()
    advantages, returns = estimated(estimator(), [one], [values])
    assert advantages == [pytest.approx([-0.375 + 0.75 / 4, 0.75, 0, -0.5, 0, 2])]
    assert returns == [pytest.approx([0.3125, 1.0, 0.5, 2.0])]
    advantages, returns = estimated(estimator(bootstraps=True), [one], [values])
    assert advantages == [pytest.approx([-0.375 + 1.15 / 4, 1.15, 0, -0.5, 0, 2])]
    assert returns == [pytest.approx([0.4125, 1.4, 0.5, 2.0])]


def test_the_penalty_is_taken_from_every_tokens_reward():
    """gamma = 0: A = r - .1 (log pi - log pi_ref) - V."""
    one, values = two_sequences()
    log_probs = LogProbs(torch.tensor([-1.0, -2.0, -1.0, -1.0]), torch.tensor([-2.0, -1.0, -1.0, -1.0]))
    advantages, returns = estimated(estimator(discount=0, kl_coefficient=0.1), [one], [values], [log_probs])
    assert advantages == [pytest.approx([-0.6, 0.85, 0, -1.0, 0, 2.0])]
    assert returns == [pytest.approx([-0.1, 1.1, 0.0, 2.0])]


def test_all_packs_of_a_mini_batch_are_whitened_together_and_returns_are_not():
    """A = 1, 3 in one pack and -1, -3 in another: mean 0, variance 5, or 20 / 3 with std_ddof 1."""
    packs = [pack([1, 1], [0, 0], rewards, [0]) for rewards in ([1, 3], [-1, -3])]
    values = [Values(torch.zeros(2), torch.zeros(1)) for _ in packs]
    for ddof, variance in ((0, 5), (1, 20 / 3)):
        advantages, returns = estimated(estimator(discount=0, whitens=True, std_ddof=ddof), packs, values)
        assert [a * variance**0.5 for one in advantages for a in one] == pytest.approx([1, 3, -1, -3])
        assert returns == [[1, 3], [-1, -3]]


@pytest.mark.parametrize("coefficient", [0.0, 0.1])
def test_log_probs_and_their_coefficient_belong_together(coefficient):
    one, values = two_sequences()
    log_probs = None if coefficient else [LogProbs(torch.zeros(4), torch.zeros(4))]
    said = "not given" if coefficient else "were given"
    with pytest.raises(ValueError, match=f"the KL penalty's coefficient is {coefficient:g}, but .* {said}"):
        estimated(estimator(kl_coefficient=coefficient), [one], [values], log_probs)

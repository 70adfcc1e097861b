"""The cold start decides by a measured accuracy: of how many samples that may be is bounded."""

from types import SimpleNamespace

import pytest

from gspo_mega.base.errors import NumericsError, RewardError
from gspo_mega.train.held_out import Evaluation
from gspo_mega.train.sft_loop import _measure


def session(accuracy, num_failed, most_failed=0.1):
    evaluation = Evaluation(accuracy, 0.02, accuracy, 64, 64, 0.0, 8.0, num_failed)
    return SimpleNamespace(
        config=SimpleNamespace(
            sft=SimpleNamespace(stop_accuracy_low=0.3, stop_accuracy_high=0.5, max_steps=9),
            reward=SimpleNamespace(max_failed_fraction=most_failed),
        ),
        state=SimpleNamespace(weight_version=0, step=7, summary={}),
        servers=SimpleNamespace(publish=lambda weight_version: None),
        eval_sets=(SimpleNamespace(name="held_out", is_due=lambda step: False),),
        evaluate=lambda names: dict.fromkeys(names, evaluation),
    )


def measure(session):
    return _measure(session, session.config.sft)


def test_an_accuracy_of_too_few_samples_stops_nothing():
    with pytest.raises(
        RewardError,
        match="7 of 64 held-out scorings failed after step 7, more than reward.max_failed_fraction 0.1 allows",
    ):
        measure(session(0.4, 7))
    verdict, metrics = measure(session(0.4, 6))
    assert verdict == "done" and (metrics["eval/accuracy"], metrics["eval/num_reward_failures"]) == (0.4, 6)
    assert measure(session(0.4, 60, most_failed=1.0))[0] == "done"


def test_the_band_stands():
    assert measure(session(0.2, 0))[0] is None
    with pytest.raises(NumericsError, match="jumped past the band"):
        measure(session(0.6, 0))

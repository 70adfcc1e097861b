"""Where lengths come from."""

import numpy as np
import pytest

from gspo_mega.base.episodes import one_turn_episode
from gspo_mega.base.records import Prompt
from gspo_mega.data.journal.journal import Journal
from gspo_mega.verify.simulate.job import constant, log_normal, read_lengths


@pytest.mark.parametrize("mean, sigma, most", [(8192, 0.7, 16384), (100, 0.6, 5000), (900, 0.1, 1000)])
def test_a_log_normal_has_the_mean_that_was_asked_for(mean, sigma, most):
    lengths = log_normal(mean, sigma, most)
    drawn = lengths.sample(np.random.default_rng(1), 200_000)
    assert drawn.mean() == pytest.approx(mean, rel=0.01) and drawn.max() <= most and drawn.min() >= 1
    assert lengths.moments() == pytest.approx((mean, np.square(drawn).mean()), rel=0.02)


PROMPT = Prompt("train:0", "train", (1, 2), "text")


def test_constant():
    assert constant(7).sample(np.random.default_rng(1), 3).tolist() == [7.0] * 3 and constant(7).moments() == (7, 49)


def test_a_journal_has_the_lengths_of_its_episodes(tmp_path):
    journal = Journal(tmp_path / "journal")
    with journal.begin(0, 0, 2, {}) as writer:
        writer.admit(0, PROMPT, 0)
        for sample, tokens in enumerate((3, 5)):
            writer.add(
                one_turn_episode(
                    f"g0-s{sample}", 0, PROMPT, list(range(tokens)), [-0.5] * tokens, [0] * tokens, "stop", "text"
                )
            )
    found = read_lengths(str(tmp_path), 48)
    assert found.drawn is not None and sorted(found.drawn.tolist()) == [3.0, 5.0]
    assert found.described == f"2 responses of steps 0 to 0 of {tmp_path}"

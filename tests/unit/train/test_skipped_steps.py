"""Skipped optimizer steps are counted, and too many in a row end the run."""

from types import SimpleNamespace

import pytest

from gspo_mega.base.errors import NumericsError
from gspo_mega.checkpoint.load import TrainState
from gspo_mega.train.session import RankSession


def test_skipped_steps_in_a_row_end_the_run():
    session = SimpleNamespace(
        state=TrainState(), config=SimpleNamespace(optimizer=SimpleNamespace(max_skipped_in_a_row=3))
    )

    def note(skipped):
        RankSession.count_step(session, skipped, float("inf") if skipped else 1.0)

    for skipped in (True, True, False, True, True):
        note(skipped)
    assert (session.state.num_optimizer_steps, session.state.skipped_in_a_row) == (1, 2)
    with pytest.raises(
        NumericsError, match=r"not finite \(norm inf\) in 3 optimizer steps in a row \(optimizer.max_skipped_in_a_row\)"
    ):
        note(True)
    assert session.state.num_optimizer_steps == 1


def test_the_critics_skipped_steps_are_counted_apart():
    own = SimpleNamespace(optimizer=SimpleNamespace(max_skipped_in_a_row=2))
    session = SimpleNamespace(state=TrainState(skipped_in_a_row=5), critic=SimpleNamespace(config=own))
    for skipped in (True, False, True):
        RankSession.count_critic_step(session, skipped, 1.0)
    state = session.state
    assert (state.num_critic_steps, state.critic_skipped_in_a_row, state.skipped_in_a_row) == (1, 1, 5)
    with pytest.raises(NumericsError, match=r"2 optimizer steps in a row \(critic.optimizer.max_skipped_in_a_row\)"):
        RankSession.count_critic_step(session, True, float("inf"))

"""Skipped optimizer steps are counted, and too many in a row end the run."""

from types import SimpleNamespace

import pytest

from gspo_mega.checkpoint.train_state import TrainState
from gspo_mega.errors import NumericsError
from gspo_mega.runtime.session import Session


def test_skipped_steps_in_a_row_end_the_run():
    session = SimpleNamespace(
        state=TrainState(), config=SimpleNamespace(optimizer=SimpleNamespace(max_skipped_in_a_row=3))
    )

    def note(skipped):
        Session.note_step(session, skipped, float("inf") if skipped else 1.0)

    for skipped in (True, True, False, True, True):
        note(skipped)
    assert (session.state.num_optimizer_steps, session.state.skipped_in_a_row) == (1, 2)
    with pytest.raises(
        NumericsError, match=r"not finite \(norm inf\) in 3 optimizer steps in a row \(optimizer.max_skipped_in_a_row\)"
    ):
        note(True)
    assert session.state.num_optimizer_steps == 1

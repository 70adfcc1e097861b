"""One recorded run and one server of ranks for all recovery tests."""

import pytest
from recovery_support import Ranks, make_recording, outcome


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    ranks = Ranks(make_recording(tmp_path_factory.mktemp("recovery")))
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def straight(ranks):
    """(outcome, points reached in order) of the run that nothing interrupts; `one_step` is what its folder was after a step."""
    assert ranks.train("one_step", "", "train.num_steps=1") == [0], ranks.log("one_step")
    record = ranks.runs / "reached"
    ranks.copy("one_step", "straight")
    assert ranks.train("straight", f"record={record}") == [0], ranks.log("straight")
    return outcome(ranks.folder("straight")), record.read_text().split()

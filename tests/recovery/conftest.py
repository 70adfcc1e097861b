"""One recorded run, one server of ranks and one SGLang server for all recovery tests."""

import importlib.util
from pathlib import Path

import pytest
from recovery_support import Ranks, make_recording, outcome


def pytest_collection_modifyitems(items):
    # What looks back at the kills of all others comes last.
    items.sort(key=lambda item: "all_kills" in item.fixturenames)
    for item in items:
        if "live" in item.fixturenames and importlib.util.find_spec("sglang") is None:
            item.add_marker(pytest.mark.skip(reason="sglang is not installed"))


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    ranks = Ranks(make_recording(tmp_path_factory.mktemp("recovery")))
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def straight(ranks):
    """(outcome, points reached in order) of the run that nothing interrupts; `one_step` is what its folder was after a
    step.
    """
    assert ranks.train("one_step", "", "train.num_steps=1") == [0], ranks.log("one_step")
    record = ranks.runs / "reached"
    ranks.copy("one_step", "straight")
    assert ranks.train("straight", f"record={record}") == [0], ranks.log("straight")
    return outcome(ranks.folder("straight")), record.read_text().split()


@pytest.fixture(scope="session")
def live(ranks, tmp_path_factory):
    from live_support import LiveRuns

    live = LiveRuns(ranks, tmp_path_factory.mktemp("live"))
    yield live
    live.close()


@pytest.fixture
def all_kills(request, ranks):
    """The points at which this session's tests have killed a process, where all of them ran."""
    collected = {item.path.name for item in request.session.items}
    kinds = {path.name for path in Path(__file__).parent.glob("test_*.py")}
    if not kinds <= collected or request.session.testsfailed or request.config.option.keyword:
        pytest.skip("it looks back at the kills of all recovery tests, and not all of them ran")
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("sglang is not installed, so nothing was killed beside a server")
    return ranks.killed_at

"""What counts as progress of a rank, and in which phase."""

from __future__ import annotations

import asyncio

import pytest

from gspo_mega.base import progress
from gspo_mega.rollout.client.server_client import InFlightRequest


@pytest.fixture(autouse=True)
def start():
    progress.enter(progress.START)
    yield
    progress.enter(progress.START)


def count():
    return progress.current()[1]


def test_phases_nest_and_each_change_is_progress():
    before = count()
    with progress.during("train"):
        assert progress.current() == ("train", before + 1)
        with progress.during(progress.WAIT):
            assert progress.current()[0] == progress.WAIT
        assert progress.current()[0] == "train"
    assert progress.current() == (progress.START, before + 4)


def test_a_phase_ends_with_its_error():
    with pytest.raises(ValueError), progress.during("publish"):
        raise ValueError
    assert progress.current()[0] == progress.START


def test_new_tokens_of_a_long_response_are_progress():
    async def report():
        InFlightRequest(10.0).report(5)

    before = count()
    asyncio.run(report())
    assert count() == before + 1

"""What counts as progress of a rank, and in which phase."""

from __future__ import annotations

import asyncio

import pytest

from gspo_mega.base import beats
from gspo_mega.rollout.client.flight import Flight


@pytest.fixture(autouse=True)
def start():
    beats.enter(beats.START)
    yield
    beats.enter(beats.START)


def count():
    return beats.now()[1]


def test_phases_nest_and_each_change_is_progress():
    before = count()
    with beats.during("train"):
        assert beats.now() == ("train", before + 1)
        with beats.during(beats.WAIT):
            assert beats.now()[0] == beats.WAIT
        assert beats.now()[0] == "train"
    assert beats.now() == (beats.START, before + 4)


def test_a_phase_ends_with_its_error():
    with pytest.raises(ValueError), beats.during("publish"):
        raise ValueError
    assert beats.now()[0] == beats.START


def test_new_tokens_of_a_long_response_are_progress():
    async def report():
        Flight(10.0).report(5)

    before = count()
    asyncio.run(report())
    assert count() == before + 1

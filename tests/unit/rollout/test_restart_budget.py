"""Healthy time forgives restarts of a server, by a clock that the test controls."""

import pytest

from gspo_mega.rollout.server.supervise import RestartBudget

HOUR = 3600.0


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


def lives(budget, clock, *healthy_seconds):
    """Serve for each of these times and then fail; returns the budget's answer to each failure."""
    said = []
    for seconds in healthy_seconds:
        budget.healthy()
        clock.now += seconds
        said.append(budget.failed())
    return said


def test_a_crash_a_week_is_forgiven_for_ever(clock):
    budget = RestartBudget(5, HOUR, clock)
    assert lives(budget, clock, *[7 * 24 * HOUR] * 200) == [0.5] * 200


def test_one_that_never_becomes_healthy_is_given_up_after_so_many_restarts(clock):
    budget = RestartBudget(5, HOUR, clock)
    said = []
    for _ in range(6):
        clock.now += 300.0  # a start that leads nowhere forgives nothing, however long it takes
        said.append(budget.failed())
    assert said == [0.5, 1.0, 2.0, 4.0, 8.0, None]


def test_a_minute_of_health_between_crashes_does_not_help(clock):
    said = lives(RestartBudget(5, HOUR, clock), clock, *[60.0] * 6)
    assert None not in said[:5] and said[5] is None


def test_healthy_time_adds_up_over_restarts(clock):
    """Three crashes an hour with two restarts allowed end it; two crashes in three hours do not, whenever they come."""
    assert lives(RestartBudget(2, HOUR, clock), clock, *[HOUR / 3] * 3)[2] is None
    assert None not in lives(RestartBudget(2, HOUR, clock), clock, *[0.5 * HOUR, 2.5 * HOUR] * 50)


def test_what_was_forgiven_is_not_kept_for_later(clock):
    said = lives(RestartBudget(2, HOUR, clock), clock, 1000 * HOUR, 0, 0)
    assert said == [0.5, 1.0, None]


def test_a_hang_is_no_health(clock):
    """Found silent long after its last answer: the time between counts for nothing."""
    budget = RestartBudget(1, HOUR, clock)
    assert budget.failed() == 0.5
    budget.healthy()
    answered = clock.now + 10.0
    clock.now += 5 * HOUR
    assert budget.failed(last_healthy=answered) is None


def test_none_allowed_is_none(clock):
    assert lives(RestartBudget(0, HOUR, clock), clock, 100 * HOUR) == [None]


def test_the_wait_has_an_end(clock):
    budget = RestartBudget(1000, HOUR, clock)
    assert [budget.failed() for _ in range(1000)][-1] == 30.0

"""The measure of a server's speed, which requests leave a slow one, and who is named as silent: numbers by hand."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from gspo_mega.rollout.pool import StallWarnings
from gspo_mega.rollout.pooled_server import DWELL_SECONDS, SLOW_RATIO, Load, requests_to_move

NOW = 100.0


@dataclass(eq=False)
class Flying:
    """An open request, as far as loads look at it."""

    num_tokens: int
    started: float = 0.0
    last_report: float = NOW
    cause: str | None = None
    is_named: bool = False
    prompt: str = "p"


def load(speed: float | None, *flights: Flying, is_measured: bool = True) -> Load:
    made = Load()
    made.flights, made.speed = set(flights), speed
    if is_measured:
        made.add_report(1, 1.0, first=False)
    return made


def moved(servers: list[Load], room: dict[int, int], now: float = NOW) -> list[int]:
    return [flight.num_tokens for flight in requests_to_move(servers, room, now)]


def many(num: int, first: int = 0, **more) -> list[Flying]:
    return [Flying(first + k, **more) for k in range(num)]


def test_a_server_at_a_third_of_the_fastest_is_slow():
    """12 requests, 9 of them on the slow one, whose share of 30 + 10 tokens/s is 3; of its 6 too many 4 find room."""
    assert SLOW_RATIO == 3
    assert moved([load(30.0, *many(3, 50)), load(10.0, *many(9))], {0: 4}) == [0, 1, 2, 3]
    assert moved([load(30.0, *many(3, 50)), load(10.0, *many(9))], {0: 40}) == [0, 1, 2, 3, 4, 5]
    assert moved([load(30.0, *many(3, 50)), load(10.1, *many(9))], {0: 4}) == []


def test_room_on_slow_servers_is_none_and_what_one_took_is_gone_for_the_next():
    fast, slow, slower = load(30.0), load(10.0, *many(6)), load(5.0, *many(6, 10))
    assert moved([fast, slow, slower], {1: 9, 2: 9}) == []
    # 12 requests over 45 tokens/s: shares 2 and 1, so 4 and 5 too many; the slowest comes first, and takes 5 places.
    assert moved([fast, slow, slower], {0: 7}) == [10, 11, 12, 13, 14, 0, 1]
    assert moved([fast, slow, slower], {0: 5}) == [10, 11, 12, 13, 14]


def test_a_request_stays_for_a_while_and_one_that_ends_already_is_left_alone():
    def servers(**more) -> list[Load]:
        return [load(30.0), load(1.0, *many(4, **more))]

    assert len(moved(servers(started=NOW - DWELL_SECONDS), {0: 9})) == 4
    assert moved(servers(started=NOW - DWELL_SECONDS + 0.01), {0: 9}) == []
    assert moved(servers(cause="paused"), {0: 9}) == []


def test_only_a_measured_speed_makes_another_server_slow():
    assert moved([load(30.0, is_measured=False), load(1.0, *many(4))], {0: 9}) == []


def test_speed_is_tokens_over_seconds_of_reports_and_old_ones_fade():
    one = Load()
    assert not one.is_measured and one.report_tokens(80.0) == 32
    one.add_report(1, 5.0, first=True)  # the time in which the prompt was read says nothing
    assert not one.is_measured and one.num_tokens == 1
    one.add_report(8, 2.0, first=True)
    one.measure(NOW, 80.0)
    assert one.speed == pytest.approx(4.0) and one.num_tokens == 9
    one.add_report(10, 1.0, first=False)
    one.measure(NOW, 80.0)
    assert one.speed == pytest.approx((8 * 63 / 64 + 10) / (2 * 63 / 64 + 1))


@pytest.mark.parametrize(
    ("tokens", "seconds", "deadline", "wanted"),
    [(40, 10.0, 80.0, 40), (40, 10.0, 40.0, 20), (40, 10.0, 8.0, 4), (1, 10.0, 8.0, 1), (4000, 1.0, 800.0, 512)],
)
def test_a_report_is_of_ten_seconds_or_an_eighth_of_the_deadline(tokens, seconds, deadline, wanted):
    one = Load()
    one.add_report(tokens, seconds, first=False)
    assert one.report_tokens(deadline) == wanted


def test_silence_bounds_the_speed():
    """4 tokens/s were measured, reports come every 40 tokens, and half of the requests have been silent for 20 s."""
    one = Load()
    one.add_report(40, 10.0, first=False)
    one.flights = {Flying(1, last_report=NOW - seconds) for seconds in (5.0, 20.0, 50.0)}
    one.measure(NOW, 80.0)
    assert one.speed == pytest.approx(2.0)
    one.flights = {Flying(1, last_report=NOW - 5.0)}
    one.measure(NOW, 80.0)
    assert one.speed == pytest.approx(4.0)


def test_the_longest_silent_requests_are_named_first_and_few_of_one_server():
    silence, told = StallWarnings(), []
    flights = [Flying(k, last_report=NOW - 5 - k, prompt=f"p{k}") for k in range(6)]
    server = SimpleNamespace(server_id="server-0", load=SimpleNamespace(flights=set(flights)))
    silence.warn([server], NOW, 10.0, told.append)
    assert [line.split()[2] for line in told[:3]] == ["p5:", "p4:", "p3:"] and len(told) == 4
    assert told[3].startswith("waiting  3 more requests to server-0")
    silence.warn([server], NOW, 10.0, told.append)
    assert len(told) == 4, "each is named once"

    def later(now: float) -> int:
        server.load.flights.add(Flying(9, last_report=now - 6, prompt="q"))
        before = len(told)
        silence.warn([server], now, 10.0, told.append)
        return len(told) - before

    assert later(NOW + 4.9) == 0, "within half of the deadline no other one is named"
    assert later(NOW + 5.0) == 1
    assert [later(NOW + 5.0 + k) for k in range(1, 4)] == [1, 1, 1], "two more by name, and that there are more"
    assert later(NOW + 9.9) == 0 and later(NOW + 10.0) == 1


def test_a_request_is_silent_from_half_of_its_deadline_on():
    for seconds, is_told in ((4.9, False), (5.0, True)):
        told: list[str] = []
        flights = {Flying(3, last_report=NOW - seconds), Flying(4, last_report=0.0, cause="moved")}
        server = SimpleNamespace(server_id="s", load=SimpleNamespace(flights=flights))
        StallWarnings().warn([server], NOW, 10.0, told.append)
        assert len(told) == is_told

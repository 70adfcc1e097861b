"""Which silent requests are told to the user: each once, and no flood where a whole server hangs."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

from gspo_mega.rollout.pool import StallWarnings


@dataclass(eq=False)
class OneFlight:
    prompt: str
    last_report: float
    num_tokens: int = 7
    cause: str | None = None
    is_named: bool = False


def server_of(server_id: str, *last_reports: float):
    flights = {OneFlight(f"p:{i}", at) for i, at in enumerate(last_reports)}
    return SimpleNamespace(server_id=server_id, load=SimpleNamespace(flights=flights))


def said(silence: StallWarnings, now: float, *servers) -> list[str]:
    lines: list[str] = []
    silence.warn(servers, now, 10.0, lines.append)
    return lines


def test_a_silent_request_is_named_once_with_its_server_and_how_long():
    silence, server = StallWarnings(), server_of("server-3", 0.0, 4.0)
    assert said(silence, 4.9, server) == []
    (line,) = said(silence, 6.0, server)
    assert line.startswith("waiting  prompt p:0: no new token from server-3 for 6.0 s, after 7; at 10 s")
    assert said(silence, 7.0, server) == []
    (line,) = said(silence, 9.5, server)
    assert line.startswith("waiting  prompt p:1: no new token from server-3 for 5.5 s")


def test_a_server_that_hangs_with_thousands_of_requests_fills_a_few_lines():
    silence, hung, other = (
        StallWarnings(),
        server_of("server-3", *(k / 1000 for k in range(10_000))),
        server_of("server-4", 0),
    )
    lines = [line for tick in range(5, 65) for line in said(silence, tick / 4, hung, other)]
    assert [line.split(":")[1].split()[0] for line in lines if "prompt p" in line and "server-4" in line] == ["0"]
    about = [line for line in lines if "server-3" in line]
    assert about[0].startswith("waiting  prompt p:0: ") and "more requests to server-3" in about[3]
    assert len(about) <= 3 * 4, "three names and a sum each half of the deadline"
    assert all(flight.is_named for flight in hung.load.flights)


def test_requests_that_are_being_ended_are_not_named():
    server = server_of("server-0", 0.0)
    for flight in server.load.flights:
        flight.cause = "paused"
    assert said(StallWarnings(), 9.0, server) == []

"""Long responses are not cut: a request ends early only without progress, and its response continues from its tokens."""

from __future__ import annotations

import asyncio

import pytest
from collector_support import Stream, check_whole
from fake_server import FakeServer

from gspo_mega.base.errors import RolloutError
from gspo_mega.rollout import pooled_server
from gspo_mega.rollout.client.server_client import InFlightRequest


def long_and_short(ids):
    """Lengths that a prompt has whenever it is sampled: up to 25 tokens, half of them more than 12."""
    return 1 + ids[1] % 25


def test_a_long_response_that_makes_progress_is_never_cut(fakes, collect):
    """At 40 ms per token, half of the responses take longer than the deadline of 0.5 s; all keep their full length."""
    server = fakes("server-0")
    server.token_seconds, server.length = 0.04, long_and_short
    stream = Stream()
    collector, _ = collect(
        stream=stream, max_new_tokens=30, prompts_per_step=25, group_size=2, progress_deadline_seconds=0.5
    )
    batch = collector.take(0)
    check_whole(batch, stream, prompts=25, group_size=2)
    offered = [long_and_short(p.token_ids) for p in stream.drawn for _ in range(2)]
    accepted = [t.num_response_tokens for t in batch.trajectories]
    assert sum(accepted) / len(accepted) == sum(offered) / len(offered)


@pytest.mark.parametrize("answers_aborts", [True, False])
def test_a_stalled_request_is_cut_and_its_prompt_goes_to_another_server(fakes, collect, answers_aborts):
    stalled, good = fakes("server-0"), fakes("server-1")
    stalled.fault, stalled.answers_aborts = lambda call, ids: "stall", answers_aborts
    good.length = stalled.length = lambda ids: 6
    stream = Stream()
    collector, pool = collect(stream=stream, progress_deadline_seconds=0.2)
    pool.wait_ready(2, 60)
    batch = collector.take(0)
    check_whole(batch, stream)
    # On a busy machine the end of a stalled request may be the first that is heard of its tokens: it was cut all the
    # same.
    cut = batch.counts.get("num_request_failures_deadline", 0) + (
        batch.counts["num_aborted_requests"] if answers_aborts else 0
    )
    assert cut >= 1
    assert batch.counts["num_continued_requests"] >= 1 and batch.counts["num_discarded_tokens"] == 0


def test_a_server_that_is_healthy_and_never_decodes_is_noticed(fakes, collect):
    server = fakes("server-0")
    server.fault = lambda call, ids: "hang"
    collector, _ = collect(progress_deadline_seconds=0.1, max_attempts=2)
    with pytest.raises(RolloutError, match="no answer in 2 attempts.*no new token within 0.1 s, after 0"):
        collector.take(0)


@pytest.mark.parametrize("noise", ["trickle", "endless"])
def test_bytes_that_are_no_tokens_are_no_progress(fakes, collect, noise):
    """Keep-alive comments for ever: bounded in time, and in bytes."""
    server = fakes("server-0")
    server.fault = lambda call, ids: noise if call in (2, 5) else None
    stream = Stream()
    collector, _ = collect(stream=stream, progress_deadline_seconds=0.3)
    check_whole(collector.take(0), stream)


def test_a_whole_deadline_stops_the_run_rather_than_leave_long_responses_out(fakes, collect):
    server = fakes("server-0")
    server.token_seconds, server.length = 0.02, lambda ids: 30
    collector, _ = collect(max_new_tokens=30, request_deadline_seconds=0.2, progress_deadline_seconds=5.0)
    with pytest.raises(
        RolloutError, match=r"no whole response within 0.2 s \(rollout.request_deadline_seconds\).*of at most 30 tokens"
    ):
        collector.take(0)


def test_silence_between_seldom_reports_is_no_stall(fakes, collect):
    """The first reports come every 32 tokens, further apart than the deadline: the end of the request shows its
    progress.
    """
    server = fakes("server-0")
    server.token_seconds, server.length = 0.05, lambda ids: 30
    stream = Stream()
    collector, _ = collect(stream=stream, max_new_tokens=30, progress_deadline_seconds=0.5)
    batch = collector.take(0)
    check_whole(batch, stream)
    assert {t.num_response_tokens for t in batch.trajectories} == {30}
    assert batch.counts["num_continued_requests"] >= 24 and batch.counts["num_discarded_tokens"] == 0


def test_a_dying_server_leaves_the_tokens_that_it_reported(fakes, collect):
    dying = fakes("server-0")
    dying.fault = lambda call, ids: "die midway" if call < 3 else None
    dying.length = lambda ids: 6
    stream = Stream()
    collector, _ = collect(stream=stream)
    batch = collector.take(0)
    check_whole(batch, stream)
    assert batch.counts["num_continued_requests"] == 3
    continued = [body for path, body in dying.calls if len(body["input_ids"]) > 3]
    by_prompt = {g.prompt.token_ids: g for g in batch.groups}
    for body in continued:  # token by token what is in the trajectory, and as many fewer to come
        prompt, so_far = tuple(body["input_ids"][:3]), body["input_ids"][3:]
        assert any(t.response_token_ids[: len(so_far)] == so_far for t in by_prompt[prompt].trajectories)
        assert body["sampling_params"]["max_new_tokens"] == 6 - len(so_far)


def test_what_cannot_be_continued_with_its_experts_is_sampled_again(fakes, collect):
    """A server that dies has not returned the experts of its tokens: they are dropped where needed, and counted."""
    dying = fakes("server-0")
    dying.fault = lambda call, ids: "die midway" if call < 3 else None
    dying.length = lambda ids: 6
    stream = Stream()
    collector, _ = collect(stream=stream, return_routed_experts=True)
    batch = collector.take(0)
    check_whole(batch, stream)
    assert batch.counts["num_continued_requests"] == 0 and batch.counts["num_discarded_tokens"] == 3
    assert all(t.routed_experts.shape == (t.num_tokens - 1, 2, 2) for t in batch.trajectories)


# --- slow servers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("experts", [False, True])
def test_a_slow_server_loses_its_requests_to_the_others(fakes, collect, monkeypatch, experts):
    """One of four servers is 20 times slower: its responses continue elsewhere, and it samples few tokens itself."""
    monkeypatch.setattr(pooled_server, "DWELL_SECONDS", 0.1)
    monkeypatch.setattr("gspo_mega.rollout.pool._POLL_SECONDS", 0.05)
    servers: list[FakeServer] = [fakes(f"server-{i}") for i in range(4)]
    for server in servers:
        server.token_seconds, server.length = 0.004, lambda ids: 80 + ids[1] % 20
    servers[0].token_seconds = 0.08
    stream = Stream()
    collector, pool = collect(
        stream=stream,
        max_new_tokens=120,
        prompts_per_step=16,
        group_size=4,
        return_routed_experts=experts,
        progress_deadline_seconds=20.0,
    )
    pool.wait_ready(4, 60)
    batch = collector.take(0)
    check_whole(batch, stream, prompts=16)
    share = servers[0].num_tokens / sum(server.num_tokens for server in servers)
    assert share < 0.08, share
    assert batch.counts["num_moved_responses"] >= 8
    assert batch.counts["num_discarded_tokens"] == 0 and batch.counts["num_request_failures"] == 0
    assert (
        sum(s.num_tokens for s in servers) <= 1.02 * batch.counts["num_generated_tokens"] + 64
    )  # no token was made twice
    before = servers[0].num_generated
    collector.take(1)
    assert servers[0].num_generated - before <= 8  # of 64: it is known to be slow


class Silent:
    """A flight's times, without a request."""

    def __init__(self, started, last_report, num_tokens=0):
        self.started, self.last_report, self.num_tokens, self.cause = started, last_report, num_tokens, None


def loads_of(*speeds, open_requests=8, now=100.0):
    made = []
    for speed in speeds:
        made.append(pooled_server.Load())
        made[-1].flights = {Silent(now - 50, now - 0.1) for _ in range(open_requests)}
        if speed is not None:
            made[-1].add_report(int(speed * 10), 10.0, first=False)
        made[-1].measure(now, 120.0)
    return made


def test_requests_leave_for_a_much_faster_server_only():
    room = {0: 100, 1: 100, 2: 100}
    assert pooled_server.requests_to_move(loads_of(50, 40, 30), room, 100.0) == []
    slow = loads_of(50, 50, 5)
    moved = pooled_server.requests_to_move(slow, room, 100.0)
    assert set(moved) < slow[2].flights and len(moved) == 7
    assert (
        pooled_server.requests_to_move(slow, {0: 2, 1: 1, 2: 9}, 100.0)
        and len(pooled_server.requests_to_move(slow, {0: 2, 1: 1, 2: 9}, 100.0)) == 3
    )
    assert pooled_server.requests_to_move(slow, {2: 100}, 100.0) == []  # nobody has room
    for flight in slow[2].flights:
        flight.started = 99.0
    assert pooled_server.requests_to_move(slow, room, 100.0) == []  # they only just began


def test_silence_makes_a_server_slow_before_the_deadline():
    fast, silent = loads_of(50, 50)
    for flight in silent.flights:
        flight.last_report = 60.0
    silent.measure(100.0, 120.0)
    assert silent.speed < 50 / pooled_server.SLOW_RATIO
    assert len(pooled_server.requests_to_move([fast, silent], {0: 100, 1: 100}, 100.0)) >= 4


def test_new_requests_go_by_tokens_in_flight_and_speed():
    def shares(*loads_):
        named = {f"s{i}": each for i, each in enumerate(loads_)}
        for _ in range(400):
            named[pooled_server.least_loaded(named, ())].num_tokens += 100
        return [each.num_tokens / sum(each.num_tokens for each in loads_) for each in loads_]

    assert shares(*loads_of(50, 50)) == pytest.approx([0.5, 0.5], abs=0.01)
    assert shares(*loads_of(60, 20)) == pytest.approx([0.75, 0.25], abs=0.01)
    assert shares(*loads_of(50, None, open_requests=0)) == pytest.approx([0.5, 0.5], abs=0.01)
    full, empty = loads_of(50, 50)
    full.num_tokens = 20_000
    assert shares(full, empty) == pytest.approx([0.5, 0.5], abs=0.01)
    assert pooled_server.least_loaded({"a": full, "b": empty}, {"b"}) == "a"


def test_reports_come_often_enough_before_the_deadline_and_seldom_otherwise():
    unknown, slow, fast = loads_of(None, 0.5, 1000.0)
    assert unknown.report_tokens(120.0) == 32
    assert slow.report_tokens(120.0) == 5 and slow.report_tokens(8.0) == 1
    assert fast.report_tokens(120.0) == 512


def test_a_request_that_is_over_cannot_be_ended():
    """The pool's balancing may still refer to the flight."""

    async def fly():
        flight = InFlightRequest(10.0)
        async with asyncio.timeout(None) as limit:
            flight.begin(None, limit, lambda: None)
        flight.close()
        flight.end("moved")
        return flight.cause

    assert asyncio.run(fly()) is None


def test_a_flight_is_ended_once():
    async def fly():
        flight, ended = InFlightRequest(10.0), []
        async with asyncio.timeout(None) as limit:
            flight.begin(None, limit, lambda: ended.append(1))
            flight.end("moved")
            flight.end("stalled")
        flight.close()
        return flight.cause, ended, flight.so_far().token_ids

    assert asyncio.run(fly()) == ("moved", [1], [])

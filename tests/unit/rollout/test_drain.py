"""A server that is asked to stop: its open requests leave it, in order and in time."""

from __future__ import annotations

import threading
import time

import pytest
from collector_support import Stream, check_whole
from waiting import until

from gspo_mega.rollout.server.supervise import drain


class Scripted:
    """Open requests by the clock. `counts`: from each second on."""

    def __init__(self, counts, stays_after_cut=False):
        self.now = 0.0
        self.counts = counts
        self.cut_at = None
        self.stays_after_cut = stays_after_cut
        self.told_to_end_at = None

    def count(self):
        if self.cut_at is not None and not self.stays_after_cut:
            return 0
        return [count for second, count in self.counts if second <= self.now][-1]

    def cut_short(self):
        self.cut_at = self.now

    def go_on(self, seconds):
        self.now += seconds
        return self.told_to_end_at is None or self.now < self.told_to_end_at

    def drain(self, seconds=10.0):
        return drain(self, seconds, self.go_on, lambda: self.now)


def test_a_server_without_requests_ends_as_soon_as_nobody_can_send_one():
    one = Scripted([(0, 0)])
    assert one.drain() == "no request was open"
    assert one.now == pytest.approx(0.625)


def test_requests_that_leave_are_waited_for():
    one = Scripted([(0, 3), (1, 5), (2, 1), (4, 0)])
    assert one.drain() == "5 open requests left in 4.6 s"
    assert one.cut_at is None


def test_a_request_that_was_on_its_way_is_waited_for():
    one = Scripted([(0, 0), (0.3, 1), (2, 0)])
    assert one.drain() == "1 open requests left in 2.6 s"


def test_what_is_left_is_cut_short_before_the_time_is_over():
    one = Scripted([(0, 3)])
    assert one.drain() == "3 open requests cut short in 8.8 s"
    assert one.cut_at == pytest.approx(8.0)


def test_the_deadline_holds():
    one = Scripted([(0, 3)], stays_after_cut=True)
    assert one.drain() == "3 requests were still open after 10 s (server.drain_seconds)"
    assert one.now == pytest.approx(10.0)


def test_a_silent_server_is_not_waited_for():
    one = Scripted([(0, 3), (1, None)])
    assert one.drain() == "it does not say what is open"
    assert one.now == pytest.approx(1.0)


def test_who_is_told_to_end_at_once_does():
    one = Scripted([(0, 3)])
    one.told_to_end_at = 0.5
    assert one.drain() == "told to end at once, with 3 requests open"
    assert one.now == pytest.approx(0.5)


# --- as the pool sees it ----------------------------------------------------------------------------------------


def test_open_requests_leave_a_draining_server_with_their_tokens(fakes, collect, monkeypatch):
    """No token is sampled twice, no request fails, and the server gets no new work."""
    monkeypatch.setattr("gspo_mega.rollout.pool._POLL_SECONDS", 0.05)
    servers = [fakes(f"server-{i}") for i in range(2)]
    for server in servers:
        server.token_seconds, server.length = 0.01, lambda ids: 60 + ids[1] % 20
    stream = Stream()
    collector, pool = collect(stream=stream, max_new_tokens=120, prompts_per_step=8, group_size=4)
    pool.wait_ready(2, 60)
    collector.start(0)
    until(lambda: servers[0].num_open >= 8 and servers[0].num_tokens > 40)
    servers[0].register("draining")
    until(lambda: servers[0].num_open == 0)
    before = servers[0].num_generated
    batch = collector.take(0)
    check_whole(batch, stream, prompts=8)
    assert servers[0].num_generated == before
    assert batch.counts["num_drained_responses"] >= 4  # some may just have ended
    assert batch.counts["num_request_failures"] == batch.counts["num_discarded_tokens"] == 0
    assert sum(s.num_tokens for s in servers) <= 1.02 * batch.counts["num_generated_tokens"] + 64


def test_a_draining_server_counts_as_gone_but_not_as_failed(fakes, pools):
    pool = pools()
    draining, other = fakes("server-0"), fakes("server-1")
    pool.wait_ready(2, 60)
    capacity = pool.capacity
    draining.register("draining")
    until(lambda: pool.capacity == capacity // 2)
    assert [control.server_id for control in pool.controls()] == ["server-1"]
    assert pool.num_given_up == 0
    pool.wait_ready(2, 60)  # it is not waited for
    draining.register("stopped")
    other.die()
    other.start()
    until(lambda: [control.generation for control in pool.controls()] == [2])


def test_a_request_waits_where_the_only_server_drains(fakes, collect, monkeypatch):
    """Until one comes: its weights count, and the response goes on from its tokens."""
    monkeypatch.setattr("gspo_mega.rollout.pool._POLL_SECONDS", 0.05)
    first = fakes("server-0")
    first.token_seconds, first.length = 0.01, lambda ids: 60
    stream = Stream()
    collector, pool = collect(stream=stream, max_new_tokens=120, prompts_per_step=2, group_size=4)
    pool.wait_ready(1, 60)
    collector.start(0)
    until(lambda: first.num_tokens > 40)
    first.register("draining")
    until(lambda: first.num_open == 0)
    threading.Timer(0.5, lambda: fakes("server-7")).start()
    began = time.monotonic()
    batch = collector.take(0)
    assert time.monotonic() - began > 0.4
    check_whole(batch, stream, prompts=2)
    assert batch.counts["num_drained_responses"] == 8

"""Servers as fluids against a simulation token by token, and against limits by hand."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_mega.verify.simulate.servers import DecodeCost, FluidServers, ServerCost

DECODE = DecodeCost(weights=0.02, cached=3e-6, computed=4e-4, unread=0.9, fixed=0.001)


def cost(prefill=2e-5, decode=DECODE):
    return ServerCost(decode, prefill, cache_tokens=1e12, most_requests=10_000)


def token_by_token(arrivals, slots, held, price):
    """(seconds at which each request ends) of one server. `arrivals`: (seconds, name, tokens) in order. A request starts
    when a slot is free, its prompt is read while nothing is decoded, and each pass gives every running one a token.
    """
    waiting, running, ended, now = list(arrivals), {}, {}, 0.0
    while waiting or running:
        while waiting and len(running) < slots and waiting[0][0] <= now + 1e-12:
            _, name, tokens = waiting.pop(0)
            running[name] = [held, tokens]
            now += held * price.prefill
        if not running:
            now = waiting[0][0]
            continue
        cached = sum(have for have, _ in running.values()) + len(running) / 2
        now += float(price.decode.seconds(np.array(float(len(running))), np.array(cached)))
        for name in list(running):
            running[name][0] += 1
            running[name][1] -= 1
            if running[name][1] == 0:
                ended[name] = now
                del running[name]
    return ended


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=14), st.integers(1, 5), st.integers(1, 400))
def test_a_burst_ends_as_token_by_token(lengths, slots, held):
    servers = FluidServers(1, slots, cost())
    servers.add(np.arange(len(lengths)), np.full(len(lengths), float(held)), np.array(lengths, float))
    line = servers.timeline()
    expected = token_by_token([(0.0, name, tokens) for name, tokens in enumerate(lengths)], slots, held, cost())
    assert line.finish.tolist() == pytest.approx([expected[name] for name in range(len(lengths))], rel=1e-9)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=2, max_size=10), st.integers(1, 4), st.data())
def test_going_on_in_parts_changes_nothing(lengths, slots, data):
    """However often the clock is stopped, and whatever arrives at the end of a decode step, the ends are the same."""
    price = cost(prefill=0.0, decode=replace(DECODE, cached=3e-7))
    first = data.draw(st.integers(1, len(lengths)))
    servers = FluidServers(1, slots, price)
    servers.add(np.arange(first), np.zeros(first), np.array(lengths[:first], float))
    whole = servers.timeline()
    stop = float(data.draw(st.sampled_from(sorted(whole.finish.tolist()))))
    _, _, ended = servers.advance(whole, stop)
    seconds = {
        name: time for name, time in zip(range(first), whole.finish.tolist()) if name in set(ended.name.tolist())
    }
    more = np.arange(first, len(lengths))
    servers.add(more, np.zeros(len(more)), np.array(lengths[first:], float))
    now = stop
    for _ in range(50):
        line = servers.timeline()
        if not len(line.finish):
            break
        until = float(line.finish.max()) * data.draw(st.sampled_from([0.3, 0.7, 1.0]))
        open_before = servers.open.name
        names = set(servers.advance(line, until)[2].name.tolist())
        seconds |= {n: now + t for n, t in zip(open_before.tolist(), line.finish.tolist()) if n in names}
        now += until
    else:
        line = servers.timeline()
        seconds |= {n: now + t for n, t in zip(servers.open.name.tolist(), line.finish.tolist())}
    arrivals = [(0.0 if name < first else stop, name, tokens) for name, tokens in enumerate(lengths)]
    expected = token_by_token(arrivals, slots, 0, price)
    # Where the clock stops inside a stretch, the rate is that of the stretch's middle.
    assert [seconds[n] for n in range(len(lengths))] == pytest.approx(
        [expected[n] for n in range(len(lengths))], rel=2e-3
    )


def test_constant_lengths_are_waves():
    """In closed form: 3 waves of 4 requests, each of L steps at the same cost."""
    price = cost(prefill=0.0, decode=DecodeCost(weights=0.01, cached=0.0, computed=0.0))
    servers = FluidServers(2, 4, price)
    servers.add(np.arange(24), np.zeros(24), np.full(24, 100.0))
    line = servers.timeline()
    assert sorted(set(np.round(line.finish, 9).tolist())) == [1.0, 2.0, 3.0]
    servers.advance(line, 3.0)
    assert servers.is_idle and servers.busy == pytest.approx(6.0) and servers.sampled == pytest.approx(2400.0)


def test_one_server_without_limits_takes_as_long_as_the_longest():
    """Infinite cache: all run at once; a step's seconds follow from who still runs."""
    price = cost(prefill=0.0, decode=DecodeCost(weights=0.0, cached=0.0, computed=0.001))
    servers = FluidServers(1, 10**4, price)
    servers.add(np.arange(3), np.zeros(3), np.array([10.0, 20.0, 40.0]))
    assert servers.timeline().finish.tolist() == pytest.approx([0.03, 0.05, 0.07])


def test_arrivals_go_where_fewest_are_open():
    servers = FluidServers(4, 8, cost())
    servers.add(np.arange(5), np.zeros(5), np.full(5, 9.0))
    servers.add(np.arange(5, 12), np.zeros(7), np.full(7, 9.0))
    assert np.bincount(servers.open.server).tolist() == [3, 3, 3, 3]
    servers.lose(np.array([2]))
    assert sorted(np.bincount(servers.open.server, minlength=4).tolist()) == [0, 4, 4, 4]
    servers.come_back(np.array([2]))
    servers.add(np.arange(12, 16), np.zeros(4), np.full(4, 9.0))
    assert np.bincount(servers.open.server).tolist() == [4, 4, 4, 4]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 40))
def test_division_is_as_even_as_it_can_be(load, number):
    servers = FluidServers(len(load), 4, cost())
    servers._put(np.arange(sum(load)), np.repeat(np.arange(len(load)), load), np.zeros(sum(load)), np.ones(sum(load)))
    given_to = servers._divide(number)
    after = np.array(load) + np.bincount(given_to, minlength=len(load))
    assert len(given_to) == number
    touched = after[np.bincount(given_to, minlength=len(load)) > 0]
    assert touched.max() <= after.min() + 1, "no server got a request while another had two fewer"


def test_what_a_lost_server_had_goes_on_from_its_tokens():
    price = cost(prefill=0.0, decode=DecodeCost(weights=0.01, cached=0.0, computed=0.0))
    servers = FluidServers(2, 4, price)
    servers.add(np.arange(2), np.full(2, 7.0), np.array([100.0, 100.0]))
    servers.advance(servers.timeline(), 0.4)
    servers.lose(np.array([0]))
    assert servers.open.held.tolist() == [7.0, 47.0] and servers.open.server.tolist() == [1, 1]
    assert servers.timeline().finish.tolist() == pytest.approx([0.6, 0.6])
    servers.lose(np.array([1]))
    assert not servers.is_idle and not len(servers.open), "nobody is there to go on"
    servers.come_back(np.array([0]))
    assert servers.timeline().finish.tolist() == pytest.approx([0.6, 0.6])


def test_reading_again_takes_its_time():
    price = cost(prefill=0.001, decode=DecodeCost(weights=0.01, cached=0.0, computed=0.0))
    servers = FluidServers(1, 1, price)
    servers.add(np.arange(2), np.full(2, 10.0), np.array([50.0, 50.0]))
    servers.advance(servers.timeline(), 0.01 + 0.2)
    servers.read_again()
    # 30 tokens are read again; the queued one is read once, when it starts.
    assert servers.timeline().finish.tolist() == pytest.approx([0.03 + 0.3, 0.03 + 0.3 + 0.01 + 0.5])
    taken = servers.take_queued()
    assert taken.name.tolist() == [1] and len(servers.open) == 1
    servers.put_back(taken)
    assert len(servers.open) == 2

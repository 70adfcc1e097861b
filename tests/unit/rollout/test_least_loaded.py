"""Which server a request goes to: the least loaded for its speed, or the one that has its prefix, within a ratio."""

from __future__ import annotations

import pytest

from gspo_mega.rollout.pooled_server import PREFER_RATIO, Load, least_loaded


def server(num_tokens: int, speed: float | None = None) -> Load:
    load = Load()
    load.num_tokens, load.speed = num_tokens, speed
    return load


def test_fewest_tokens_for_its_speed():
    assert least_loaded({"a": server(100, 10.0), "b": server(150, 20.0)}, ()) == "b"
    assert least_loaded({"a": server(100, 10.0), "b": server(150)}, ()) == "a", "an unknown speed is the fastest known"
    assert least_loaded({"a": server(0), "b": server(9)}, {"a"}) == "b"
    assert least_loaded({"a": server(0)}, {"a"}) == "a", "there is no other"


@pytest.mark.parametrize(("more", "chosen"), [(-1, "held"), (0, "held"), (1, "other")])
def test_the_preferred_one_within_the_ratio(more, chosen):
    """With a context of 99 tokens: (load + 99 + 1) of the preferred one against twice that of the other."""
    other = 200
    held = int(PREFER_RATIO * (other + 100)) - 100 + more
    assert least_loaded({"held": server(held), "other": server(other)}, (), "held", 99) == chosen


def test_a_server_that_is_much_slower_loses_what_prefers_it():
    servers = {"held": server(10, 1.0), "other": server(10, 1.9)}
    assert least_loaded(servers, (), "held", 50) == "held"
    servers["other"].speed = 2.1
    assert least_loaded(servers, (), "held", 50) == "other"


def test_preferring_does_not_go_against_avoid_or_what_is_there():
    servers = {"held": server(0), "other": server(0)}
    assert least_loaded(servers, {"held"}, "held", 5) == "other"
    assert least_loaded({"other": server(0)}, (), "held", 5) == "other"

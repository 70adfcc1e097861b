"""A heartbeat that ends is rank 0's error, not the others' guess."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from gspo_mega.base.errors import RankError
from gspo_mega.train import scatter


class Broken:
    def set(self, key, value):
        raise ConnectionError("the store is gone")


def test_a_heartbeat_that_ends_is_said_by_rank_0(monkeypatch):
    monkeypatch.setattr(scatter, "HEARTBEAT_SECONDS", 0.01)
    store = SimpleNamespace(set=lambda key, value: None)
    lead = scatter.Exchange(store, SimpleNamespace(size=1, rank=0, group=None), [[0]], Broken())
    deadline = time.monotonic() + 10
    with pytest.raises(RankError, match="rank 0's heartbeat ended: the store is gone"):
        while time.monotonic() < deadline:
            lead.send_all(7)
            time.sleep(0.01)


@pytest.mark.parametrize("comes_after", [0.0, 0.002, 0.05, 0.5, 5.0])
def test_a_message_is_seen_soon_and_asked_for_rarely(monkeypatch, comes_after):
    """Late by at most 5 % of the wait, 0.5 ms or 10 ms, whichever rule applies; and 60 questions a factor of 20."""
    now, num_asked = 0.0, 0

    def sleep(seconds):
        nonlocal now
        now += seconds

    def check(keys):
        nonlocal num_asked
        num_asked += 1
        return keys == ["message/0"] and now >= comes_after

    monkeypatch.setattr(scatter, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    rank = scatter.Exchange(SimpleNamespace(check=check), SimpleNamespace(size=2, rank=1, group=None), [[0, 1]])
    rank._await("message/0")
    assert now - comes_after <= min(max(0.05 * comes_after, 0.0005), 0.01) + 1e-9
    assert num_asked <= 90 + now / 0.01

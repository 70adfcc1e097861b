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

"""Which weight versions samples may come from: the rule itself, and that pool and sampler ask it."""

from __future__ import annotations

import pytest
from collector_support import Stream, check_whole
from test_pool import acquire

from gspo_mega.base.errors import RolloutError
from gspo_mega.rollout.arrival_order import Freshness


@pytest.mark.parametrize(
    ("max_staleness", "admitted"),
    [(0, [7]), (1, [6, 7]), (3, [4, 5, 6, 7])],
)
def test_versions_that_are_admitted(max_staleness, admitted):
    freshness = Freshness(max_staleness)
    assert [version for version in range(12) if freshness.admits(version, 7)] == admitted
    assert not freshness.admits(None, 7)
    assert freshness.admits_all(admitted, 7) and freshness.admits_all([], 7)
    assert not freshness.admits_all([*admitted, 8], 7)
    assert not freshness.admits_all([*admitted, admitted[0] - 1], 7)
    assert [freshness.staleness(version, 7) for version in (7, 4, 8)] == [0, 3, -1]


def test_the_first_value_is_zero():
    assert Freshness() == Freshness(0)
    assert Freshness(0).describe(7) == "7 is committed"
    assert Freshness(2).describe(1) == "1 is committed and versions from 0 on are admitted"


def test_a_request_starts_only_on_a_server_that_holds_the_committed_version(fakes, pools):
    """What starts now may be trained as late as what starts under the committed version: an older one would be too
    old then.
    """
    fakes("server-0", version=2), fakes("server-1", version=3), fakes("server-2", version=5)
    pool = pools(no_server_deadline_seconds=0.3, max_staleness=1)
    pool.wait_ready(3, 60)
    pool.commit(3, [])
    assert {acquire(pool).server_id for _ in range(4)} == {"server-1"}
    # The servers that are behind are published to, whether or not they may work meanwhile.
    assert [c.server_id for c in pool.servers_behind()] == ["server-0", "server-2"]
    pool.commit(5, [])
    assert {acquire(pool).server_id for _ in range(4)} == {"server-2"}
    pool.commit(6, [])
    with pytest.raises(RolloutError, match="no server could take a request"):
        acquire(pool)


def test_the_sampler_asks_every_answer_for_its_version(fakes, collect):
    """Tokens that a server reports for a version older than the request are not used, whatever the bound."""
    server = fakes("server-0", version=3)
    stream = Stream()
    collector, pool = collect(stream=stream, max_attempts=1, max_staleness=1)
    pool.wait_ready(1, 60)
    pool.commit(3, [])
    check_whole(collector.take(0), stream, version=3)
    collector.close()
    pool.commit(4, [("server-0", 1)])  # it says 3 still
    with pytest.raises(RolloutError, match=r"tokens of weight versions \[3\]; 4 is committed"):
        collector.take(1)
    assert server.version == 3

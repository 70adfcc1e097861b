"""What rank 0 hands out reaches every rank whole, and leaves rank 0 once per data-parallel rank."""

from __future__ import annotations

import pytest
from hand_out_jobs import expected

from gspo_mega.train import scatter

SIZE = 2 * scatter.CHUNK_BYTES + 12345


@pytest.mark.parametrize(("size", "messages"), [(1, 6), (2, 4), (4, 3)])
def test_messages_arrive_and_leave_rank_0_once(rank_pools, size, messages):
    """`messages`: to every replica but rank 0 alone, and to every pair in one. Four ranks are 4, 2 or 1 replicas."""
    rounds = 2
    results = rank_pools(4).run("hand_out_jobs:hand_out", size=size, num_bytes=SIZE, num_messages=rounds)
    for rank in range(1, 4):
        data, first = rank // size, rank - rank % min(size, 2)
        assert results[rank]["got"] == [expected(SIZE, n, which) for n in range(rounds) for which in (data, first)]
    sent = sum(results[0]["sent"].values())
    assert rounds * messages * SIZE <= sent <= rounds * messages * SIZE * 1.001 + 4096
    assert results[0]["counted"] == pytest.approx(sent, rel=1e-4)

"""While a batch is sampled Python's collector walks its records seldom, and what is over leaves nothing to it."""

from __future__ import annotations

import asyncio
import gc

import pytest
from fake_answers import EOS, VOCAB

from gspo_mega.base import garbage
from gspo_mega.base.garbage import RareCollections
from gspo_mega.rollout.client.completion import SamplingParams
from gspo_mega.rollout.client.server_client import InFlightRequest, ServerClient, ServerError


@pytest.fixture
def num_full():
    """How often everything was collected so far."""
    seen = []

    def note(phase, info):
        if phase == "stop" and info["generation"] == 2:
            seen.append(info["collected"])

    gc.collect()
    gc.callbacks.append(note)
    yield lambda: len(seen)
    gc.callbacks.remove(note)


def pile(num: int) -> list:
    return [[] for _ in range(num)]


def test_everything_is_collected_when_it_has_doubled(num_full, monkeypatch):
    monkeypatch.setattr(garbage, "_FIRST", 10)
    thresholds, kept = gc.get_threshold(), []
    with pytest.raises(KeyError), RareCollections() as collections:
        counts = []
        for _ in range(40):
            kept.append(pile(20_000))
            collections.collect_if_doubled()
            counts.append(num_full())
        assert counts[0] == 0 and 2 <= counts[-1] <= 4, "some 100 collections of younger objects: at 10, 30 and 70"
        raise KeyError
    assert gc.get_threshold() == thresholds
    before = num_full()
    kept.append(pile(400_000))
    assert num_full() > before, "as usual again"


def test_a_request_that_is_over_leaves_no_cycle(fakes):
    """Its answer would stay in memory until everything is collected."""
    server = fakes("server-0")
    params = SamplingParams(4, 1.0, 1.0, -1, (EOS,))

    async def ask() -> None:
        client = ServerClient("server-0", f"http://127.0.0.1:{server.port}", "the-key", vocab_size=VOCAB)
        for _ in range(3):
            flight = InFlightRequest(5.0)
            try:
                await client.generate([3, 4, 5], params, request_id="r", deadline_seconds=5.0, flight=flight)
            except ServerError as error:
                assert server.fault(0, []), error
            del flight
        await client.close()

    for fault in (None, "truncated"):
        server.fault = lambda call, ids, fault=fault: fault
        gc.collect()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            asyncio.run(ask())
            gc.collect()
            assert not [
                one
                for one in gc.garbage
                if type(one).__name__ in ("InFlightRequest", "StreamedAnswer", "ndarray", "Column")
            ]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()

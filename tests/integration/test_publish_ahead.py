"""Turns that are open while new weights are published, through the sampler and the pool, on the real SGLang.

As in `test_publish_in_flight.py`, the reference is Hugging Face's model with the weights of each version.
"""

from __future__ import annotations

import asyncio
import time

import pytest
import torch
from servers import trust
from test_publish_in_flight import PARAMS, PROMPTS, SAMPLES, SECONDS, SHORT, TOLERANCE, Long
from test_rollout_server import reference_log_probs

from gspo_mega.rollout.client.completion import SamplingParams
from gspo_mega.rollout.sampler import Sampler
from gspo_mega.train.servers import paused


@pytest.fixture(scope="module")
def long_server(tmp_path_factory, dense_model):
    server = Long(tmp_path_factory.mktemp("ahead"), dense_model)
    yield server
    server.close()


@pytest.fixture
def server(long_server: Long):
    yield long_server
    long_server.restart_at_version_0()
    long_server.pool.announce(0)
    trust(long_server.pool)


class Turns:
    """Turns that are sampled at once through a sampler, as episodes do it."""

    def __init__(self, server: Long, mode: str, params: SamplingParams = PARAMS) -> None:
        settings = server.settings.model_copy(update={"on_publish": mode, "max_staleness": 2})
        self._pool, self.sampler = server.pool, Sampler(settings, server.pool)
        self.prompts = [prompt for prompt in PROMPTS for _ in range(SAMPLES)]
        self._future = server.pool.loop.submit(self._all(params))

    async def _all(self, params: SamplingParams):
        calls = [self.sampler.sample(f"p{i}", prompt, params, f"turn-{i}") for i, prompt in enumerate(self.prompts)]
        return await asyncio.gather(*calls)

    def wait_for_tokens(self) -> None:
        """Until some open request has sampled a few tokens; its server reports the first and then every 32nd."""
        until = time.monotonic() + SECONDS
        while not any(flight.num_tokens for e in self._pool.ready_servers() for flight in list(e.load.flights)):
            assert time.monotonic() < until and not self._future.done()
            time.sleep(0.002)
        time.sleep(0.05)

    def results(self):
        return self._future.result(timeout=SECONDS)


def publish(server: Long, version: int, mode: str, method: str) -> None:
    """What a publish does around sending."""
    seconds = {"deadline_seconds": SECONDS}
    keeps = mode == "continue_with_cache"
    with paused(server.pool, mode):
        (server.control.pause_in_place if keeps else server.control.pause)(**seconds)
        server.send(version, method, flush=not keeps)
        server.pool.announce(version)
        server.control.resume(**seconds)
        server.pool.commit(version, [(server.control.server_id, server.control.generation)])


def worst_gap(server: Long, turns: Turns, results) -> float:
    worst = 0.0
    for prompt, turn in zip(turns.prompts, results, strict=True):
        expected = torch.stack([reference_log_probs(folder, prompt, turn.token_ids, 1.0) for folder in server.folders])
        under = expected.gather(0, torch.tensor(turn.weight_versions)[None])[0]
        worst = max(worst, (torch.tensor(turn.log_probs).double() - under).abs().max().item())
    return worst


def through_two_publishes(server: Long, mode: str, method: str):
    turns = Turns(server, mode)
    for version in (1, 2):
        turns.wait_for_tokens()
        publish(server, version, mode, method)
    results = turns.results()
    assert turns.sampler.counts["num_request_failures"] == turns.sampler.counts["num_discarded_tokens"] == 0
    for turn in results:
        assert turn.weight_versions == sorted(turn.weight_versions)
    return turns, results


@pytest.mark.parametrize("method", ["disk", "distributed"])
def test_a_turn_continues_with_exact_log_probs_under_each_version(server: Long, method):
    turns, results = through_two_publishes(server, "continue", method)
    spans = [sorted(set(turn.weight_versions)) for turn in results]
    assert sum(len(span) > 1 for span in spans) >= len(spans) // 3, spans
    assert turns.sampler.counts["num_paused_responses"] >= sum(len(span) - 1 for span in spans) > 0
    assert (gap := worst_gap(server, turns, results)) < TOLERANCE, gap


def test_a_turn_that_is_waited_for_has_one_version(server: Long):
    turns = Turns(server, "wait")
    turns.wait_for_tokens()
    publish(server, 1, "wait", "disk")
    results = turns.results()
    assert {len(set(turn.weight_versions)) for turn in results} == {1}
    assert turns.sampler.counts["num_paused_responses"] == 0
    assert worst_gap(server, turns, results) < TOLERANCE


def test_what_goes_on_over_the_cache_is_the_hybrid_it_is_called_and_later_turns_are_exact(server: Long):
    turns, results = through_two_publishes(server, "continue_with_cache", "disk")
    assert any(len(set(turn.weight_versions)) > 1 for turn in results)
    assert turns.sampler.counts["num_paused_responses"] == turns.sampler.counts["num_continued_requests"] == 0
    assert worst_gap(server, turns, results) > 100 * TOLERANCE
    later = Turns(server, "continue_with_cache", SHORT)  # the same prompts, whose prefixes older weights have cached
    results = later.results()
    assert {version for turn in results for version in turn.weight_versions} == {2}
    assert (gap := worst_gap(server, later, results)) < TOLERANCE, gap

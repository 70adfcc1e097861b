"""Weights that change while requests are open, on the real SGLang: whose weights sampled a token, and over which cache.

SGLang's pause mode `retract` puts running requests back into its queue with their tokens; after the update and a flush
they go on behind a prefix that the new weights computed. The reference is Hugging Face's model with the weights of each
version: a token's log-prob is the one that its version's weights give it behind all tokens before it. Requests that
keep cache of older weights (`in_place`, or a prefix that was not flushed) must fail the same comparison.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from servers import Serve, Unending, run_config, trust
from test_rollout_server import reference_log_probs
from tiny_models import perturb

from gspo_mega.config import load_config
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.rollout.client.completion import Completion, SamplingParams
from gspo_mega.rollout.client.server_client import InFlightRequest
from gspo_mega.rollout.pool import ServerPool
from gspo_mega.sync.broadcast import GroupSender
from gspo_mega.sync.servers import Deadline, Fleet

# Seconds of sampling on a machine on which a test's next call takes milliseconds: nothing ends before it is paused.
NUM_TOKENS = 440
PARAMS = Unending(NUM_TOKENS, 1.0, 1.0, -1)
SHORT = replace(PARAMS, max_new_tokens=48)
PROMPTS = [tuple(range(40 + 3 * i, 100 + 3 * i)) for i in range(3)]
SAMPLES = 4
SECONDS = 240.0
TOLERANCE = 2e-5  # nats, fp32: as for requests that no update meets


class LabelledFlight(InFlightRequest):
    """Remembers each report: (tokens so far, the version that it names)."""

    def __init__(self) -> None:
        super().__init__(SECONDS)
        self.labels: list[tuple[int, int]] = []

    def report(self, num_tokens: int) -> None:
        super().report(num_tokens)
        assert self._answer is not None
        self.labels.append((self.num_tokens, self._answer.so_far().weight_versions[-1]))


class Open:
    """Requests that are sent at once, each prompt sampled several times, and open until `results`."""

    def __init__(self, pool: ServerPool, client, params: SamplingParams) -> None:
        self.prompts = [prompt for prompt in PROMPTS for _ in range(SAMPLES)]
        self.flights: list[LabelledFlight] = []
        self._before = [0] * len(self.prompts)
        self._future = pool.loop.submit(self._all(client, params))

    async def _all(self, client, params: SamplingParams) -> list[Completion]:
        self.flights = [LabelledFlight() for _ in self.prompts]
        # Intervals without a common multiple below NUM_TOKENS: whenever the server pauses, some tokens are unreported.
        calls = [
            client.generate(
                prompt,
                params,
                request_id=f"open-{i}",
                deadline_seconds=SECONDS,
                report_tokens=(4, 5, 7, 9)[i % SAMPLES],
                flight=flight,
            )
            for i, (prompt, flight) in enumerate(zip(self.prompts, self.flights, strict=True))
        ]
        return await asyncio.gather(*calls)

    def wait_for(self, num_tokens: int) -> None:
        """Until one request has reported `num_tokens`, and most of them some since the last `updated`."""
        until = time.monotonic() + SECONDS
        while True:
            reported = [flight.num_tokens for flight in self.flights]
            moved = sum(now > before for now, before in zip(reported, self._before))
            if reported and max(reported) >= num_tokens and moved > 0.7 * len(self.prompts):
                return
            assert time.monotonic() < until
            time.sleep(0.002)

    def updated(self) -> int:
        """The server has other weights now. Returns the most tokens that a request has reported."""
        self._before = [flight.num_tokens for flight in self.flights]
        return max(self._before)

    def results(self) -> list[Completion]:
        return self._future.result(timeout=SECONDS)


class Long:
    """A server of its own, whose responses are long enough for two updates, and three versions of its weights."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.path = run_config(folder, model, rollout={"max_new_tokens": NUM_TOKENS})
        self.serve = Serve(self.path, folder / "run", forked=True)
        self.serve.wait_for("ready")
        self.folders = [model, *(perturb(model, folder / f"version_{i}", seed=i) for i in (1, 2))]
        self.settings = load_config(self.path).config.rollout
        self.pool = ServerPool(self.settings, read_model_spec(model), self.serve.attempt)
        self.pool.wait_ready(1, deadline_seconds=60)
        trust(self.pool)
        (self.control,) = self.pool.controls()
        self.client = self.pool.loop.run(self.pool.acquire()).client
        self.sender = GroupSender("127.0.0.1", "gloo", 100_000, SECONDS)

    def close(self) -> None:
        self.sender.close()
        self.pool.close()
        self.serve.stop()

    def call(self, path: str, body: dict) -> None:
        self.pool.loop.run(self.client.call(path, body, SECONDS))

    def pause(self, mode: str) -> None:
        self.call("/pause_generation", {"mode": mode})

    def send(self, version: int, method: str, flush: bool = True) -> None:
        folder = self.folders[version]
        if method == "disk":
            body = {"model_path": str(folder), "weight_version": str(version), "flush_cache": flush}
            self.call("/update_weights_from_disk", body)
        else:
            from safetensors.torch import load_file

            fleet = Fleet([self.control], Deadline(SECONDS))
            self.sender.send(fleet, [self.control], iter(load_file(folder / "model.safetensors").items()), version)
            assert not fleet.failed
            fleet.close()
        if flush:
            self.control.flush_cache(deadline_seconds=SECONDS)

    def restart_at_version_0(self) -> None:
        self.control.resume(deadline_seconds=SECONDS)
        self.control.update_from_disk(str(self.folders[0]), 0, deadline_seconds=SECONDS)

    def worst_gap(self, requests: Open) -> float:
        """The largest difference from the log-prob under the weights that each token is said to be sampled by, nats."""
        worst = 0.0
        for prompt, whole in zip(requests.prompts, requests.results(), strict=True):
            expected = torch.stack(
                [reference_log_probs(folder, prompt, whole.token_ids, 1.0) for folder in self.folders]
            )
            versions = torch.tensor(whole.weight_versions)
            under = expected.gather(0, versions[None])[0]
            worst = max(worst, (torch.tensor(whole.log_probs).double() - under).abs().max().item())
        return worst


@pytest.fixture(scope="module")
def long_server(tmp_path_factory, dense_model) -> Iterator[Long]:
    server = Long(tmp_path_factory.mktemp("in_flight"), dense_model)
    yield server
    server.close()


@pytest.fixture
def server(long_server: Long) -> Iterator[Long]:
    yield long_server
    long_server.restart_at_version_0()


def through_two_updates(server: Long, update) -> Open:
    """Requests that are open while `update(version)` brings the server to versions 1 and 2."""
    requests, seen = Open(server.pool, server.client, PARAMS), 0
    for version in (1, 2):
        requests.wait_for(seen + 16)
        update(version)
        seen = requests.updated()
    spans = [sorted(set(whole.weight_versions)) for whole in requests.results()]
    assert sum(span == [0, 1, 2] for span in spans) >= len(spans) // 2, spans
    return requests


@pytest.mark.parametrize("method", ["disk", "distributed"])
def test_every_token_is_of_its_versions_weights(server: Long, method):
    def update(version: int) -> None:
        server.pause("retract")
        server.send(version, method)
        server.control.resume(deadline_seconds=SECONDS)

    requests = through_two_updates(server, update)
    assert (gap := server.worst_gap(requests)) < TOLERANCE, gap
    check_labels(requests)


def test_proving_and_verifying_while_requests_wait_changes_none_of_their_tokens(server: Long):
    """Between pause and resume, a publish destroys every weight, sends them again, and reads checksums."""

    def update(version: int) -> None:
        seconds = {"deadline_seconds": SECONDS}
        server.pause("retract")
        server.send(version, "disk")
        server.control.snapshot(**seconds)
        server.control.reset_tensors(**seconds)
        server.send(version, "disk")
        server.control.compare(**seconds)
        waiting = server.control.checksums(**seconds)
        server.control.resume(**seconds)
        sums[version] = waiting

    sums = {}
    requests = through_two_updates(server, update)
    assert (gap := server.worst_gap(requests)) < TOLERANCE, gap
    assert sums[2] == server.control.checksums(deadline_seconds=SECONDS) != sums[1]


def test_requests_that_go_on_over_old_cache_are_seen(server: Long):
    """Control: the same comparison sees the hybrid that `in_place` makes."""

    def update(version: int) -> None:
        server.pause("in_place")
        server.send(version, "disk", flush=False)
        server.control.resume(deadline_seconds=SECONDS)

    assert server.worst_gap(through_two_updates(server, update)) > 100 * TOLERANCE


@pytest.mark.parametrize("flush", [True, False])
def test_a_later_request_finds_no_old_prefix_only_after_a_flush(server: Long, flush):
    """Control: without the flush, a request under the new weights reads its prompt's old cache."""
    Open(server.pool, server.client, SHORT).results()  # fills the cache with the prompts
    server.pause("retract")
    server.send(1, "disk", flush)
    server.control.resume(deadline_seconds=SECONDS)
    requests = Open(server.pool, server.client, SHORT)
    assert {version for whole in requests.results() for version in whole.weight_versions} == {1}
    assert (server.worst_gap(requests) < TOLERANCE) == flush


def check_labels(requests: Open) -> None:
    """Reports say a version at once, and the answer's end says the true ones. A report may name a newer version than
    that of some of its tokens, never an older one: it is named when the report leaves the server, after an update may
    have overtaken it in SGLang's pipes. So the reports up to the first that names another version than the first one
    have tokens of that version alone, which is what an answer without an end keeps.
    """
    num_mixed = 0
    for flight, whole in zip(requests.flights, requests.results(), strict=True):
        begin, num_certain = 0, 0
        for end, label in flight.labels:
            true = whole.weight_versions[begin:end]
            assert max(true) <= label, (flight.labels, list(whole.weight_versions))
            num_mixed += min(true) < label
            if num_certain == begin and label == 0:
                num_certain = end
            begin = end
        assert num_certain > 0 and set(whole.weight_versions[:num_certain]) == {0}
    assert num_mixed > 0  # there is such a report, so the rule says something

"""Responses that change servers, on the real server: cut by an abort and continued from their tokens."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from router_ties import TIE, margins
from servers import STOP_SECONDS, trust
from test_rollout_server import check_response
from tiny_models import EOS_TOKEN_ID
from waiting import until

from gspo_mega.rollout.client.completion import PartialResponse, SamplingParams
from gspo_mega.rollout.client.server_client import InFlightRequest
from gspo_mega.rollout.pool import ServerPool
from gspo_mega.rollout.sampler import Sampler

PARAMS = SamplingParams(64, 1.0, 1.0, -1, (EOS_TOKEN_ID,))
PROMPT = tuple(range(40, 52))


async def cut_after(entry, response: PartialResponse, num_tokens: int) -> None:
    """One request for the rest of the response, ended early after `num_tokens`."""
    flight = InFlightRequest(60.0)
    flight._meter = type(
        "Meter",
        (),
        {
            "add_report": lambda self, count, seconds, first: (
                flight.num_tokens + count >= num_tokens and flight.end("moved")
            )
        },
    )()
    part = await entry.client.generate(
        [*PROMPT, *response.whole.token_ids],
        PARAMS.after(len(response)),
        request_id="cut",
        deadline_seconds=60.0,
        report_tokens=4,
        flight=flight,
    )
    assert response.add(part)


@pytest.mark.parametrize("which", ["dense_server", "moe_server"])
def test_a_response_in_parts_is_one_response(request, which):
    """Cut twice and continued: every token's log-prob and experts are those that the model computes."""
    server = request.getfixturevalue(which)

    async def in_parts(pool):
        response = PartialResponse(len(PROMPT), PARAMS, pool.returns_routed_experts)
        entry = await pool.acquire()
        lengths = []
        for num_tokens in (5, 9, 10_000):
            if response.whole.finish_reason == "abort":
                await cut_after(entry, response, num_tokens)
                lengths.append(len(response))
        await pool.release(entry)
        return response.whole, lengths

    with server.pool() as pool:
        pool.wait_ready(1, 60)

        async def several():
            return await asyncio.gather(*(in_parts(pool) for _ in range(8)))

        results, num_cut_twice = [], 0
        while (
            num_cut_twice < 3 and len(results) < 20 * 8
        ):  # on a busy machine a response may end before it can be cut again
            results += pool.loop.run(several())
            num_cut_twice = sum(len(lengths) == 3 for _, lengths in results)
    assert num_cut_twice >= 3, [lengths for _, lengths in results]
    for whole, lengths in results:
        assert whole.finish_reason == ("stop" if whole.token_ids[-1] == EOS_TOKEN_ID else "length")
        assert len(whole.token_ids) == len(whole.log_probs) == len(whole.weight_versions) == lengths[-1]
        assert set(whole.weight_versions) == {0}
        check_response(server.model, PROMPT, whole.token_ids, whole.log_probs)
        if which == "moe_server":
            assert whole.routed_experts.shape == (len(PROMPT) + len(whole.token_ids) - 1, 3, 2)
    if which == "moe_server":
        for whole, _ in results[:3]:
            again = read_again(server, whole)
            others = (np.sort(again) != np.sort(whole.routed_experts)).any(axis=(1, 2)).nonzero()[0]
            if len(others):
                assert margins(server.model, [*PROMPT, *whole.token_ids])[: others[0] + 1].min() < TIE, others


def read_again(server, whole):
    """The experts of all these tokens, as the server routes them when it reads them as a prompt."""
    with server.pool() as pool:
        pool.wait_ready(1, 60)

        async def once():
            entry = await pool.acquire()
            try:
                one = SamplingParams(1, 1.0, 1.0, -1, (EOS_TOKEN_ID,))
                return await entry.client.generate(
                    [*PROMPT, *whole.token_ids], one, request_id="again", deadline_seconds=60.0
                )
            finally:
                await pool.release(entry)

        return pool.loop.run(once()).routed_experts[: len(PROMPT) + len(whole.token_ids) - 1]


def test_a_response_goes_on_at_another_server(dense_server, neighbour):
    """Two real servers of one run: a request moves from one to the other, which completes it."""
    with ServerPool(dense_server.config.rollout, dense_server.spec, dense_server.attempt) as pool:
        pool.wait_ready(2, 60)
        trust(pool)
        sampler = Sampler(dense_server.config.rollout, pool)

        async def sample_all():
            tasks = [asyncio.ensure_future(sampler.sample("p", PROMPT, PARAMS, f"r{i}")) for i in range(16)]
            first = next(e for e in pool.ready_servers() if e.server_id == "server-0")
            while not any(flight.num_tokens for flight in first.load.flights) and not all(
                task.done() for task in tasks
            ):
                await asyncio.sleep(0)
            for flight in list(first.load.flights):
                if flight.num_tokens:  # an abort that comes before its request is not heard
                    flight.end("moved")
            return await asyncio.gather(*tasks)

        completions = []
        while (
            sampler.counts["num_moved_responses"] < 2 and len(completions) < 20 * 16
        ):  # those that end too soon are not moved
            completions += pool.loop.run(sample_all())
    assert sampler.counts["num_moved_responses"] >= 2, sampler.counts
    assert sampler.counts["num_request_failures"] == 0 and sampler.counts["num_discarded_tokens"] == 0, sampler.counts
    for completion in completions[-16:]:
        check_response(dense_server.model, PROMPT, completion.token_ids, completion.log_probs)


def test_a_server_that_joined_is_asked_to_leave(dense_server, neighbour):
    """SIGTERM with requests open: none fails, none is sampled again, each goes on elsewhere from its tokens; then the
    server ends, and what comes later is for the other one.
    """
    with ServerPool(dense_server.config.rollout, dense_server.spec, dense_server.attempt) as pool:
        pool.wait_ready(2, 60)
        trust(pool)
        sampler = Sampler(dense_server.config.rollout, pool)
        turns, counts = [], sampler.counts

        async def sample_on(worker):
            index, params = 0, replace(PARAMS, max_new_tokens=32 + 3 * worker)  # so that they do not all end at once
            while neighbour.registration().state != "stopped":
                turns.append(await sampler.sample("p", PROMPT, params, f"w{worker}-{index}"))
                index += 1

        async def sample_all():
            return await asyncio.gather(*(sample_on(worker) for worker in range(24)))

        running = pool.loop.submit(sample_all())
        until(lambda: any(turn.server_id == "server-1" for turn in turns), STOP_SECONDS)
        neighbour.process.send_signal(signal.SIGTERM)
        running.result(timeout=STOP_SECONDS)
        assert neighbour.process.wait(timeout=STOP_SECONDS) == 0
        assert counts["num_drained_responses"] >= 1, counts
        assert counts["num_request_failures"] == counts["num_discarded_tokens"] == 0, counts
        assert counts["num_generated_tokens"] == sum(len(turn.token_ids) for turn in turns)
        assert "server-1: drained: " in neighbour.output.read_text()
        assert [control.server_id for control in pool.controls()] == ["server-0"]
    for turn in turns[-24:]:
        check_response(dense_server.model, PROMPT, turn.token_ids, turn.log_probs)


def test_a_server_may_open_as_many_files_as_it_is_allowed(dense_server):
    """A connection for every open request: the soft limit of `serve` and of all of SGLang's processes is the hard
    one.
    """
    for pid in dense_server.serve.processes():
        limits = Path(f"/proc/{pid}/limits").read_text().splitlines()
        soft, hard = next(line for line in limits if line.startswith("Max open files")).split()[3:5]
        assert soft == hard or int(soft) >= 65_535, (pid, soft, hard)  # SGLang sets its own from there

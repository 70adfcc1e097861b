"""One turn over servers that fail as they are told: who is asked next, what counts as a try, which tokens are kept."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
from collector_support import collector_config
from fake_answers import EOS

from gspo_mega.agents.messages import StopWatch
from gspo_mega.base.errors import RolloutError
from gspo_mega.base.sampling_masks import SamplingMasks
from gspo_mega.rollout.client.completion import Completion, SamplingParams
from gspo_mega.rollout.client.server_client import ServerError
from gspo_mega.rollout.pooled_server import Load
from gspo_mega.rollout.sampler import Sampler

PROMPT = (3, 4, 5)


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr("gspo_mega.rollout.sampler._BACKOFF_SECONDS", 0.0)


class Servers:
    """Three servers in turn. Each request takes the next of `script`: a Completion, or an error."""

    num_registration_errors, returns_routed_experts, committed_version = 0, False, 0

    def __init__(self, *script, reported: Completion | None = None) -> None:
        """`reported`: what each request had reported when it ended."""
        self.reported = reported
        self.script, self.avoided, self.asked, self.released = list(script), [], [], []

    async def acquire(self, avoid=frozenset(), num_tokens=0, prefer=None):
        self.avoided.append((sorted(avoid), num_tokens))
        name = next(f"server-{k}" for k in range(3) if f"server-{k}" not in avoid)
        return SimpleNamespace(server_id=name, client=self, load=Load(), run=lambda call: call)

    async def release(self, server, error=None, num_tokens=0) -> None:
        self.released.append((server.server_id, error is not None))

    async def generate(self, input_ids, params, *, request_id, flight, **_) -> Completion:
        self.asked.append((tuple(input_ids), params.max_new_tokens))
        if self.reported is not None:
            flight.so_far, flight.num_tokens = (lambda: self.reported), len(self.reported.token_ids)
        step = self.script.pop(0)
        if isinstance(step, Exception):
            raise step
        return step


def part(*ids: int, reason: str = "abort", cached: int | None = None) -> Completion:
    return Completion(list(ids), [-1.0] * len(ids), [0] * len(ids), reason, num_cached_tokens=cached)


def failure(kind: str) -> ServerError:
    return ServerError("a-server", "generate", kind, "as asked")


def turn_of(servers: Servers, max_attempts: int = 2, prefer: str | None = None):
    sampler = Sampler(collector_config(max_attempts=max_attempts).rollout, servers)
    params = SamplingParams(6, 1.0, 1.0, -1, (EOS,))
    return asyncio.run(sampler.sample("the-prompt", PROMPT, params, "turn-0", prefer)), sampler.counts


def test_the_server_that_failed_last_is_avoided_and_no_other():
    servers = Servers(failure("connection"), failure("status"), failure("deadline"), part(10, EOS, reason="stop"))
    turn, counts = turn_of(servers, max_attempts=4)
    assert turn.token_ids == [10, EOS] and turn.server_id == "server-1"
    assert [names for names, _ in servers.avoided] == [[], ["server-0"], ["server-1"], ["server-0"]]
    assert servers.released == [("server-0", True), ("server-1", True), ("server-0", True), ("server-1", False)]
    wanted = {"num_request_failures": 3, "num_retries": 3, "num_generated_tokens": 2, "num_continued_requests": 0}
    assert {name: counts[name] for name in wanted} == wanted
    assert [counts[f"num_request_failures_{kind}"] for kind in ("connection", "status", "deadline")] == [1, 1, 1]


def test_a_part_of_a_response_is_no_failed_try_and_is_the_next_requests_prompt():
    """Five requests are cut short, of which each brought a token; two tries without one would be too many."""
    servers = Servers(*(part(10 + k) for k in range(5)), part(EOS, reason="stop"))
    turn, counts = turn_of(servers)
    assert turn.token_ids == [10, 11, 12, 13, 14, EOS] and turn.finish_reason == "stop"
    assert servers.asked == [((*PROMPT, *range(10, 10 + k)), 6 - k) for k in range(6)]
    assert [num_tokens for _, num_tokens in servers.avoided] == [3 + k for k in range(6)]
    wanted = {"num_aborted_requests": 5, "num_retries": 0, "num_continued_requests": 5, "num_generated_tokens": 6}
    assert {name: counts[name] for name in wanted} == wanted


def test_a_token_between_two_failures_begins_the_tries_anew():
    servers = Servers(failure("status"), part(10), failure("status"), part(11), part(EOS, reason="stop"))
    turn, counts = turn_of(servers)
    assert turn.token_ids == [10, 11, EOS] and counts["num_retries"] == 2


def test_tries_without_a_token_end_it_and_the_last_failure_is_said():
    servers = Servers(part(10), failure("status"), part())
    with pytest.raises(RolloutError, match=r"no answer in 2 attempts .*the last: .*cut short by the server"):
        turn_of(servers)
    servers = Servers(failure("connection"), failure("nonsense"))
    with pytest.raises(
        RolloutError, match=r"prompt the-prompt: no answer in 2 attempts .*a-server: generate: as asked"
    ):
        turn_of(servers)


def test_the_cache_of_the_server_that_sampled_the_first_token_counts():
    servers = Servers(part(cached=1), part(10, cached=2), part(11, cached=3), part(EOS, reason="stop", cached=3))
    assert turn_of(servers)[0].num_cached_tokens == 2
    assert turn_of(Servers(part(EOS, reason="stop")))[0].num_cached_tokens is None
    assert stopped_turn(part(65, 66, 67, 68, cached=1))[0].num_cached_tokens == 1


def test_a_turn_that_ends_elsewhere_than_its_context_was_read_is_counted():
    for prefer, moved in ((None, 0), ("server-0", 0), ("server-2", 1)):
        assert turn_of(Servers(part(EOS, reason="stop")), prefer=prefer)[1]["num_sessions_moved"] == moved


@pytest.mark.parametrize(
    ("kind", "kept"), [("connection", [10]), ("deadline", [10]), ("status", [10]), ("nonsense", [])]
)
def test_tokens_of_a_request_that_failed_are_kept_but_those_of_an_answer_that_makes_no_sense(kind, kept):
    servers = Servers(failure(kind), part(EOS, reason="stop"), reported=part(10))
    turn, counts = turn_of(servers)
    assert turn.token_ids == [*kept, EOS] and servers.asked[1][0] == (*PROMPT, *kept)
    assert counts["num_retries"] == (not kept) and counts[f"num_request_failures_{kind}"] == 1


# A turn that a text ends. Token 65 is "A", and so on: the text of a token is its character.


def stopped_turn(*script, stops=("BC",), says=None, **more):
    """The turn, the counts, and why each request was ended early. `says`: what a request reports before its end. `more`
    is what the servers are.
    """
    servers, ended = Servers(*script), []
    servers.__dict__.update(more)
    generate = servers.generate

    async def reporting(input_ids, params, *, flight, **rest):
        flight.end, flight.num_tokens = ended.append, len(servers.script[0].token_ids)
        for place, token_ids in says or ():
            flight._on_tokens(place, token_ids)
        return await generate(input_ids, params, flight=flight, **rest)

    servers.generate = reporting
    sampler = Sampler(collector_config(max_attempts=2).rollout, servers)
    watch = StopWatch(lambda ids: "".join(map(chr, ids)), stops)
    params = SamplingParams(6, 1.0, 1.0, 50 if more else -1, (EOS,)).at_most(6, watch)
    sampling = sampler.sample("the-prompt", PROMPT, params, "turn-0")
    return asyncio.run(sampling), sampler.counts, ended


def test_a_stop_string_ends_a_turn_at_its_token_and_what_came_after_is_dropped():
    masks = SamplingMasks.of([[65, 66], [66], [67, 70], [68]])
    routes = np.arange(6 * 2).reshape(6, 2, 1)  # of three tokens of context and four of the turn but the last
    whole = Completion([65, 66, 67, EOS], [-1.0, -2.0, -3.0, -4.0], [1, 1, 1, 1], "stop", routes, masks)
    turn, counts, _ = stopped_turn(whole, returns_routed_experts=True, committed_version=1)
    assert (turn.token_ids, turn.log_probs, turn.weight_versions) == ([65, 66, 67], [-1.0, -2.0, -3.0], [1, 1, 1])
    assert turn.finish_reason == "stop_string"
    assert turn.sampling_masks == masks.between(0, 3) and np.array_equal(turn.routed_experts, routes[:5])
    assert (counts["num_generated_tokens"], counts["num_discarded_tokens"]) == (3, 1)


def test_a_stop_string_may_begin_on_one_server_and_end_on_another():
    turn, *_ = stopped_turn(part(65, 66), part(67, 68, reason="length"))
    assert (turn.token_ids, turn.finish_reason) == ([65, 66, 67], "stop_string")


def test_a_request_is_ended_when_its_turn_has_its_stop_string():
    says = [(0, [65]), (1, [66]), (2, [67, 68])]
    turn, counts, ended = stopped_turn(part(65, 66, 67, 68), says=says)
    assert ended == ["ended"] and turn.token_ids == [65, 66, 67]
    assert (counts["num_retries"], counts["num_aborted_requests"]) == (0, 0)


def test_an_end_token_is_no_text():
    turn, *_ = stopped_turn(part(65, EOS, reason="stop"), stops=("A" + chr(EOS), chr(EOS)), says=[(0, [65, EOS])])
    assert (turn.token_ids, turn.finish_reason) == ([65, EOS], "stop")

"""Episodes of several turns with the real server: exact to the token and its log-prob, wherever they are sampled."""

from __future__ import annotations

import asyncio
import signal

import pytest
import torch
from router_ties import check_log_probs
from servers import trust
from test_rollout_server import reference_log_probs
from tiny_models import EOS_TOKEN_ID, byte_tokenizer

from gspo_mega.agents.session import Conversation, EpisodeSession
from gspo_mega.agents.turn import Limits
from gspo_mega.base import processes
from gspo_mega.base.episodes import Episode, check_episode
from gspo_mega.base.records import Prompt
from gspo_mega.data.chat import PromptEncoder
from gspo_mega.data.templates import SuffixRule
from gspo_mega.rollout import pooled_server
from gspo_mega.rollout.client.completion import SamplingParams
from gspo_mega.rollout.pool import ServerPool
from gspo_mega.rollout.sampler import Sampler

LIMITS = Limits(8, 480)
TURN = SamplingParams(12, 1.0, 1.0, -1, (EOS_TOKEN_ID,))
TOOL = {"role": "tool", "content": "4 <|im_end|>"}


def conversation():
    tokenizer = byte_tokenizer()
    decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=False)  # noqa: E731
    rule = SuffixRule(PromptEncoder(tokenizer, chat_template=True), [EOS_TOKEN_ID])
    return Conversation(decode, rule, template=tokenizer.chat_template)


def prompt(number=0):
    messages = ({"role": "user", "content": f"{number}+{number}?"},)
    text, ids = PromptEncoder(byte_tokenizer(), chat_template=True).encode_prompt(list(messages))
    return Prompt(f"p:{number}", "p", tuple(ids), text, str(2 * number), {}, messages)


def check_exact(model, episode):
    """Every sampled token has the log-prob that the model gives it behind what is recorded before it."""
    check_episode(episode)
    for row in episode.rows():
        expected = reference_log_probs(model, row.prompt.token_ids, row.response_token_ids, 1.0)
        mask = torch.tensor(row.response_mask, dtype=torch.bool)
        found = torch.tensor(row.rollout_log_probs).double()
        tolerance = torch.where(mask, 1e-5, torch.inf)
        check_log_probs(model, row.prompt.token_ids, row.response_token_ids, found, expected, tolerance)
        assert all(version == 0 for version, active in zip(row.weight_versions, row.response_mask) if active)


@pytest.mark.parametrize("which", ["dense_server", "moe_server"])
def test_turns_and_branches_have_the_models_log_probs(request, which):
    server = request.getfixturevalue(which)
    with server.pool() as pool:
        pool.wait_ready(1, 60)
        talk = conversation()
        sampler = Sampler(server.config.rollout, pool)

        async def one(number):
            session = EpisodeSession(talk, f"e{number}", prompt(number), sampler, TURN, LIMITS)
            messages = [*prompt(number).messages]
            for _ in range(3):
                messages += [await session.turn(messages), TOOL]
            await session.turn([*messages[:1], {"role": "assistant", "content": "edited"}, TOOL])
            return Episode(f"e{number}", 0, prompt(number), session.nodes)

        async def several():
            return await asyncio.gather(*(one(number) for number in range(4)))

        episodes = pool.loop.run(several())
        talk.close()
    for episode in episodes:
        assert episode.num_turns == 4 and episode.branch_causes == ["edited"]
        assert sum(sum(row.response_mask) for row in episode.rows()) == episode.num_sampled_tokens
        check_exact(server.model, episode)
        if which == "moe_server":
            assert all(row.routed_experts.shape == (row.num_tokens - 1, 3, 2) for row in episode.rows())
    assert sampler.counts["num_sessions_moved"] == 0


def test_a_session_stays_with_its_server_until_that_one_is_killed(dense_server, neighbour, monkeypatch):
    # A server that is much slower for a while gives sessions away (test_least_loaded.py); here both are as fast as the machine.
    monkeypatch.setattr(pooled_server, "PREFER_RATIO", 1e9)
    with ServerPool(dense_server.config.rollout, dense_server.spec, dense_server.attempt) as pool:
        pool.wait_ready(2, 60)
        trust(pool)
        sampler = Sampler(dense_server.config.rollout, pool)
        talk = conversation()
        sessions = [EpisodeSession(talk, f"e{number}", prompt(number), sampler, TURN, LIMITS) for number in range(6)]
        histories = [[*prompt(number).messages] for number in range(6)]

        async def one(session, messages):
            messages += [await session.turn(messages), TOOL]

        async def go_on():
            await asyncio.gather(*map(one, sessions, histories))

        async def go_on_in_turn():
            for session, messages in zip(sessions, histories, strict=True):
                await one(session, messages)

        pool.loop.run(go_on())
        pool.loop.run(go_on_in_turn())
        places = [[node.server_id for node in session.nodes if node.is_sampled] for session in sessions]
        assert {place for turns in places for place in turns} == {"server-0", "server-1"}
        assert all(first == second for first, second in places), places
        assert sampler.counts["num_sessions_moved"] == 0
        for pid in neighbour.processes():
            processes.send_signal(pid, signal.SIGKILL)
        pool.loop.run(go_on())
        talk.close()
    lost = sum(turns[-1] == "server-1" for turns in places)
    assert sampler.counts["num_sessions_moved"] == lost and lost >= 1
    for number, session in enumerate(sessions):
        assert [node.server_id for node in session.nodes if node.is_sampled][2] == "server-0"
        check_exact(dense_server.model, Episode(f"e{number}", 0, prompt(number), session.nodes))

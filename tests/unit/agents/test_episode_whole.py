"""Driver, session, worker pool and tools together: the records of episodes whose neighbour breaks their worker."""

from __future__ import annotations

import asyncio
import collections
import hashlib
from dataclasses import replace

import chat_templates as families
import pytest
from pool_support import settings
from session_support import Params, side_of

from gspo_mega.agents.driver import EpisodeDriver
from gspo_mega.agents.pool import EpisodePool
from gspo_mega.agents.session import counts_of
from gspo_mega.agents.turn import Limits, Turn
from gspo_mega.base.episodes import check_episode
from gspo_mega.config.schema import EpisodeFunction

pytestmark = pytest.mark.usefixtures("folder", "nothing_is_left")
ROUNDS = {
    "0": "model.set_reward(-1, 0.5)\nawait tools.call('draw', {})",
    "1": "await tools.call('count', {})\nawait asyncio.sleep(0.3)",
    "2": "model.set_reward(1, 0.25)",
}


class Policy:
    """A TurnSampler that says a digest of what it is shown. `asked`: how often each request was sampled."""

    def __init__(self, tokenizer):
        self.tokenizer, self.asked = tokenizer, collections.Counter()

    async def sample(self, name, token_ids, params, request_id, prefer=None, on_tokens=None):
        self.asked[request_id] += 1
        await asyncio.sleep(0.2)
        text = hashlib.sha256(str(list(token_ids)).encode()).hexdigest()[:6]
        ids = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]
        return Turn(ids, [-0.5] * len(ids), [len(token_ids) % 3] * len(ids), "stop", None, "server-0")


def play(folder, *does):
    """The records of one episode for each entry of `does`, what was sampled, and what the pool counted."""
    side = side_of(folder, families.QUICKSTART, tools=())
    policy = Policy(side.tokenizer)
    names = tuple(f"user_episodes:{name}" for name in ("draw", "count"))
    pool = EpisodePool(settings(), EpisodeFunction(function="user_episodes:play", options={"rounds": 3}), names)
    driver = EpisodeDriver(side.conversation, Limits(8, 4096), pool, seed=3)

    async def run():
        await driver.start()
        try:
            prompts = [
                replace(side.prompt, prompt_id=f"p:{n}", metadata={"do": rounds}) for n, rounds in enumerate(does)
            ]
            return await asyncio.gather(
                *(driver.run(one, n, f"e{n}", policy, Params()) for n, one in enumerate(prompts))
            )
        finally:
            await driver.close()

    episodes = asyncio.run(run())
    return episodes, policy, sum((counts_of(episode) for episode in episodes), collections.Counter())


def seen(episode):
    calls = [(call.turn, call.name, call.error) for call in episode.tool_calls]
    return episode.nodes, calls, episode.reward_parts, episode.failure


def test_neighbours_have_the_very_same_record(folder):
    alone, _, counts = play(folder, ROUNDS, ROUNDS, ROUNDS)
    assert not counts["num_replayed_turns"] and [seen(one)[3] for one in alone] == [None] * 3
    for fault, says in {"stuck()": "blocked: it blocked the event loop", "os._exit(3)": "crash: its worker"}.items():
        episodes, policy, counts = play(folder, ROUNDS, ROUNDS, ROUNDS, {"1": fault})
        for episode, reference in zip(episodes, alone, strict=False):
            check_episode(episode)
            assert seen(episode) == seen(reference)
            assert [turn.reward for turn in episode.turns] == [0.5, 0.25, None]
        assert episodes[3].failure.startswith(says) and not episodes[3].is_scored
        assert set(policy.asked.values()) == {1}
        assert counts["num_replayed_turns"] >= 3 and counts["num_episodes_restarted"] >= 3

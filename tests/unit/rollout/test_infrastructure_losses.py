"""Advantages of groups whose members the infrastructure lost: exactly those of groups that lost nobody.

All cases are enumerated. A policy over three responses has a gradient, the sum of A d log pi / G of a group; its mean
over every group that can be sampled is the oracle. Groups with losses are sampled by the program: each sample is lost
or not before its first turn, and every case has its weight. The control draws again what was lost behind a turn, for
what that turn was.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
from collector_support import collector_config
from fake_answers import EOS

from gspo_mega.agents.driver import EpisodeDriver
from gspo_mega.agents.protocol import Outcome
from gspo_mega.agents.session import Conversation
from gspo_mega.agents.turn import Failure, Finished, Limits
from gspo_mega.base.episodes import RolloutBatch
from gspo_mega.base.records import Prompt
from gspo_mega.config.derived import least_of_group
from gspo_mega.rollout.client.completion import Completion, SamplingParams
from gspo_mega.rollout.groups import EpisodeMaker, SampledGroups
from gspo_mega.rollout.pooled_server import Load
from gspo_mega.train.batches import fill_advantages, scored_batch

GROUP = 3
CHANCES = np.array([0.5, 0.3, 0.2])
REWARDS = np.array([0.0, 0.25, 1.0])
LOST = 0.3
LAST = len(CHANCES) - 1


class Case(NamedTuple):
    """What befalls one sample. `lost`: the response behind which it was lost, -1 before any, None where it was not.
    `response`: of the sample that remains.
    """

    chance: float
    lost: int | None
    response: int


def before_a_turn() -> list[Case]:
    kept = [Case(p * (1 - LOST), None, n) for n, p in enumerate(CHANCES)]
    return kept + [Case(LOST * p, -1, n) for n, p in enumerate(CHANCES)]


def behind_the_longest() -> list[Case]:
    """Half of the longest responses are lost for what they are."""
    kept = [Case(p * (0.5 if n == LAST else 1.0), None, n) for n, p in enumerate(CHANCES)]
    return kept + [Case(CHANCES[LAST] * 0.5 * p, LAST, n) for n, p in enumerate(CHANCES)]


class Server:
    """Answers request `name` with the response of that number: so many tokens and an end."""

    num_registration_errors, returns_routed_experts, committed_version = 0, False, 0

    def __init__(self) -> None:
        self.responses: dict[str, int] = {}
        self.server = SimpleNamespace(server_id="server-0", client=self, load=Load(), run=lambda call: call)

    async def acquire(self, avoid=(), num_tokens=0, prefer=None):
        return self.server

    async def release(self, server, error=None, num_tokens=0) -> None:
        pass

    async def generate(self, input_ids, params, *, request_id, **_) -> Completion:
        ids = [*[7] * (1 + self.responses[request_id]), EOS]
        return Completion(ids, [-1.0] * len(ids), [0] * len(ids), "stop")


class Lossy:
    """An EpisodeRunner of one turn. `cases`: of the samples of the group that is sampled."""

    def __init__(self, server: Server) -> None:
        self.server, self.cases, self.tool_schemas, self.counts = server, (), [], collections.Counter()

    async def start(self): ...

    async def close(self): ...

    async def run(self, task, session, name):
        case, is_first = self.cases[int(session.episode_id[-1])], "-r" not in session.episode_id
        is_lost = is_first and case.lost is not None
        if not is_lost or case.lost >= 0:
            self.server.responses[session.episode_id] = case.lost if is_lost else case.response
            await session.turn(task.messages)
        return Finished(None, Failure("unreachable", "as asked")) if is_lost else Finished(Outcome())


def gradient(responses, advantages) -> np.ndarray:
    """Of the logits of the three responses."""
    each = [a * (np.eye(len(CHANCES))[n] - CHANCES) for n, a in zip(responses, advantages, strict=True)]
    return np.sum(each, axis=0) / GROUP


def expected() -> np.ndarray:
    """The mean over all groups of independent samples."""
    total = np.zeros(len(CHANCES))
    for group in itertools.product(range(len(CHANCES)), repeat=GROUP):
        rewards = REWARDS[list(group)]
        spread = np.sqrt(np.mean((rewards - rewards.mean()) ** 2))
        advantages = (rewards - rewards.mean()) / spread if spread else np.zeros(GROUP)
        total += np.prod(CHANCES[list(group)]) * gradient(group, advantages)
    return total


def trained(cases: list[Case]) -> tuple[np.ndarray, collections.Counter[str]]:
    """The mean of what the program trains on, and its counts."""
    config = collector_config(group_size=GROUP)
    total, counts, weight = np.zeros(len(CHANCES)), collections.Counter(), 0.0

    async def score(episode) -> None:
        episode.reward = float(REWARDS[episode.num_sampled_tokens - 2])

    async def sample_all() -> None:
        nonlocal total, weight
        server = Server()
        runner = Lossy(server)
        driver = EpisodeDriver(Conversation(str), Limits(1, 40), runner)
        sampled = SampledGroups(
            config, server, EpisodeMaker(driver, score), GROUP, SamplingParams(6, 1.0, 1.0, -1, (EOS,))
        )
        for number, group_cases in enumerate(itertools.product(cases, repeat=GROUP)):
            runner.cases = group_cases
            group = await sampled.sample(number, Prompt("p:0", "p", (3,), ""), "step000000")
            batch = scored_batch(RolloutBatch(0, [group], {}, {}), least_of_group(config), config.objective.scope)
            fill_advantages(batch, config, 0)
            rows = batch.trajectories
            chance = float(np.prod([case.chance for case in group_cases]))
            weight += chance
            total = total + chance * gradient(
                [row.num_response_tokens - 2 for row in rows], [row.advantage for row in rows]
            )
        counts.update(sampled.take_counts())

    asyncio.run(sample_all())
    assert abs(weight - 1.0) < 1e-12
    return total, counts


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr("gspo_mega.rollout.groups._BACKOFF_SECONDS", 0.0)


def test_a_refilled_group_has_the_expected_gradient_of_one_that_lost_nobody():
    found, counts = trained(before_a_turn())
    cases = len(before_a_turn()) ** GROUP
    assert counts["num_episodes_redrawn"] == counts["num_episodes_redrawn_unreachable"] == cases * GROUP / 2
    assert counts["num_trajectories"] == cases * GROUP and counts["num_episode_failures"] == 0
    assert np.abs(found - expected()).max() < 1e-12
    assert np.abs(expected()).max() > 0.1


def test_what_was_lost_behind_a_turn_is_not_drawn_again(monkeypatch):
    monkeypatch.setattr("test_infrastructure_losses.scored_batch", lambda batch, least, scope: batch.scored())
    _, counts = trained(behind_the_longest())
    assert counts["num_episodes_redrawn"] == 0 and counts["num_episode_failures_exception"] > 0


def test_drawing_again_what_failed_for_its_content_is_seen_as_a_bias(monkeypatch):
    monkeypatch.setattr(Failure, "after_turns", lambda self, num_turns: self)
    found, counts = trained(behind_the_longest())
    assert counts["num_episodes_redrawn"] > 0 and counts["num_episode_failures"] == 0
    assert np.abs(found - expected()).max() > 0.01, (found, expected())

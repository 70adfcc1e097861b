"""How old what is trained may be: groups that are taken over after a restart, and tokens that a server reports.

A pool without HTTP answers at once. The committed version is 5 where a run goes on, and a batch is one group of two.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from collector_support import collector_config
from fake_answers import EOS
from test_refilled_groups import Pool, Prompts

from gspo_mega.agents.driver import EpisodeDriver
from gspo_mega.agents.session import Conversation
from gspo_mega.agents.turn import Limits
from gspo_mega.base.episodes import Group, one_turn_episode
from gspo_mega.base.errors import RolloutError
from gspo_mega.base.records import Prompt
from gspo_mega.config.schema import Train
from gspo_mega.rollout.admission import Admission
from gspo_mega.rollout.arrival_order import Formed, Freshness
from gspo_mega.rollout.client.completion import Completion, SamplingParams
from gspo_mega.rollout.collector import Collector
from gspo_mega.rollout.pooled_server import Load
from gspo_mega.rollout.sampler import Sampler

STEP = 5


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr("gspo_mega.rollout.sampler._BACKOFF_SECONDS", 0.0)


async def score(episode) -> None:
    episode.reward = 1.0


def known_group(number: int, versions: list[int], sample: int = 1) -> Group:
    """A group of which one sample was made before the restart, its tokens of these versions."""
    prompt, ids = Prompt(f"p:{number}", "p", (3, 4), ""), [7] * len(versions)
    name = f"step000003-g{number:05d}-s{sample:03d}"
    one = one_turn_episode(name, number, prompt, ids, [-1.0] * len(ids), versions, "stop")
    one.reward = 0.5
    return Group(number, prompt, [one])


def go_on(known: list[Group], bound: int = 2, order: str = "admission"):
    """Which of the groups `known` was taken over, the batches of three steps, and which groups were admitted anew."""
    config = collector_config(group_size=2, prompts_per_step=1, max_staleness=bound, order=order, max_attempts=60)
    config = config.model_copy(update={"train": Train(num_steps=40)})
    pool, admitted = Pool(), []
    pool.freshness = Freshness(bound)
    collector = Collector(config, pool, Prompts(), EpisodeDriver(Conversation(str), Limits(1, 40)), score, [EOS])
    own = {group.group_id: group.episodes[0].episode_id for group in known}
    batches = []
    try:
        for step in range(STEP, STEP + 3):
            pool.committed_version = step
            by_number = {group.group_id: group for group in known} if step == STEP else {}
            collector.start(step, by_number, None, lambda number, prompt, version: admitted.append(number))
            batches.append(collector.take(step))
    finally:
        collector.close()
        pool.loop.close()
    there = {one.episode_id for batch in batches for one in batch.episodes}
    return {number: name in there for number, name in own.items()}, batches, admitted


@pytest.mark.parametrize(
    ("versions", "is_taken"),
    [
        ([5, 5], True),
        ([3, 3], True),
        ([3, 5], True),
        ([2, 5], False),  # its oldest token counts, though its newest is fresh
        ([5, 2, 5], False),
        ([6], False),  # a version that this run has not committed: the checkpoint is older than the record
        ([5, 6], False),
    ],
)
def test_a_group_is_taken_over_by_its_oldest_token(versions, is_taken):
    taken, batches, admitted = go_on([known_group(0, versions)])
    assert taken == {0: is_taken} and (0 in admitted) != is_taken
    assert len(batches[0].episodes) == 2


@pytest.mark.parametrize(
    ("number", "version", "is_taken"),
    [(0, 3, True), (1, 4, True), (1, 3, False), (2, 5, True), (2, 4, False)],
)
def test_what_a_later_step_may_train_has_to_be_as_much_younger(number, version, is_taken):
    """Group n is trained n steps later, and is that much older then."""
    taken, *_ = go_on([known_group(number, [version])])
    assert taken == {number: is_taken}


def test_without_a_bound_only_the_present_version_is_taken_over():
    assert go_on([known_group(0, [5])], bound=0)[0] == {0: True}
    assert go_on([known_group(0, [4])], bound=0)[0] == {0: False}


def test_the_samples_of_a_completed_group_are_in_their_order():
    for sample in (0, 1):
        _, batches, _ = go_on([known_group(0, [5], sample)])
        names = [one.episode_id for one in batches[0].groups[0].episodes]
        assert [name.rpartition("-")[2] for name in names] == ["s000", "s001"]
        assert [row.trajectory_id for row in batches[0].trajectories] == names


def test_a_group_with_old_samples_is_waited_for_where_the_next_batch_would_be_too_late():
    """Asked for step 2 with a bound of 2: a fresh group may wait until step 4, one that lags by 1 until 3, by 2 not."""

    def started(staleness: int) -> Admission:
        admission = Admission(1, 1, Freshness(2), "completion")
        admission.ask(2)
        assert admission.admit(staleness) == 0
        while admission.may_admit():
            admission.admit()
        assert admission.outstanding == 3
        return admission

    for staleness, passes in ((0, 2), (1, 1), (2, 0)):
        admission, formed = started(staleness), []
        admission.complete(1, True), admission.complete(2, True)
        while (one := admission.formed()) is not None:
            formed.append(one)
            admission.consume(one)
        assert formed == [Formed((number,), ()) for number in range(1, 1 + passes)]
        if passes < 2:
            assert admission.waits_for() == [0]


class Answering:
    """A pool of one server that answers every request with tokens of these versions, and commits meanwhile."""

    num_registration_errors, returns_routed_experts = 0, False

    def __init__(self, versions: list[int], committed: int, later: int | None = None) -> None:
        self.versions, self.committed_version, self.later = versions, committed, later
        self.num_requests = 0
        self.server = SimpleNamespace(server_id="server-0", client=self, load=Load(), run=lambda call: call)

    async def acquire(self, avoid=(), num_tokens=0, prefer=None):
        return self.server

    async def release(self, server, error=None, num_tokens=0) -> None: ...

    async def generate(self, input_ids, params, *, weight_version, **_) -> Completion:
        self.num_requests += 1
        if self.later is not None:
            self.committed_version = self.later
        ids = [*range(10, 9 + len(self.versions)), EOS]
        return Completion(ids, [-1.0] * len(ids), self.versions, "stop")


def ask(pool: Answering):
    settings = collector_config(max_attempts=2, max_staleness=3).rollout
    sampler = Sampler(settings, pool)
    turn = sampler.sample("the-prompt", (3, 4, 5), SamplingParams(6, 1.0, 1.0, -1, (EOS,)), "turn-0")
    return asyncio.run(turn)


@pytest.mark.parametrize(
    ("versions", "committed", "later"), [([7, 7], 7, None), ([7, 7], 7, 8), ([7, 8], 7, 8), ([8, 8], 7, 8)]
)
def test_tokens_of_the_versions_that_were_committed_meanwhile_are_kept(versions, committed, later):
    assert ask(Answering(versions, committed, later)).weight_versions == versions


@pytest.mark.parametrize(
    ("versions", "committed", "later", "said"),
    [
        ([6, 6], 7, None, r"tokens of weight versions \[6\]; 7 is committed"),
        ([6, 7], 7, None, r"tokens of weight versions \[6, 7\]; 7 is committed"),
        ([8, 8], 7, None, r"tokens of weight versions \[8\]; 7 is committed"),
        ([7, 9], 7, 8, r"tokens of weight versions \[7, 9\]; 7 to 8 is committed"),
    ],
)
def test_tokens_of_older_or_unknown_versions_are_refused_whatever_the_bound(versions, committed, later, said):
    pool = Answering(versions, committed, later)
    if later is not None:
        pool.later = None
        answer = pool.generate

        async def generate(*args, **more):
            pool.committed_version = later
            return await answer(*args, **more)

        pool.generate = generate
    with pytest.raises(RolloutError, match=said):
        ask_once(pool)


def ask_once(pool: Answering):
    """One attempt alone: a second request would begin under the version that was committed meanwhile."""
    sampler = Sampler(collector_config(max_attempts=1, max_staleness=3).rollout, pool)
    return asyncio.run(sampler.sample("the-prompt", (3, 4, 5), SamplingParams(6, 1.0, 1.0, -1, (EOS,)), "turn-0"))

"""Batches of episodes of several turns, some of which fail: what is left out, counted, and when the run stops."""

from __future__ import annotations

import collections

import pytest
from collector_support import Stream, collector_config, random_score

from gspo_mega.agents.protocol import Outcome
from gspo_mega.agents.turn import Failure, Finished
from gspo_mega.base.errors import EpisodeError
from gspo_mega.data.journal.journal import Journal
from gspo_mega.rollout.client.completion import SamplingParams
from gspo_mega.rollout.sampler import Sampler


class Agents:
    """Two turns behind the same prompt each, or a failure where `fails(episode_id)` names one."""

    def __init__(self, fails=lambda name: None):
        self.fails, self.tool_schemas, self.counts = fails, [], collections.Counter()

    async def start(self): ...

    async def close(self): ...

    async def run(self, task, session, name):
        session.counts["num_broken_calls"] += 2
        await session.turn(task.messages)
        if (text := self.fails(session.episode_id)) is not None:
            self.counts["num_workers_recycled"] += 1
            return Finished(None, Failure("deadline", text))
        await session.turn(task.messages)
        return Finished(Outcome())


def test_episodes_of_several_turns_fill_a_batch(fakes, collect):
    server = fakes("server-0")
    collector, _ = collect(runner=Agents())
    batch = collector.take(0)
    assert len(batch.episodes) == 24 and all(episode.num_turns == 2 for episode in batch.episodes)
    assert batch.counts["num_turns"] == 48 and batch.counts["num_branches"] == 24
    assert batch.counts["num_branches_resampled"] == 24, "two turns behind one context"
    assert len(batch.trajectories) == 48
    assert len({body["rid"].rpartition(".")[0] for path, body in server.calls if path == "/generate"}) == 48


def test_a_failed_episode_leaves_its_group_and_is_recorded(fakes, collect):
    fakes("server-0")
    kept, scored = [], []

    async def score(episode):
        scored.append(episode)
        await random_score(episode)

    fails = lambda name: "it waited 60 s in tool search" if name == "step000000-g00002-s001" else None  # noqa: E731
    collector, _ = collect(runner=Agents(fails), score=score)
    collector.start(0, keep=kept.append)
    batch = collector.take(0)
    assert len(kept) == 24 and len(scored) == 23
    (failed,) = [episode for episode in kept if episode.failure is not None]
    assert failed.failure == "deadline: it waited 60 s in tool search" and failed.num_turns == 1
    assert [len(group.episodes) for group in batch.scored().groups] == [4, 4, 3, 4, 4, 4]
    assert batch.counts["num_episode_failures"] == batch.counts["num_episode_failures_deadline"] == 1
    assert batch.counts["num_reward_failures"] == 0 and batch.counts["num_workers_recycled"] == 1
    assert collector.take(1).counts["num_workers_recycled"] == 0, "each batch counts its own"


class Reached(Agents):
    """What the first turn needs is there only where `fails` says nothing. Attributes: seeds, of all that began."""

    def __init__(self, fails=lambda name: None):
        super().__init__(fails)
        self.seeds = []

    async def run(self, task, session, name):
        self.seeds.append(task.seed)
        if (text := self.fails(session.episode_id)) is not None:
            return Finished(None, Failure("unreachable", text))
        await session.turn(task.messages)
        return Finished(Outcome())


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr("gspo_mega.rollout.groups._BACKOFF_SECONDS", 0.001)


def test_a_sample_that_the_infrastructure_lost_is_drawn_again(fakes, collect, at_once):
    fakes("server-0")
    kept = []
    gone = ("step000000-g00002-s001", "step000000-g00002-r1-s001", "step000000-g00004-s003")
    agents = Reached(lambda name: "no machine" if name in gone else None)
    collector, _ = collect(runner=agents, max_attempts=3)
    collector.start(0, keep=kept.append)
    batch = collector.take(0)
    assert [len(group.episodes) for group in batch.scored().groups] == [4] * 6
    names = {one.episode_id for one in batch.episodes}
    assert {"step000000-g00002-r2-s001", "step000000-g00004-r1-s003"} < names and not names & set(gone)
    assert names == {one.episode_id for one in kept}, "nothing was sampled of the others, so nothing is recorded"
    assert len(agents.seeds) == len(set(agents.seeds)) == 27
    assert batch.counts["num_episodes_redrawn"] == batch.counts["num_episodes_redrawn_unreachable"] == 3
    assert batch.counts["num_trajectories"] == 24 and batch.counts["num_episode_failures"] == 0
    assert collector.take(1).counts["num_episodes_redrawn"] == 0


def test_a_group_that_was_refilled_is_taken_over_as_it_was(fakes, collect, at_once, tmp_path):
    """The run that continues samples what is missing, and nothing in place of what had been lost."""
    fakes("server-0")
    gone = "step000000-g00002-s001"
    collector, _ = collect(runner=Reached(lambda name: "no machine" if name == gone else None))
    group = collector.take(0).groups[2]
    missing = group.episodes.pop(3)
    Journal(tmp_path).begin(0, 0, 4, {2: group}).close()
    other, _ = collect(runner=Reached())
    other.start(0, known={2: Journal(tmp_path).read(0).groups[2]})
    again = other.take(0).groups[2]
    assert [one.episode_id for one in again.episodes] == [
        *(one.episode_id for one in group.episodes),
        missing.episode_id,
    ]
    assert again.episodes[1].episode_id == "step000000-g00002-r1-s001"


def test_a_sample_that_is_lost_again_and_again_fails_in_its_group(fakes, collect, at_once):
    fakes("server-0")
    collector, _ = collect(
        runner=Reached(lambda name: "no machine" if name.endswith("s001") and "g00002" in name else None),
        max_attempts=3,
    )
    batch = collector.take(0)
    assert [len(group.episodes) for group in batch.scored().groups] == [4, 4, 3, 4, 4, 4]
    (failed,) = [episode for episode in batch.episodes if episode.failure is not None]
    assert failed.failure == "unreachable: no machine (so were 3 in a row; rollout.max_attempts)"
    assert batch.counts["num_episodes_redrawn"] == 2 and batch.counts["num_episode_failures_unreachable"] == 1


def test_infrastructure_that_is_gone_stops_the_run_with_its_name(fakes, collect, at_once):
    fakes("server-0")
    collector, _ = collect(runner=Reached(lambda name: "http://sandbox:8000: no route"), max_attempts=2)
    with pytest.raises(
        EpisodeError,
        match=(
            r"of \d+ episodes failed, more than episodes.max_failed_fraction(?s:.*)unreachable:"
            r" http://sandbox:8000: no route \(so were 2 in a row; rollout.max_attempts\)"
        ),
    ):
        collector.take(0)


def test_an_evaluation_counts_in_no_batch_and_what_is_taken_over_in_its_own(fakes, collect, tmp_path):
    """What the tree of a record does not say is in the record, too."""
    fakes("server-0")
    collector, _ = collect(runner=Agents())
    first = collector.take(0)
    collector.sample([group.prompt for group in first.groups], 2, 0.0)
    assert first.counts["num_broken_calls"] == collector.take(1).counts["num_broken_calls"] == 48
    Journal(tmp_path).begin(0, 0, 4, {2: first.groups[2]}).close()
    other, _ = collect(runner=Agents())
    other.start(0, known={2: Journal(tmp_path).read(0).groups[2]})
    assert other.take(0).counts["num_broken_calls"] == 48


def test_too_many_failed_episodes_stop_the_run_with_the_first_of_them(fakes, collect):
    fakes("server-0")
    fails = lambda name: f"no result of {name}" if name.endswith("s000") else None  # noqa: E731
    collector, _ = collect(runner=Agents(fails), stream=Stream())
    with pytest.raises(
        EpisodeError,
        match=(
            r"3 of \d+ episodes failed, more than episodes.max_failed_fraction 0.1 allows.*\n"
            r"  step000000-g0000\d-s000 \(p:\d\): deadline: no result of step"
        ),
    ):
        collector.take(0)


def test_a_turn_that_leaves_the_server_of_its_context_is_counted(fakes, pools):
    """It stays where it can; a server that breaks every connection is left, and that is a move."""
    first, _ = fakes("server-0"), fakes("server-1")
    pool = pools()
    pool.wait_ready(2, 60)
    sampler = Sampler(collector_config().rollout, pool)
    params = SamplingParams(6, 1.0, 1.0, -1, (2,))
    turn = pool.loop.run(sampler.sample("p", (3, 4, 5), params, "e", "server-0"))
    assert (turn.server_id, sampler.counts["num_sessions_moved"]) == ("server-0", 0)
    first.fault = lambda call, ids: "reset"
    turn = pool.loop.run(sampler.sample("p", (3, 4, 5, 6), params, "e-t001", "server-0"))
    assert (turn.server_id, sampler.counts["num_sessions_moved"]) == ("server-1", 1)

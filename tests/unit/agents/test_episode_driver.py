"""What becomes of an episode: its rewards, its failure, its record. The agent is a function in this process."""

from __future__ import annotations

import collections
from functools import partial

import chat_templates as families
import pytest
from session_support import USER, Params, in_loop, side_of

from gspo_mega.agents.driver import EpisodeDriver, OneTurn
from gspo_mega.agents.protocol import Outcome, TurnRefused, outcome_of
from gspo_mega.agents.session import counts_of
from gspo_mega.agents.turn import Failure, Finished, Limits, lost_by_infrastructure
from gspo_mega.base.episodes import ToolRecord, check_episode
from gspo_mega.base.errors import DataError, RolloutError
from gspo_mega.config.schema import Reward
from gspo_mega.rewards.pool import ScoringPool

MORE = {"role": "user", "content": "go on"}


class InThisProcess:
    """An EpisodeRunner that calls a function; what it returns may be a Finished."""

    def __init__(self, function):
        self.function, self.tool_schemas, self.counts = function, [], collections.Counter()

    async def start(self): ...

    async def close(self): ...

    async def run(self, task, session, name):
        try:
            returned = await self.function(task, session)
        except TurnRefused as refusal:
            return Finished(Outcome(), limit=refusal.kind)
        return returned if isinstance(returned, Finished) else Finished(outcome_of(returned))


async def two_turns(task, session):
    first = await session.turn(task.messages)
    await session.turn([*task.messages, first, MORE])


async def ran(folder, function, *said, limits=None, functions=()):
    """The record of one episode, scored; and the counts that it adds."""
    side = side_of(folder, families.QUICKSTART, *(said or ("a", "b", "c")), tools=())
    driver = EpisodeDriver(side.conversation, limits or Limits(8, 4096), InThisProcess(function), seed=3)
    await driver.start()
    episode = await driver.run(side.prompt, 5, "step-g-s", side.sampler, Params())
    check_episode(episode)
    if episode.failure is None:
        async with ScoringPool(Reward(functions=functions, num_workers=1)) as scoring:
            await scoring.score(episode)
    await driver.close()
    return episode, counts_of(episode)


@in_loop
async def test_a_number_is_the_reward(tmp_path):
    async def agent(task, session):
        await two_turns(task, session)
        return 0.75

    episode, counts = await ran(tmp_path, agent)
    assert (episode.reward, episode.reward_parts, episode.correct) == (0.75, {"episode": 0.75}, None)
    assert (episode.group_id, episode.episode_id, episode.failure) == (5, "step-g-s", None)
    assert counts["num_turns"] == 2 and counts["num_branches"] == 0 and episode.is_scored


@in_loop
async def test_an_outcome_has_turn_rewards_parts_and_a_verdict(tmp_path):
    async def agent(task, session):
        await two_turns(task, session)
        session.set_reward(0, 5.0)
        return Outcome(1.0, [None, 0.25], correct=True, parts={"steps": 2.0}, info={"note": "x"})

    episode, _ = await ran(tmp_path, agent)
    assert episode.reward == 1.0 + 5.0 + 0.25
    assert [turn.reward for turn in episode.turns] == [5.0, 0.25]
    assert episode.reward_parts == {"episode": 1.0, "episode/steps": 2.0}
    assert episode.correct is True and episode.info == {"note": "x"}


@in_loop
async def test_reward_functions_are_added_and_give_no_other_verdict(tmp_path):
    async def agent(task, session):
        await two_turns(task, session)
        return Outcome(2.0, correct=False)

    functions = ({"function": "exact_match", "weight": 0.5},)
    episode, _ = await ran(tmp_path, agent, "a", "4", functions=functions)
    assert episode.reward == 2.0 + 0.5 * 1.0 and episode.correct is False
    assert episode.reward_parts == {"episode": 2.0, "exact_match": 1.0}


@in_loop
async def test_without_any_reward_it_is_not_scored(tmp_path):
    async def agent(task, session):
        await two_turns(task, session)
        return Outcome()

    episode, _ = await ran(tmp_path, agent)
    assert episode.reward is None and not episode.is_scored
    assert episode.reward_error == "the episode returned no reward, and reward.functions is empty"


@in_loop
async def test_a_limit_ends_an_episode_as_it_ends_a_response(tmp_path):
    async def agent(task, session):
        await session.turn(task.messages)
        session.set_reward(0, 0.5)
        await session.turn([*task.messages, MORE])

    episode, counts = await ran(tmp_path, agent, limits=Limits(1, 4096))
    assert episode.failure is None and episode.is_truncated and episode.reward == 0.5
    assert episode.info == {"ended_by_limit": "too_many_turns"} and counts["num_episode_failures"] == 0

    async def silent(task, session):
        await session.turn(task.messages)
        await session.turn(task.messages)

    episode, _ = await ran(tmp_path, silent, limits=Limits(1, 4096))
    assert episode.reward == 0.0 and episode.is_scored, "left out, the run would train on short episodes only"


@in_loop
async def test_a_failure_is_recorded_by_kind_and_reason(tmp_path):
    async def agent(task, session):
        await session.turn(task.messages)
        calls = [ToolRecord(0, "search", {}, error="error: no net"), ToolRecord(7, "search", {}, result="x")]
        return Finished(None, Failure("crash", "its worker process ended"), tool_calls=calls, own_seconds=1.25)

    episode, counts = await ran(tmp_path, agent)
    assert episode.failure == "crash: its worker process ended" and not episode.is_scored
    assert episode.num_turns == 1 and [call.turn for call in episode.tool_calls] == [0, -1]
    assert counts["num_episode_failures"] == counts["num_episode_failures_crash"] == 1
    assert (counts["num_tool_calls"], counts["num_tool_errors"]) == (2, 1)
    assert episode.info == {"own_seconds": 1.25}


@pytest.mark.parametrize(("kind", "own"), [("unreachable", "exception"), ("killed", "crash"), ("not_started", "crash")])
@in_loop
async def test_a_failure_of_the_infrastructure_is_the_episodes_own_once_it_asked_for_a_turn(tmp_path, kind, own):
    """What was sampled may have caused it then."""

    async def agent(task, session, turns):
        for _ in range(turns):
            await session.turn(task.messages)
        return Finished(None, Failure(kind, "no route to the machine"))

    for turns, recorded in ((0, kind), (1, own)):
        episode, counts = await ran(tmp_path, partial(agent, turns=turns))
        assert episode.failure == f"{recorded}: no route to the machine"
        assert lost_by_infrastructure(episode) == (turns == 0)
        assert counts[f"num_episode_failures_{recorded}"] == 1


@in_loop
async def test_an_episode_without_a_turn_fails(tmp_path):
    async def agent(task, session):
        return 1.0

    episode, counts = await ran(tmp_path, agent)
    assert episode.failure == (
        "no_turn: the episode ended without a turn of the policy, so there is nothing to train on"
    )
    assert counts["num_episode_failures_no_turn"] == 1 and episode.rows() == []

    async def too_long(task, session):
        await session.turn(task.messages)

    episode, _ = await ran(tmp_path, too_long, limits=Limits(8, 3))
    assert episode.failure is not None and "its first was refused (context_full)" in episode.failure


@in_loop
async def test_a_reward_for_a_turn_that_was_not_is_no_outcome(tmp_path):
    async def agent(task, session):
        await session.turn(task.messages)
        return Outcome(0.0, [None, 1.0])

    episode, _ = await ran(tmp_path, agent)
    assert episode.failure == "wrong_type: Outcome.turn_rewards[1] is 1: there was no turn 1; the episode has had 1"


@in_loop
async def test_an_agent_that_forgets_turns_when_it_begins_again_fails(tmp_path):
    async def agent(task, session):
        await two_turns(task, session)
        session.restart()
        await session.turn(task.messages)
        return 1.0

    episode, counts = await ran(tmp_path, agent)
    assert episode.failure is not None and episode.failure.startswith("not_replayable: ")
    assert counts["num_replayed_turns"] == 1


@in_loop
async def test_a_run_without_servers_is_no_episodes_failure(tmp_path):
    async def agent(task, session):
        raise RolloutError("no server is left")

    with pytest.raises(RolloutError, match="no server is left"):
        await ran(tmp_path, agent)


@in_loop
async def test_a_task_is_a_copy_and_its_seed_the_episodes_own(tmp_path):
    side = side_of(tmp_path, families.QUICKSTART, tools=())
    driver = EpisodeDriver(side.conversation, Limits(8, 4096), seed=3)
    one, again, other = (driver._task(side.prompt, name) for name in ("a", "a", "b"))
    assert one == again and one.seed != other.seed and 0 <= one.seed < 2**63
    assert EpisodeDriver(side.conversation, Limits(8, 4096), seed=4)._task(side.prompt, "a").seed != one.seed
    one.messages[0]["content"] = "changed"
    assert side.prompt.messages == (USER,) and (one.answer, one.prompt_id, one.source) == ("4", "p:0", "p")


@in_loop
async def test_tools_that_the_template_shows_no_way_to_call_are_refused_before_a_run(tmp_path):
    side = side_of(tmp_path, families.QUICKSTART, tool_format="auto")
    runner = OneTurn()
    runner.tool_schemas = families.TOOLS
    with pytest.raises(DataError, match="tool_format"):
        await EpisodeDriver(side.conversation, Limits(8, 4096), runner).start()

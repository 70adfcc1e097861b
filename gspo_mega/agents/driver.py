"""Runs one episode: a session for its turns, something that acts, the outcome as a record.

Owns what becomes of an episode that fails: its record names the reason, and the run goes on. How many may fail is
`rollout.sampled_groups`'s; turns are `session.py`'s. What acts is a pool of worker processes
(`pool.py`), or agents that know no more than the endpoint's address (`external_agent.py`): both are an
`EpisodeRunner`.

The default episode: one turn behind the prompt, judged by the reward functions.

The built-in episode `tool_loop`: the policy calls the run's tools until it answers without a call.

    turn -> run the tools that it calls -> their results, one message each -> turn -> ... -> a turn without a call

The last turn is what the reward functions judge. A limit (`episodes.max_turns`, `episodes.max_tokens`) ends the loop as
it ends every episode: the turns so far are scored and trained on. A call that cannot be read is no call; one that is
wrong gets its error as the result, and the policy may try again.
"""

from __future__ import annotations

import collections
import hashlib
from dataclasses import replace
from typing import Any, Protocol

from gspo_mega.agents.protocol import Failure, Finished, Limits, Model, Outcome, Params, Task, Tools, TurnSampler
from gspo_mega.agents.session import Conversation, EpisodeSession, NotReplayable
from gspo_mega.base.episodes import ENDED_BY_LIMIT, OWN_REWARD, Episode
from gspo_mega.base.records import Prompt
from gspo_mega.data.rows import copied


async def one_turn(task: Task, model: Model, tools: Tools) -> Outcome:
    await model.turn(task.messages)
    return Outcome()


class OneTurn:
    """Runs `one_turn` in this process: an `EpisodeRunner`. It is ours alone, so it needs no worker."""

    def __init__(self) -> None:
        self.tool_schemas: list[dict[str, Any]] = []
        self.counts: collections.Counter[str] = collections.Counter()

    async def start(self) -> None:
        pass

    async def run(self, task: Task, session: EpisodeSession, name: str) -> Finished:
        await session.turn(task.messages)
        return Finished(Outcome())

    async def close(self) -> None:
        pass


async def tool_loop(task: Task, model: Model, tools: Tools) -> Outcome:
    """Leaves the reward to the reward functions. Raises TurnRefused, as a limit does."""
    messages = [*task.messages]
    while True:
        message = await model.turn(messages)
        if not message.get("tool_calls"):
            return Outcome()
        messages += [message, *await tools.answer(message)]


class EpisodeRunner(Protocol):
    """What acts in episodes. It lives on one event loop, the one of its sessions: `start`, any number of concurrent
    `run`, `close`.

    Attributes:
        tool_schemas: what the chat template is given, known after `start`; empty where agents bring their own.
        counts: of what belongs to no episode, since `start`, by metric name (`num_workers_recycled`); what does is
            counted in its session.
    """

    tool_schemas: list[dict[str, Any]]
    counts: collections.Counter[str]

    async def start(self) -> None:
        """Raises EpisodeError: a function or a tool cannot be loaded, an address cannot be bound."""
        ...

    async def run(self, task: Task, session: EpisodeSession, name: str) -> Finished:
        """One episode, from its first call to its end. Its turns go through `session.turn` or `session.answer`, and
        turn rewards through `session.set_reward`; where it begins again in another process, after
        `session.restart()`. `name`: the episode's id and prompt, in errors.

        Nothing that the episode does wrong is raised. Raises RolloutError, which the session raised: no server can
        serve, which ends the run; EpisodeError where no process can be started any more. Cancelled, it ends the
        episode's own work.
        """
        ...

    async def close(self) -> None:
        """End every process and every open episode."""
        ...


class EpisodeDriver:
    """Runs episodes of one kind, any number at a time, on the pool's loop. `start` first, `close` at the end."""

    def __init__(
        self, conversation: Conversation, limits: Limits, runner: EpisodeRunner | None = None, seed: int = 0
    ) -> None:
        """`runner`: one turn where none is given. `seed`: the run's, from which each episode's follows."""
        self.runner: EpisodeRunner = runner or OneTurn()
        self._conversation, self._limits, self._seed = conversation, limits, seed

    async def start(self) -> None:
        """Start what acts. Raises EpisodeError: something cannot be loaded; DataError: the chat template shows no way
        to call the tools.
        """
        await self.runner.start()
        self.check_tools(self.runner.tool_schemas)

    def check_tools(self, tool_schemas: list[dict[str, Any]]) -> None:
        """Raises DataError: the chat template shows no way to call tools of these schemas."""
        self._conversation.check_tools(tool_schemas)

    async def close(self) -> None:
        await self.runner.close()
        self._conversation.close()

    async def run(
        self,
        prompt: Prompt,
        group_id: int,
        episode_id: str,
        sampler: TurnSampler[Params],
        params: Params,
    ) -> Episode:
        """The whole record of one episode, with the rewards that it gave itself, not yet scored by reward functions.

        A failure of the episode is the record's `failure`, `kind: text`. Raises RolloutError where no server can serve.
        """
        tools = self.runner.tool_schemas
        session = EpisodeSession(self._conversation, episode_id, prompt, sampler, params, self._limits, tools)
        finished = await self.runner.run(
            self._task(prompt, episode_id), session, f"{episode_id} (prompt {prompt.prompt_id})"
        )
        calls = [replace(call, turn=session.place_of(call.turn)) for call in finished.tool_calls]
        episode = Episode(episode_id, group_id, prompt, session.nodes, list(tools), calls)
        counts = {**session.counts, "num_episodes_restarted": session.num_restarts}
        episode.counts = {name: count for name, count in counts.items() if count}
        failure = finished.failure or _failure_of(session, finished)
        if failure is None:
            assert finished.outcome is not None
            failure = _give(session, episode, finished.outcome)
        if failure is not None:
            failure = failure.behind(session.num_turns)
            episode.failure = f"{failure.kind}: {failure.text}"
        if finished.own_seconds:
            episode.info["own_seconds"] = round(finished.own_seconds, 3)
        if finished.limit:
            episode.info[ENDED_BY_LIMIT] = finished.limit
        return episode

    def _task(self, prompt: Prompt, episode_id: str) -> Task:
        messages = prompt.messages or ({"role": "user", "content": prompt.text},)
        digest = hashlib.blake2b(f"{self._seed} {episode_id}".encode(), digest_size=8).digest()
        return Task(
            copied(list(messages)),
            copied(prompt.answer),
            copied(prompt.metadata),
            prompt.prompt_id,
            prompt.source,
            int.from_bytes(digest) >> 1,
        )


def _failure_of(session: EpisodeSession, finished: Finished) -> Failure | None:
    """Why an episode that ended by itself is none to train on."""
    try:
        session.check_replayed()
    except NotReplayable as error:
        return Failure("not_replayable", str(error))
    if any(node.is_sampled for node in session.nodes):
        return None
    limit = f"; its first was refused ({finished.limit})" if finished.limit else ""
    return Failure("no_turn", f"the episode ended without a turn of the policy{limit}, so there is nothing to train on")


def _give(session: EpisodeSession, episode: Episode, outcome: Outcome) -> Failure | None:
    """Write down what the episode has earned; returns what is wrong with it."""
    for turn, value in enumerate(outcome.turn_rewards):
        if value is not None:
            try:
                session.set_reward(turn, value)
            except IndexError as error:
                return Failure("wrong_type", f"Outcome.turn_rewards[{turn}] is {value:g}: {error}")
    if outcome.reward is not None:
        episode.reward_parts[OWN_REWARD] = outcome.reward
    episode.reward_parts |= {f"{OWN_REWARD}/{name}": value for name, value in outcome.parts.items()}
    episode.correct = outcome.correct
    episode.info |= outcome.info
    return None

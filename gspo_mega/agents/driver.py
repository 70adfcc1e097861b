"""Runs one episode from start to record.

`EpisodeDriver` opens a session for the episode's turns, lets an `EpisodeRunner` act, and makes the record. An episode
that fails does not end the run: its record names the reason. How many may fail is decided in `rollout/groups.py`.

A runner is a pool of worker processes (`pool.py`), agents that know only the endpoint's address (`external_agent.py`),
or `OneTurn`, which runs in this process. The last part holds the built-in episode functions `one_turn` and `tool_loop`.
"""

from __future__ import annotations

import collections
import hashlib
from dataclasses import replace
from typing import Any, Protocol

from gspo_mega.agents.protocol import Model, Outcome, Task, Tools
from gspo_mega.agents.session import Conversation, EpisodeSession, NotReplayable
from gspo_mega.agents.turn import Failure, Finished, Limits, Params, TurnSampler
from gspo_mega.base.episodes import ENDED_BY_LIMIT, OWN_REWARD, Episode
from gspo_mega.base.records import Prompt
from gspo_mega.data.rows import copied


class EpisodeDriver:
    """Runs episodes of one kind, any number at a time, on the pool's loop. `start` first, `close` at the end."""

    def __init__(
        self, conversation: Conversation, limits: Limits, runner: EpisodeRunner | None = None, seed: int = 0
    ) -> None:
        """Without a `runner`, an episode is one turn. `seed` is the run's; each episode's seed follows from it."""
        self.runner: EpisodeRunner = runner or OneTurn()
        self._conversation, self._limits, self._seed = conversation, limits, seed

    async def start(self) -> None:
        """Start the runner. Raises EpisodeError if something cannot be loaded, and DataError if the chat template shows
        no way to call the tools.
        """
        await self.runner.start()
        self.check_tools(self.runner.tool_schemas)

    def check_tools(self, tool_schemas: list[dict[str, Any]]) -> None:
        """Raise DataError if the chat template shows no way to call tools with these schemas."""
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
        """Run one episode. Return its whole record, with the rewards that it gave itself; the reward functions have not
        scored it yet.

        If the episode failed, the record's `failure` is `kind: text`. Raises RolloutError if no server can serve.
        """
        tools = self.runner.tool_schemas
        session = EpisodeSession(self._conversation, episode_id, prompt, sampler, params, self._limits, tools)
        finished = await self.runner.run(
            self._task(prompt, episode_id), session, f"{episode_id} (prompt {prompt.prompt_id})"
        )
        calls = [replace(call, turn=session.record_index(call.turn)) for call in finished.tool_calls]
        episode = Episode(episode_id, group_id, prompt, session.nodes, list(tools), calls)
        counts = {**session.counts, "num_episodes_restarted": session.num_restarts}
        episode.counts = {name: count for name, count in counts.items() if count}
        failure = finished.failure or _failure_of(session, finished)
        if failure is None:
            assert finished.outcome is not None
            failure = _record_outcome(session, episode, finished.outcome)
        if failure is not None:
            failure = failure.after_turns(session.num_turns)
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
    """Why an episode that ended by itself cannot be trained on; None if it can."""
    try:
        session.check_replayed()
    except NotReplayable as error:
        return Failure("not_replayable", str(error))
    if any(node.is_sampled for node in session.nodes):
        return None
    limit = f"; its first was refused ({finished.limit})" if finished.limit else ""
    return Failure("no_turn", f"the episode ended without a turn of the policy{limit}, so there is nothing to train on")


def _record_outcome(session: EpisodeSession, episode: Episode, outcome: Outcome) -> Failure | None:
    """Write what the episode has earned into its record. Return a failure if the outcome is not valid."""
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


class EpisodeRunner(Protocol):
    """Acts in episodes. It lives on the event loop of its sessions: `start`, any number of concurrent `run`, `close`.

    Attributes:
        tool_schemas: what the chat template is given, known after `start`; empty if agents bring their own tools.
        counts: by metric name, since `start`, what belongs to no single episode (`num_workers_recycled`). What belongs
            to an episode is counted in its session.
    """

    tool_schemas: list[dict[str, Any]]
    counts: collections.Counter[str]

    async def start(self) -> None:
        """Raises EpisodeError if a function or a tool cannot be loaded, or an address cannot be bound."""
        ...

    async def run(self, task: Task, session: EpisodeSession, name: str) -> Finished:
        """Run one episode from its first call to its end, and return how it ended.

        Its turns go through `session.turn` or `session.answer`, its turn rewards through `session.set_reward`. Before
        it begins again in another process, the runner calls `session.restart()`. `name` is the episode's id and prompt,
        for errors.

        What the episode does wrong is in the result and is not raised. Raises the session's RolloutError if no server
        can serve, which ends the run, and EpisodeError if no process can be started any more. Cancelling this ends the
        episode's own work.
        """
        ...

    async def close(self) -> None:
        """End every process and every open episode."""
        ...


class OneTurn:
    """An `EpisodeRunner` that does in this process what `one_turn` does. It runs no users' code, so it needs no
    worker.
    """

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


async def one_turn(task: Task, model: Model, tools: Tools) -> Outcome:
    """The default episode: one turn after the prompt, judged by the reward functions."""
    await model.turn(task.messages)
    return Outcome()


async def tool_loop(task: Task, model: Model, tools: Tools) -> Outcome:
    """The policy calls the run's tools until it answers without a call.

        turn -> run the tools that it calls -> their results, one message each -> turn -> ... -> a turn without a call

    The reward functions judge the last turn. A limit (`episodes.max_turns`, `episodes.max_tokens`) ends the loop as it
    ends every episode: TurnRefused passes through, and the turns so far are scored and trained on. A call that cannot
    be read does not count as a call. A call with an error gets the error as its result, and the policy may try again.
    """
    messages = [*task.messages]
    while True:
        message = await model.turn(messages)
        if not message.get("tool_calls"):
            return Outcome()
        messages += [message, *await tools.answer(message)]

"""The default episode: one turn behind the prompt, judged by the reward functions."""

from __future__ import annotations

import collections
from typing import Any

from gspo_mega.agents.episode_session import Session
from gspo_mega.agents.finished import Finished
from gspo_mega.agents.protocol import Model, Outcome, Task, Tools


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

    async def run(self, task: Task, session: Session, name: str) -> Finished:
        await session.turn(task.messages)
        return Finished(Outcome())

    async def close(self) -> None:
        pass

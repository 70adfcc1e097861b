"""The loop of an environment with `reset` and `step`: its observations are messages, the policy's answers its actions.

`play` turns each step of an environment into the reward of the turn that it answers, the next message, or the end of
the episode. How an environment is reached is in `gym_text.py` and `openenv.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from gspo_mega.agents.protocol import Message, Model, Outcome, Task
from gspo_mega.base.errors import EpisodeError

# The names under which an environment may report the verdict in its last step's `info`.
_VERDICTS = ("correct", "success", "is_success")


@dataclass(frozen=True)
class Step:
    """What an environment returned. `is_over`: it takes no further action. `info`: further facts, such as a verdict."""

    observation: Any
    reward: float | None = None
    is_over: bool = False
    info: dict[str, Any] = field(default_factory=dict)


async def play(
    task: Task, model: Model, first: Step, act: Callable[[str], Awaitable[Step]], pattern: re.Pattern[str] | None
) -> Outcome:
    """Play an environment from its first observation to its end, and return the outcome.

    The first observation is appended to the task's last message, if that is the user's. Later ones are user messages.
    Each reward goes to its turn. The action is the group of the last match of `pattern` in an answer; without a match,
    or without a pattern, it is the whole answer.
    """
    messages = [*task.messages]
    _add_first(messages, first.observation)
    step = first
    num_steps = 0
    while not step.is_over:
        message = await model.turn(messages)
        messages.append(message)
        text = message.get("content") or ""
        found = pattern.findall(text) if pattern is not None else []
        step = await act(found[-1] if found else text)
        num_steps += 1
        if step.reward is not None:
            model.set_reward(-1, float(step.reward))
        if not step.is_over:
            messages.append({"role": "user", "content": as_text(step.observation)})
    verdict = next((bool(step.info[key]) for key in _VERDICTS if key in step.info), None)
    return Outcome(correct=verdict, info={"num_steps": num_steps})


def pattern_of(text: str | None) -> re.Pattern[str] | None:
    """Compile the option `action_pattern`. Raises EpisodeError if it is not a regular expression with one group."""
    if text is None:
        return None
    try:
        pattern = re.compile(text, re.DOTALL)
    except re.error as error:
        raise EpisodeError(f"action_pattern {text!r}: {error}") from None
    if pattern.groups != 1:
        raise EpisodeError(f"action_pattern {text!r}: it has {pattern.groups} groups; the action is the text of one")
    return pattern


def _add_first(messages: list[Message], observation: Any) -> None:
    """Append the first observation to the task's messages."""
    text = as_text(observation)
    if not text:
        return
    if messages and messages[-1]["role"] == "user":
        messages[-1] = {**messages[-1], "content": f"{messages[-1]['content']}\n\n{text}"}
    else:
        messages.append({"role": "user", "content": text})


def as_text(observation: Any) -> str:
    """Return an observation as the policy reads it: a text as it is, anything else as JSON. Raises EpisodeError if it
    is neither.
    """
    if observation is None:
        return ""
    if isinstance(observation, str):
        return observation
    try:
        return json.dumps(observation, ensure_ascii=False)
    except (TypeError, ValueError):
        kind = type(observation).__name__
        raise EpisodeError(
            f"an observation is of the type {kind}; a text, or a value of JSON's types, was expected"
        ) from None

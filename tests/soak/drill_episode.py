"""What the configurations of `drills/` train on: a reward that differs for nearly every response, so that even an
untrained model's steps change the weights, and an episode of three turns that calls a tool after each.
"""

from __future__ import annotations

import zlib

from gspo_mega.agents.protocol import Model, Outcome, Task, Tools

_TURNS = 3


def distinct(*, prompt: str, response: str, answer: object, metadata: dict) -> float:
    return _number(response)


async def three_turns(task: Task, model: Model, tools: Tools) -> Outcome:
    messages, total = [*task.messages], 0.0
    for turn in range(_TURNS):
        message = await model.turn(messages)
        total += _number(message["content"])
        told = await tools.call("calculator", {"expression": f"{turn} + {int(1000 * _number(message['content']))}"})
        messages += [message, {"role": "user", "content": told}]
    return Outcome(reward=total / _TURNS)


def _number(text: str) -> float:
    """From 0 to 1, by the text's checksum."""
    return zlib.crc32(text.encode()) % 1000 / 1000

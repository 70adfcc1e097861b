"""A small episode of several turns: the policy guesses a number and is told whether it is too high or too low.

    rollout:
      episode: {function: "examples.episode:guess", options: {tries: 5}}
    episodes: {max_turns: 5, max_tokens: 1024}
    data: {path: numbers.jsonl, chat_template: true, max_prompt_tokens: 256}
    reward: {}                       the episode gives its own reward

A row of `numbers.jsonl` is `{"prompt": "Guess a number from 1 to 100. Answer with the number.", "answer": 37}`. An
episode function asks for turns and knows nothing of tokens or servers, so it can be tried without a model: `python
examples/episode.py` plays it against a policy that halves the interval.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Sequence

from gspo_mega.agents.protocol import Message, Model, Outcome, Task, Tools


async def guess(task: Task, model: Model, tools: Tools | None, *, tries: int = 5) -> Outcome:
    """The reward is 1 for the first try, less for later ones, and 0 if no guess is right."""
    messages = [*task.messages]
    for attempt in range(tries):
        message = await model.turn(messages)
        found = re.search(r"\d+", message["content"])
        if found is not None and int(found.group()) == int(task.answer):
            return Outcome(reward=1.0 - attempt / tries, correct=True, parts={"tries": attempt + 1.0})
        hint = "Answer with a number."
        if found is not None:
            hint = "Too low." if int(found.group()) < int(task.answer) else "Too high."
        messages += [message, {"role": "user", "content": hint}]
    return Outcome(reward=0.0, correct=False, parts={"tries": float(tries)})


class Halving:
    """A policy without a model: it guesses the middle of what the hints have left of 1 to 100."""

    async def turn(self, messages: Sequence[Message], *, max_new_tokens: int | None = None) -> Message:
        low, high = 1, 100
        for asked, told in itertools.pairwise(messages):
            if asked["role"] == "assistant" and told["content"] == "Too low.":
                low = int(asked["content"]) + 1
            if asked["role"] == "assistant" and told["content"] == "Too high.":
                high = int(asked["content"]) - 1
        return {"role": "assistant", "content": str((low + high) // 2)}

    def set_reward(self, turn: int, value: float) -> None:
        raise NotImplementedError("this episode gives its turns no rewards")


def main() -> None:
    for answer in (50, 37, 38):
        task = Task([{"role": "user", "content": "Guess a number from 1 to 100."}], answer)
        outcome = asyncio.run(guess(task, Halving(), None, tries=7))
        print(f"answer {answer}: reward {outcome.reward:.2f} after {outcome.parts['tries']:.0f} tries")


if __name__ == "__main__":
    main()

"""The calculator's episode with rewards of its turns, for the study of the paper's claims.

A call of the calculator is rewarded where its result is needed: a * b, or the answer. What the last turn says is judged
by the reward function, as in configs/calculator.yaml.
"""

from __future__ import annotations

import re

from gspo_mega.agents.protocol import Model, Outcome, Task, Tools

CALL_REWARD = 0.25
_PROBLEM = re.compile(r"(\d+)\*(\d+)(?:([+-])(\d+))?=")


def needed(problem: str) -> set[str]:
    """What the calculator has to say on the way to the answer of `47*86+39=`, and the answer. Raises ValueError."""
    found = _PROBLEM.fullmatch(problem)
    if found is None:
        raise ValueError(f"{problem!r} is no problem of the calculator's task")
    product = int(found[1]) * int(found[2])
    rest = int(found[4] or 0)
    return {str(product), str(product - rest if found[3] == "-" else product + rest)}


async def calculator_turns(task: Task, model: Model, tools: Tools) -> Outcome:
    """`tool_loop`, and a reward for each first result that is needed."""
    messages = [*task.messages]
    open_results = needed(messages[-1]["content"])
    while True:
        message = await model.turn(messages)
        if not message.get("tool_calls"):
            return Outcome()
        results = await tools.answer(message)
        said = {str(result["content"]) for result in results} & open_results
        if said:
            model.set_reward(-1, CALL_REWARD * len(said))
            open_results -= said
        messages += [message, *results]

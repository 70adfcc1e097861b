"""The built-in episode `tool_loop`: the policy calls the run's tools until it answers without a call.

    turn -> run the tools that it calls -> their results, one message each -> turn -> ... -> a turn without a call

The last turn is what the reward functions judge. A limit (`episodes.max_turns`, `episodes.max_tokens`) ends the loop as
it ends every episode: the turns so far are scored and trained on. A call that cannot be read is no call; one that is
wrong gets its error as the result, and the policy may try again.
"""

from __future__ import annotations

from gspo_mega.agents.protocol import Model, Outcome, Task, Tools


async def tool_loop(task: Task, model: Model, tools: Tools) -> Outcome:
    """Leaves the reward to the reward functions. Raises TurnRefused, as a limit does."""
    messages = [*task.messages]
    while True:
        message = await model.turn(messages)
        if not message.get("tool_calls"):
            return Outcome()
        messages += [message, *await tools.answer(message)]

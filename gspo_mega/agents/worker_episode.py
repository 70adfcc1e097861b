"""One episode inside a worker: the `Model` and the `Tools` that its function is given.

A turn goes to the run as a message and comes back through `take_answer`. A tool runs in this process, in a thread if it
is not async. The pipe to the run, and the end of an episode, are in `episode_worker.py`.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gspo_mega.agents.loop_watch import Owner, WatchedLoop
from gspo_mega.agents.protocol import ContextFull, Message, Task, TooManyTurns, TurnRefused
from gspo_mega.agents.tools import MAX_RESULT_CHARACTERS, Tool, ToolError, text_of
from gspo_mega.base.errors import EpisodeError
from gspo_mega.rewards.user_code import number_of

MOST_TURNS_AT_ONCE = 64
# A function that loops around a tool and never asks the policy would fill the record.
MOST_TOOL_CALLS = 1000
_REFUSALS = {refusal.kind: refusal for refusal in (TurnRefused, ContextFull, TooManyTurns)}


class TooLarge(EpisodeError):
    """A message of the episode is larger than allowed."""


class BadMessages(EpisodeError):
    """The chat template refuses the messages of a turn."""


class WorkerEpisode(Owner):
    """An episode in this worker. It is the `Model` that its function is given.

    Attributes:
        task, tools: as the function gets them.
        last_turn: the highest number of an answered turn, -1 before the first.
        ended_by: (kind, text) of the failure, once the worker has ended the episode.
        ended_at: when the worker ended it, in monotonic seconds.
        past_tools: results of tools from an earlier worker, by name and arguments.
        running_tools: the tools that are running, and since when, by call.
    """

    def __init__(
        self,
        number: int,
        task: Task,
        loop: WatchedLoop,
        tools: Mapping[str, Tool],
        send: Callable[[dict[str, Any]], None],
        is_crowded: Callable[[], bool],
    ) -> None:
        """`send` gives a message of this episode to the run; it raises TooLarge or TypeError. `is_crowded` says whether
        errors may come from the memory that other episodes have taken.
        """
        super().__init__(number, loop)
        self.task = task
        self.tools = WorkerTools(self, tools)
        self.last_turn = -1
        self.ended_by: tuple[str, str] | None = None
        self.ended_at = math.inf
        self.past_tools: dict[tuple[str, str], deque[dict[str, Any]]] = {}
        self.running_tools: dict[int, tuple[str, float]] = {}
        self._loop = loop
        self._send = send
        self._is_crowded = is_crowded
        self._answered: set[int] = set()
        self._asked: dict[int, asyncio.Future[Message]] = {}
        self._num_asked = 0
        self._own_before_turn = 0.0

    # The policy

    async def turn(self, messages: Sequence[Message], *, max_new_tokens: int | None = None) -> Message:
        if len(self._asked) >= MOST_TURNS_AT_ONCE:
            raise EpisodeError(f"more than {MOST_TURNS_AT_ONCE} turns are asked for at the same time")
        if isinstance(messages, str | bytes | dict) or not all(isinstance(one, dict) for one in messages):
            raise TypeError(f"model.turn takes a list of messages, which are dictionaries, not {messages!r:.60}")
        if max_new_tokens is not None and (isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int)):
            raise TypeError(f"max_new_tokens is {max_new_tokens!r:.60}; a whole number was expected")
        self._num_asked += 1
        request = self._num_asked
        self._send({"ask": request, "messages": list(messages), "max_new_tokens": max_new_tokens})
        answer = self._asked[request] = self._loop.create_future()
        self.clock.change(turns=1)
        try:
            return await answer
        finally:
            self._asked.pop(request, None)
            self.clock.change(turns=-1)

    def set_reward(self, turn: int, value: float) -> None:
        number = self.last_turn if turn == -1 else turn
        if number not in self._answered:
            raise IndexError(f"there was no turn {turn}; {len(self._answered)} were answered")
        self._send({"reward": number_of(value, "the reward of a turn"), "turn": number})

    def take_answer(self, reply: dict[str, Any]) -> None:
        """Take the run's reply to a turn that was asked for."""
        if "message" in reply:
            self._answered.add(reply["number"])
            self.last_turn = max(self._answered)
        self._own_before_turn = self.clock.seconds
        answer = self._asked.get(reply["ask"])
        if answer is None or answer.done():  # its caller was cancelled
            return
        if "message" in reply:
            answer.set_result(reply["message"])
        else:
            answer.set_exception(_REFUSALS.get(reply["refused"], BadMessages)(reply["why"]))

    @property
    def turn_seconds(self) -> float:
        """The episode's own time since its last turn was answered."""
        return self.clock.seconds - self._own_before_turn

    # Tools

    async def call_tool(self, tool: Tool | None, name: str, arguments: Any, key: str) -> str:
        """Run a tool, or take its result from an earlier worker's record. Report the call, and return its text."""
        if (past := self.past_tools.get((name, key))) and past:
            record = {**past.popleft(), "turn": self.last_turn}
        else:
            started = time.perf_counter()
            self.running_tools[id(started)] = (name, started)
            try:
                text, went_well = await self._run(tool, name, arguments)
            finally:
                del self.running_tools[id(started)]
            record = {
                "turn": self.last_turn,
                "name": name[:200],
                "arguments": _recorded(arguments),
                "result" if went_well else "error": text,
                "seconds": time.perf_counter() - started,
            }
        replay = tool is None or tool.task_parameter is None
        self._send({"tool": record, "key": [name, key] if replay and len(name) + len(key) < 10_000 else None})
        return record["result"] if "result" in record else f"error: {record['error']}"

    async def _run(self, tool: Tool | None, name: str, arguments: Any) -> tuple[str, bool]:
        try:
            if tool is None:
                names = ", ".join(self.tools.names) or "none"
                raise ToolError(f"there is no tool {name!r:.80}; valid: {names}")
            given = tool.arguments_of(arguments)
            if tool.task_parameter is not None:
                given[tool.task_parameter] = self.task
            if tool.is_async:
                result = await tool.function(**given)
            else:
                result, problem = await self._in_thread(tool.function, given)
                if problem is not None:
                    raise problem
            return text_of(result)[0], True
        except ToolError as error:
            return str(error)[:MAX_RESULT_CHARACTERS], False
        except MemoryError:
            raise
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            return f"{name} was cancelled", False
        except BaseException as error:  # SystemExit too: the policy is told, and the episode continues
            if self._is_crowded():
                raise MemoryError(f"{name}: {error!r:.200}") from error
            message = " ".join(str(error).split())
            return f"{type(error).__name__}{': ' if message else ''}{message}"[:2000], False

    async def _in_thread(self, function: Callable[..., Any], given: dict[str, Any]) -> tuple[Any, BaseException | None]:
        context = contextvars.copy_context()

        def call() -> tuple[Any, BaseException | None]:
            try:
                return context.run(function, **given), None
            except BaseException as error:  # StopIteration, for example, cannot pass through a future or a coroutine
                return None, error

        return await self._loop.run_in_executor(None, call)


class WorkerTools:
    """The `Tools` that an episode's function is given."""

    def __init__(self, episode: WorkerEpisode, tools: Mapping[str, Tool]) -> None:
        self._episode = episode
        self._tools = tools
        self._num_calls = 0

    @property
    def names(self) -> list[str]:
        return list(self._tools)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        return [json.loads(json.dumps(tool.schema)) for tool in self._tools.values()]

    async def call(self, name: str, arguments: dict[str, Any] | str) -> str:
        self._num_calls += 1
        if self._num_calls > MOST_TOOL_CALLS:
            raise EpisodeError(f"more than {MOST_TOOL_CALLS} calls of tools in one episode")
        key = arguments if isinstance(arguments, str) else json.dumps(arguments, sort_keys=True, default=repr)
        return await self._episode.call_tool(self._tools.get(name), str(name), arguments, key)

    async def answer(self, message: Message) -> list[Message]:
        answers = []
        for call in message.get("tool_calls") or ():
            name = call["function"]["name"]
            text = await self.call(name, call["function"].get("arguments") or {})
            answers.append({"role": "tool", "tool_call_id": call.get("id", ""), "name": name, "content": text})
        return answers


def _recorded(arguments: Any) -> dict[str, Any]:
    """Return arguments as a record keeps them: an object of bounded size."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            return {"text": arguments[:MAX_RESULT_CHARACTERS]}
    try:
        text = json.dumps(arguments, default=repr)
    except RecursionError:  # JSON can be read at a deeper nesting than it can be written
        return {"text": "(nested too deep)"}
    if not isinstance(arguments, dict) or len(text) > MAX_RESULT_CHARACTERS:
        return {"text": text[:MAX_RESULT_CHARACTERS]}
    return json.loads(text)

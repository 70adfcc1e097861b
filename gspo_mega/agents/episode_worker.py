"""A worker of episodes: `python -m gspo_mega.agents.episode_worker PARENT_PID`, started by `pooled_worker.py`.

It runs episode functions next to each other on one event loop, enforces their deadlines, and cleans up after each. It
speaks JSON lines over the pipes that it was started with as stdin and stdout:

    in   once: {"episode": {"function": name, "options": {...}}, "tools": [name], "page": path, "memory_bytes": n,
         "file_bytes": n, "network": bool, "turn_deadline_seconds": x, "deadline_seconds": x, "tick_seconds": x,
         "most_bytes": n}
    out  {"ready": true, "pid": n, "tools": [schema]}  or  {"load_error": text}
    in   {"episode": n, "past": {tool record}, "key": [name, arguments]}  tools that an earlier worker ran
    in   {"episode": n, "task": {...}, "name": text}
    out  {"episode": n, "ask": k, "messages": [...], "max_new_tokens": m or null}
    in   {"episode": n, "ask": k, "message": {...}, "number": t}  or
         {"episode": n, "ask": k, "refused": kind, "why": text}
    out  {"episode": n, "turn": t, "reward": x}
    out  {"episode": n, "tool": {tool record}, "key": [name, arguments] or null}
    in   {"episode": n, "end": true}
    out  {"episode": n, "outcome": {...}, "limit": kind} or {"episode": n, "failure": kind, "why": text}, with
         "own_seconds": x, "num_processes": n, "is_clean": bool, "is_crowded": bool

Every line out has a number, `line`, from 0. What functions print goes to stderr. The process ends with its stdin, or
with its guard (`rewards/guard.py`). A loop that stands still is found from outside (`loop_watch.py`).

`WorkerEpisode` comes first: one episode, with the `Model` and the `Tools` that its function is given. A turn goes to
the run as a message and comes back through `take_answer`. A tool runs in this process, in a thread if it is not async.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
import dataclasses
import json
import math
import os
import resource
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from gspo_mega.agents.loop_watch import CURRENT, Owner, WatchedLoop
from gspo_mega.agents.owned_processes import end_processes, mark_processes
from gspo_mega.agents.protocol import (
    ContextFull,
    EpisodeFunction,
    Message,
    Outcome,
    Task,
    TooManyTurns,
    TurnRefused,
    Unreachable,
    load_episode,
    outcome_of,
)
from gspo_mega.agents.tools import MAX_RESULT_CHARACTERS, Tool, ToolError, load_tools, text_of
from gspo_mega.base.errors import EpisodeError
from gspo_mega.base.user_functions import describe
from gspo_mega.rewards.guard import begin, leave, leave_network, limit
from gspo_mega.rewards.user_code import BadResult, number_of

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


# How long an episode that was ended has to clean up after itself.
_GRACE_SECONDS = 1.0
_LONGEST_LINE = 2**31
_ARENA_MAX = -8  # M_ARENA_MAX of <malloc.h>


def main() -> None:
    requests, replies, setup = begin()
    mark_processes()
    try:
        if not setup["network"]:
            leave_network("episodes", EpisodeError)
        function = load_episode(setup["episode"]["function"], setup["episode"]["options"])
        tools = load_tools(setup["tools"])
    except EpisodeError as error:
        replies.write(json.dumps({"load_error": str(error)}).encode() + b"\n")
        replies.flush()
        leave()
    _share_one_arena()
    os.register_at_fork(after_in_child=lambda: _detach_fork(requests.fileno(), replies.fileno()))
    loop = WatchedLoop(setup["page"])
    asyncio.set_event_loop(loop)
    worker = _Worker(loop, setup, function, tools)
    serving = loop.create_task(worker.serve(requests, replies))
    while not serving.done():
        try:
            loop.run_forever()
        except (SystemExit, KeyboardInterrupt):  # raised by an episode's task, which keeps it as its result, too
            continue
    serving.result()
    leave()


def _share_one_arena() -> None:
    """Make glibc allocate for all threads from one arena. Each further arena would reserve 64 MiB of address space,
    which the bound on memory counts.
    """
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_ARENA_MAX, 1)


def _detach_fork(*pipes: int) -> None:
    """Detach a fork of an episode from the worker's pipes, so that it neither reads nor writes them."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for pipe in pipes:
        os.dup2(nothing, pipe)


class _Worker:
    def __init__(
        self, loop: WatchedLoop, setup: dict[str, Any], function: EpisodeFunction, tools: dict[str, Tool]
    ) -> None:
        self._loop = loop
        self._setup = setup
        self._function = function
        self._tools = tools
        self._episodes: dict[int, WorkerEpisode] = {}
        self._past_tools: dict[int, list[dict[str, Any]]] = {}
        self._runs: dict[int, asyncio.Task[dict[str, Any]]] = {}
        self._used_at_start = 0
        self._guard_pid = os.getppid()
        # A thread of its own to end processes: all others may be waiting for processes. It starts now, while there is
        # memory for it.
        self._ending = ThreadPoolExecutor(1, "ending")
        self._ending.submit(os.getpid)
        self._num_lines = 0
        self._out: asyncio.WriteTransport | None = None

    async def serve(self, requests: Any, replies: Any) -> None:
        """Run episodes until the requests end."""
        reader = asyncio.StreamReader(limit=_LONGEST_LINE)
        await self._loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), requests)
        self._out, _ = await self._loop.connect_write_pipe(asyncio.BaseProtocol, replies)
        limit(self._setup["memory_bytes"], self._setup["file_bytes"])
        self._used_at_start = _used_bytes()
        self._tick()
        self._write({"ready": True, "pid": os.getpid(), "tools": [tool.schema for tool in self._tools.values()]})
        while line := await reader.readline():
            self._take(json.loads(line))

    def _take(self, message: dict[str, Any]) -> None:
        number = message["episode"]
        episode = self._episodes.get(number)
        if "past" in message:
            self._past_tools.setdefault(number, []).append(message)
        elif "task" in message:
            self._start(number, Task(**message["task"]), message["name"])
        elif episode is None:
            return
        elif "end" in message:
            self._end(episode, "cancelled", "nobody waits for it any more")
        else:
            episode.take_answer(message)

    def _start(self, number: int, task: Task, name: str) -> None:
        episode = WorkerEpisode(
            number, task, self._loop, self._tools, lambda message: self._send(number, message), self._is_crowded
        )
        for one in self._past_tools.pop(number, ()):
            episode.past_tools.setdefault(tuple(one["key"]), deque()).append(one["past"])
        context = contextvars.copy_context()
        context.run(CURRENT.set, episode)
        self._episodes[number] = episode
        self._runs[number] = self._loop.create_task(self._play(episode), name=name, context=context)
        self._runs[number].add_done_callback(lambda run: self._ended(episode, run), context=contextvars.Context())

    async def _play(self, episode: WorkerEpisode) -> dict[str, Any]:
        """Run one episode's function, and return the message about its end."""
        try:
            options = self._setup["episode"]["options"]
            outcome, refused = outcome_of(await self._function(episode.task, episode, episode.tools, **options)), ""
        except TurnRefused as refusal:
            outcome, refused = Outcome(), refusal.kind
        except BadResult as error:
            return {"failure": error.kind, "why": str(error)}
        except MemoryError as error:
            return {"failure": "memory", "why": describe(error), "is_crowded": self._is_crowded()}
        except (TooLarge, BadMessages) as error:
            return {"failure": "too_large" if isinstance(error, TooLarge) else "messages", "why": describe(error)}
        except Unreachable as error:
            return {"failure": "unreachable", "why": describe(error)}
        except BaseException as error:  # SystemExit and CancelledError too fail only this episode
            forgotten = "; was an `await` forgotten?" if "coroutine" in str(error) else ""
            return {"failure": "exception", "why": describe(error) + forgotten, "is_crowded": self._is_crowded()}
        return {"outcome": dataclasses.asdict(outcome), "limit": refused}

    def _is_crowded(self) -> bool:
        """Whether an error may come from the memory that other episodes have taken."""
        return len(self._episodes) > 1 and _used_bytes() - self._used_at_start > self._setup["memory_bytes"] // 2

    def _end(self, episode: WorkerEpisode, kind: str, why: str) -> None:
        if episode.ended_by is None:
            episode.ended_by, episode.ended_at = (kind, why), time.monotonic()
            self._runs[episode.number].cancel()

    def _ended(self, episode: WorkerEpisode, run: asyncio.Task[dict[str, Any]]) -> None:
        """Clean up what an episode left behind, and then report how it ended."""
        if run.cancelled():  # before its first step, or by itself: a task that cancels itself and ends without waiting
            said: dict[str, Any] = {"failure": "exception", "why": "CancelledError: it was cancelled"}
        else:
            said = run.result()
        if episode.ended_by is not None:  # no matter how its function reacted to that
            said = {"failure": episode.ended_by[0], "why": episode.ended_by[1]}
        self._loop.create_task(self._clean(episode, run, said))

    async def _clean(self, episode: WorkerEpisode, run: asyncio.Task[Any], said: dict[str, Any]) -> None:
        num_processes = 0
        left = [task for task in episode.tasks if task is not run and not task.done()]
        for task in left:
            task.cancel()
        until = time.monotonic() + _GRACE_SECONDS
        if left:
            await asyncio.wait(left, timeout=_GRACE_SECONDS)
        num_processes += await self._end_processes(episode)  # a thread may be waiting for one
        while episode.threads and time.monotonic() < until:
            await asyncio.sleep(_GRACE_SECONDS / 20)
        num_processes += await self._end_processes(episode)
        is_clean = not episode.threads and not episode.has_processes and all(task.done() for task in left)
        self._leave(episode, said | {"num_processes": num_processes}, is_clean=is_clean)

    async def _end_processes(self, episode: WorkerEpisode) -> int:
        """End the processes that the episode has started since the last call, and return how many these were."""
        if not episode.has_processes:
            return 0
        episode.has_processes = False
        try:
            return await self._loop.run_in_executor(self._ending, end_processes, episode.number, self._guard_pid)
        except (OSError, MemoryError):  # one cannot be ended or found: the pool replaces this worker
            episode.has_processes = True
            return 0

    def _leave(self, episode: WorkerEpisode, said: dict[str, Any], *, is_clean: bool) -> None:
        if self._episodes.pop(episode.number, None) is None:
            return
        del self._runs[episode.number]
        end = {"own_seconds": episode.clock.seconds, "num_processes": 0, "is_clean": is_clean, "is_crowded": False}
        try:
            self._send(episode.number, end | said)
        except TooLarge as error:
            self._send(episode.number, end | {"failure": "too_large", "why": str(error)})

    def _tick(self) -> None:
        """Show that the loop runs, and enforce the deadlines."""
        self._loop.tick()
        most, most_turn = self._setup["deadline_seconds"], self._setup["turn_deadline_seconds"]
        for episode in list(self._episodes.values()):
            if episode.ended_by is not None:
                # An episode that ignores its end is abandoned. The pool replaces this worker when the others are done.
                if not self._runs[episode.number].done() and time.monotonic() - episode.ended_at > _GRACE_SECONDS:
                    kind, why = episode.ended_by
                    self._leave(episode, {"failure": kind, "why": f"{why}; it ignores that"}, is_clean=False)
                    self._ending.submit(end_processes, episode.number, self._guard_pid)
            elif episode.turn_seconds > most_turn:
                self._end(
                    episode, "deadline", f"no turn and no end within {most_turn:g} s of its own{_in_tools(episode)}"
                )
            elif episode.clock.seconds > most:
                self._end(episode, "deadline", f"no end within {most:g} s of its own{_in_tools(episode)}")
        self._loop.call_later(self._setup["tick_seconds"], self._tick)

    def _send(self, number: int, message: dict[str, Any]) -> None:
        line = self._encoded(number, message)
        if number in self._episodes or "is_clean" in message:  # an abandoned episode may send nothing more
            self._num_lines += 1
            assert self._out is not None
            self._out.write(line)

    def _encoded(self, number: int, message: dict[str, Any]) -> bytes:
        most = self._setup["most_bytes"]
        try:
            text = json.dumps(
                {"line": self._num_lines, "episode": number} | message, ensure_ascii=False, allow_nan=False
            )
        except RecursionError:
            raise TooLarge("a message nests too deeply") from None
        line = text.encode("utf-8", "replace") + b"\n"  # a lone surrogate is replaced
        if len(line) > most:
            raise TooLarge(f"a message of {len(line)} bytes; at most {most} (episodes.endpoint.max_body_bytes)")
        return line

    def _write(self, message: dict[str, Any]) -> None:
        assert self._out is not None
        self._out.write(json.dumps(message).encode() + b"\n")


def _in_tools(episode: WorkerEpisode) -> str:
    now = time.perf_counter()
    running = [f"{name} for {now - since:.1f} s" for name, since in episode.running_tools.values()]
    return f"; in the tool {', '.join(running)}" if running else ""


def _used_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main()

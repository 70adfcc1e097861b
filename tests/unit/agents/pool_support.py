"""Users' episodes that do what such functions do, a policy to play them with, and a run of many at once."""

import asyncio
import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field

import psutil

from gspo_mega.agents.pool import EpisodePool
from gspo_mega.agents.protocol import Task, TooManyTurns
from gspo_mega.agents.session import AgentTurn
from gspo_mega.base.errors import EpisodeError
from gspo_mega.config.schema import EpisodeFunction, Episodes

USER_EPISODES = '''
import asyncio, ctypes, os, random, re, signal, subprocess, sys, threading, time
from pathlib import Path
from typing import Literal

from gspo_mega.agents.protocol import Outcome, Task, TurnRefused


async def play(task, model, tools, rounds=3):
    """Turns, each shown the number of the round, with what the answer says done between them."""
    messages = [*task.messages]
    for number in range(rounds):
        message = await model.turn(messages)
        messages.append(message)
        await do(task, model, tools, number)
        messages.append({"role": "user", "content": f"round {number}"})
    return Outcome(reward=float(len(messages)), info={"last": message["content"]})


async def do(task, model, tools, number):
    """Run the task's own text, of this round, as a coroutine's body."""
    text = task.metadata.get("do", {}).get(str(number))
    if text is None:
        return None
    scope = {}
    body = "\\n".join(f"    {line}" for line in text.splitlines())
    exec(f"async def body(task, model, tools):\\n{body}", globals(), scope)
    return await scope["body"](task, model, tools)


async def behave(task, model, tools):
    """Do what the metadata says, and return that."""
    return await do(task, model, tools, 0)


FORGED = (
    b'{"line": 0, "episode": 2, "outcome": {"reward": 9.0}, "limit": "", "own_seconds": 0.0, "is_clean": true}\\n'
)


def stuck():
    while True:
        pass


def hold_the_interpreter():
    """One call into C that never lets another thread of this process run."""
    ctypes.PyDLL(None).sleep(1000)


def recurse():
    return recurse()


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
    """
    return a + b


async def wait(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return f"waited {seconds}"


def sleep(seconds: float) -> str:
    """Sleep in a thread."""
    time.sleep(seconds)
    return "slept"


def count(task: Task) -> int:
    """Count the calls in one episode."""
    task.state["calls"] = task.state.get("calls", 0) + 1
    return task.state["calls"]


def draw() -> str:
    """What differs from call to call."""
    with open("draws", "a") as draws:
        draws.write("x")
    return os.urandom(8).hex()


def act(text: str) -> str:
    """Do what the text says."""
    return eval(text)


async def act_async(text: str) -> str:
    """Do what the text says."""
    return eval(text)


def raise_(error):
    raise error
'''
TOOLS = tuple(f"user_episodes:{name}" for name in ("add", "wait", "sleep", "count", "draw", "act", "act_async"))


@dataclass
class PolicySession:
    """A session whose policy answers with a digest of what it is shown. `record`: what was sampled, once each."""

    delay_seconds: float = 0.0
    max_turns: int = 10**6
    calls: dict[int, list[dict]] = field(default_factory=dict)
    error: BaseException | None = None
    record: list[tuple[str, dict]] = field(default_factory=list)
    rewards: dict[int, float] = field(default_factory=dict)
    num_restarts: int = 0
    num_replayed: int = 0
    most_in_flight: int = 0
    _next: int = 0
    _in_flight: int = 0

    async def answer(self, messages, *, max_new_tokens=None):
        number, self._next = self._next, self._next + 1
        key = json.dumps([messages, max_new_tokens])
        if number < len(self.record):
            if self.record[number][0] != key:
                raise EpisodeError(f"turn {number} was asked for with other messages")
            self.num_replayed += 1
            return AgentTurn(number, dict(self.record[number][1]), "stop", 0, is_replayed=True)
        if number >= self.max_turns:
            raise TooManyTurns(f"{self.max_turns} turns")
        if self.error is not None:
            raise self.error
        self._in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._in_flight)
        await asyncio.sleep(self.delay_seconds)
        self._in_flight -= 1
        message = {"role": "assistant", "content": hashlib.sha256(key.encode()).hexdigest()[:8]}
        if number in self.calls:
            message["tool_calls"] = self.calls[number]
        self.record.append((key, message))
        return AgentTurn(number, dict(message), "stop", 0)

    def set_reward(self, turn, value):
        self.rewards[turn] = value

    def restart(self):
        assert self._in_flight == 0
        self.num_restarts += 1
        self._next = 0


def call(name, arguments, call_id="c"):
    """A tool call as a policy writes it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def settings(**changes):
    fast = {"num_workers": 1, "blocked_seconds": 1.0, "turn_deadline_seconds": 20.0, "memory_bytes": 1024**3}
    return Episodes(**(fast | changes))


def task(number=0, text=None, rounds=None):
    """A task; `text`: what the episode does (after its first turn, with `play`), `rounds`: what after which turn."""
    metadata = {} if text is None and rounds is None else {"do": rounds if rounds is not None else {"0": text}}
    return Task([{"role": "user", "content": f"task {number}"}], None, metadata, f"data:{number}", "data", number)


def run(tasks, *, function="user_episodes:behave", tools=(), sessions=None, inside=None, options=None, **changes):
    """Play tasks at once. Returns their ends, their sessions, and the pool."""
    tasks = [one if isinstance(one, Task) else task(number, one) for number, one in enumerate(tasks)]
    sessions = sessions or [PolicySession() for _ in tasks]
    pool = EpisodePool(settings(**changes), EpisodeFunction(function=function, options=options or {}), tools)

    async def play():
        async with pool:
            playing = asyncio.gather(
                *(pool.run(one, session, one.prompt_id) for one, session in zip(tasks, sessions, strict=True))
            )
            if inside is not None:
                await inside(pool, sessions)
            return await playing

    return asyncio.run(play()), sessions, pool


def kinds(ends):
    """How many ended how."""
    return Counter("" if end.failure is None else end.failure.kind for end in ends)


def the_worker():
    """The process that the episodes run in, of a pool with one worker. This process has other children, too."""
    [guard] = [child for child in psutil.Process().children() if "gspo_mega.agents.episode_worker" in child.cmdline()]
    [worker] = guard.children()
    return worker

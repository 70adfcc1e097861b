"""User functions that do what such functions do, and trajectories to score with them."""

import asyncio

import psutil

from gspo_mega.base.episodes import Episode, one_turn_episode
from gspo_mega.base.records import Prompt
from gspo_mega.config.schema import Reward, RewardFunction
from gspo_mega.rewards.pool import ScoringPool

USER_FUNCTIONS = '''
import os, subprocess, sys, time
from pathlib import Path


def behave(*, prompt, response, answer, metadata, **options):
    """Does what the response says."""
    return eval(response, globals() | {"prompt": prompt, "answer": answer, "metadata": metadata, "options": options})

def length(*, response, **_):
    return len(response)

def pid(**_):
    return os.getpid()

def parts(*, response, **_):
    return {"reward": 0.5, "format": 1, "length": len(response)}

def loud(*, response, **_):
    print("to stdout", response)
    os.write(1, b'{"id": 1, "value": 9, "parts": {}}\\n')
    sys.stderr.write("to stderr\\n")
    subprocess.run(["echo", "from a child"])
    return 1 if sys.stdin.read() == "" else 0

def stuck(**_):
    while True:
        time.sleep(1000)

def leave_a_child(*, response, **_):
    child = subprocess.Popen(["sleep", "1000"])
    Path(response).write_text(str(child.pid))
    time.sleep(1000)

def fork_and_return_twice(**_):
    os.fork()
    return 1

def close_everything(**_):
    os.closerange(3, 100)
    time.sleep(1000)

def wait_once(*, response, **_):
    """Notes its pid in the file `response` and waits; is 1 where another has done so, unless the file's name says always."""
    began = os.path.exists(response)
    with open(response, "a") as file:
        file.write(f"{os.getpid()} ")
    if not began or response.endswith("always"):
        time.sleep(1000)
    return 1

def raise_(text):
    raise ValueError(text)
'''


def settings(*functions, **changes):
    entries = tuple(
        entry if isinstance(entry, RewardFunction) else RewardFunction(function=entry) for entry in functions
    )
    return Reward(functions=entries, **({"num_workers": 1} | changes))


def trajectory(response, *, answer=None, source="data", text="x", **metadata):
    prompt = Prompt("data:0", source, (1,), text, answer, metadata)
    return one_turn_episode("0", 0, prompt, [1], [0.0], [0], "stop", response)


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def score(reward, *responses, source_rewards=None, inside=None):
    """Score responses (or episodes) at once; returns the episodes and the pool."""
    trajectories = [r if isinstance(r, Episode) else trajectory(r) for r in responses]

    async def run():
        async with ScoringPool(reward, source_rewards) as pool:
            await asyncio.gather(*(pool.score(t) for t in trajectories))
            if inside is not None:
                await inside(pool)
        return pool

    return trajectories, asyncio.run(run())


BEHAVE = settings("user_rewards:behave", deadline_seconds=20.0)

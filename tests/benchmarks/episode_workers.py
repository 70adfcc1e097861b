"""Many waiting episodes in one worker process: what each costs, and how long a turn and a blocked neighbour take.

    python tests/benchmarks/episode_workers.py [EPISODES ...]

Each episode asks for three turns, which a policy answers after a second, and waits there with all others. `echo`: the
same without that second, which is the pool's own work for each turn. `blocked`: one more episode blocks the worker
once all others have had a turn; the time from there until every neighbour has had its answers again in the next worker.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path

import psutil

from gspo_mega.agents.pool import EpisodePool
from gspo_mega.agents.protocol import Task
from gspo_mega.agents.session import AgentTurn
from gspo_mega.config.schema import EpisodeFunction, Episodes

MODULE = """
import asyncio, os
from pathlib import Path

async def play(task, model, tools):
    messages = [*task.messages]
    for _ in range(3):
        messages.append(await model.turn(messages))
        messages.append({"role": "user", "content": "on"})
        while task.metadata.get("waits") and not Path("block").exists():
            await asyncio.sleep(0.05)
        if task.metadata.get("blocks"):
            while True:
                pass
    return 1.0
"""


class Policy:
    """A session whose turns take `seconds`. Attributes: num_sampled, replayed_at: when the last replayed turn was."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.num_sampled = self.next = 0
        self.replayed_at = 0.0

    async def answer(self, messages, *, max_new_tokens=None):
        number, self.next = self.next, self.next + 1
        if number < self.num_sampled:
            self.replayed_at = time.monotonic()
        else:
            self.num_sampled += 1
            await asyncio.sleep(self.seconds)
        return AgentTurn(number, {"role": "assistant", "content": "x" * 200}, "stop", 0)

    def set_reward(self, turn, value):
        pass

    def restart(self):
        self.next = 0


def task(number: int, **metadata: bool) -> Task:
    return Task([{"role": "user", "content": "x" * 500}], None, metadata, str(number), "data", number)


async def measure(num_episodes: int) -> tuple[float, ...]:
    settings = Episodes(num_workers=1, episodes_per_worker=num_episodes + 1, recycle_after=10**9, memory_bytes=2**32)
    async with EpisodePool(settings, EpisodeFunction(function="waiting_episodes:play")) as pool:
        [guard] = psutil.Process().children()
        [worker] = guard.children()
        before = worker.memory_info().rss
        playing = [asyncio.create_task(pool.run(task(n), Policy(1.0), str(n))) for n in range(num_episodes)]
        await asyncio.sleep(1.0 + num_episodes / 2000)
        grown = worker.memory_info().rss - before
        ends = await asyncio.gather(*playing)
        assert all(end.outcome is not None for end in ends)
        started = time.monotonic()
        await asyncio.gather(*(pool.run(task(n), Policy(0.0), str(n)) for n in range(num_episodes)))
        echo = time.monotonic() - started
        policies = [Policy(0.0) for _ in range(num_episodes)]
        playing = [
            asyncio.create_task(pool.run(task(n, waits=True), policy, str(n))) for n, policy in enumerate(policies)
        ]
        while not all(policy.num_sampled for policy in policies):
            await asyncio.sleep(0.01)
        blocking = asyncio.create_task(pool.run(task(-1, blocks=True), Policy(0.0), "blocks"))
        started = time.monotonic()
        assert (await blocking).failure.kind == "blocked"
        found = time.monotonic() - started
        while not all(policy.replayed_at for policy in policies):
            await asyncio.sleep(0.01)
        again = max(policy.replayed_at for policy in policies) - started
        Path("block").touch()
        ends = await asyncio.gather(*playing)
        assert all(end.outcome is not None for end in ends) and {policy.num_sampled for policy in policies} == {3}
        Path("block").unlink()
        return grown / num_episodes, 3 * num_episodes / echo, found, again


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("waiting_episodes.py").write_text(MODULE)
        print("| episodes | KiB each | turns/s | blocker found s | neighbours on again s |\n|---|---|---|---|---|")
        for number in [int(text) for text in sys.argv[1:]] or [256, 1000, 4000]:
            size, turns, found, again = asyncio.run(measure(number))
            print(f"| {number} | {size / 1024:.1f} | {turns:.0f} | {found:.1f} | {again:.1f} |", flush=True)


if __name__ == "__main__":
    main()

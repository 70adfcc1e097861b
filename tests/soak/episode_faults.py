"""Many episodes in a few workers, some of which do what episodes do wrong: every healthy one ends as it would alone.

    python tests/soak/episode_faults.py [--episodes 1000] [--faulty 0.05] [--seed 0] [--workers 3]

The faults are those of tests/unit/agents/test_episode_isolation.py, in a random turn of random episodes. Each healthy
episode draws tools and turns of its own. Fails where a healthy one has another outcome, record or tool result than in a
pool without faults, where a faulty one has an outcome, or where a turn was sampled twice.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "unit" / "agents")]

from pool_support import TOOLS, USER_EPISODES, PolicySession, settings, task
from test_episode_isolation import ENDS_ITSELF, LOSES_ITS_WORKER

from gspo_mega.agents.pool import EpisodePool
from gspo_mega.config.schema import EpisodeFunction

HEALTHY = (
    "await asyncio.sleep(0.05)",
    "assert await tools.call('add', {'a': 1, 'b': 2}) == '3'",
    "await tools.call('sleep', {'seconds': 0.05})",
    "assert await tools.call('count', {}) == str(task.state['calls'])",
    "await asyncio.to_thread(time.sleep, 0.05)",
    "time.sleep(0.02)",
)
# Those that need bounds of their own, or end as a healthy one does behind a turn of `play`.
NOT_HERE = {"a huge message", "many parts", "takes long in all", "huge info", "a reward that is none"}
ALIVE = {**ENDS_ITSELF, **LOSES_ITS_WORKER}
FAULTS = {
    name: fault
    for name, fault in ALIVE.items()
    if name not in NOT_HERE and not re.search(r"\breturn\b", fault[0]) and "set_reward" not in fault[0]
}


def episode(number: int, rng: random.Random, fault: str | None):
    rounds = {str(turn): rng.choice(HEALTHY) for turn in range(3)}
    if fault is not None:
        rounds[str(rng.randrange(3))] = FAULTS[fault][0]
    return task(number, rounds=rounds)


async def play(tasks, workers: int):
    pool = EpisodePool(
        settings(
            num_workers=workers,
            episodes_per_worker=40,
            recycle_after=150,
            blocked_seconds=1.5,
            turn_deadline_seconds=5.0,
            memory_bytes=512 * 1024**2,
        ),
        EpisodeFunction(function="user_episodes:play"),
        TOOLS,
    )
    sessions = [PolicySession(random.Random(one.seed).uniform(0, 0.5)) for one in tasks]
    async with pool:
        running = (pool.run(one, session, one.prompt_id) for one, session in zip(tasks, sessions, strict=True))
        return await asyncio.gather(*running), sessions, pool.counts


def seen(end, session):
    calls = [(call.turn, call.name, call.arguments, call.result, call.error) for call in end.tool_calls]
    return end.outcome, end.failure, calls, session.record


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--faulty", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=3)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    faults = [rng.choice(sorted(FAULTS)) if rng.random() < args.faulty else None for _ in range(args.episodes)]
    tasks = [episode(number, random.Random(number), fault) for number, fault in enumerate(faults)]
    healthy = [one for one, fault in zip(tasks, faults, strict=True) if fault is None]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ["PYTHONPATH"] = str(ROOT)
        Path("user_episodes.py").write_text(USER_EPISODES)
        started = time.monotonic()
        references = {
            one.seed: seen(*pair)
            for one, *pair in zip(healthy, *asyncio.run(play(healthy, args.workers))[:2], strict=True)
        }
        alone = time.monotonic() - started
        started = time.monotonic()
        ends, sessions, counts = asyncio.run(play(tasks, args.workers))
        spent = time.monotonic() - started
    wrong = []
    for one, fault, end, session in zip(tasks, faults, ends, sessions, strict=True):
        if fault is None and seen(end, session) != references[one.seed]:
            wrong.append(f"episode {one.seed} differs: {seen(end, session)} from {references[one.seed]}")
        # What fills the memory of a busy machine may hold its loop for longer than the bound.
        kind = "memory|blocked" if fault == "fills the memory" else fault and FAULTS[fault][1]
        if kind is not None and (end.failure is None or not re.fullmatch(kind, end.failure.kind)):
            wrong.append(f"episode {one.seed}, which {fault}, ended with {end}")
    print("\n".join(wrong[:10]))
    kinds = Counter(end.failure.kind for end in ends if end.failure is not None)
    replayed = sum(session.num_replayed for session in sessions)
    print(
        f"{len(tasks)} episodes, {len(tasks) - len(healthy)} faulty: {len(wrong)} wrong; failures {dict(kinds)};"
        f" {dict(counts)}, {replayed} turns replayed; {alone:.0f} s without faults, {spent:.0f} s with"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

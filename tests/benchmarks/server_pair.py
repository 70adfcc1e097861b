"""Servers of several source trees, or with other variables, that are up at the same time and take turns at batches.

    python tests/benchmarks/server_pair.py before=OTHER_TREE now=. [now2=.,VARIABLE:VALUE ...] [--batches 10] [--shape 0.83M]

Run it outside every tree: Python puts the working directory first. Each batch is that of a shape of `against_trl.py`, by
default 0.83M: 128 answers of 48 tokens; `135M` is SmolLM2 in bf16 (`--smollm2 FOLDER`), 64 answers of at most 64 tokens.
Printed: seconds on the clock, and processor seconds by kind of process, means per batch. They
share the machine's other work, which changes both sides alike. The client is this tree's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("integration", "support", "benchmarks")]

import against_trl
from servers import Serve, run_config, trust

from gspo_mega.config import load_config
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.rollout.client.completion import SamplingParams
from gspo_mega.rollout.client.server_client import InFlightRequest
from gspo_mega.rollout.pool import ServerPool
from gspo_mega.rollout.pooled_server import Load

WARM_UP = 2
DEADLINE_SECONDS = 600.0  # on a busy machine


async def sample(entry: Any, load: Load, prompts: list[list[int]], params: SamplingParams, name: str) -> None:
    """Sample one batch, and flush the cache as a publish does."""

    async def one(index: int, prompt: list[int]) -> None:
        flight = InFlightRequest(DEADLINE_SECONDS, load)
        await entry.client.generate(
            prompt,
            params,
            request_id=f"{name}-{index}",
            deadline_seconds=DEADLINE_SECONDS,
            report_tokens=load.report_tokens(DEADLINE_SECONDS),
            flight=flight,
        )

    await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(prompts)))
    await entry.client.call("/flush_cache", {}, 30.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sides", nargs="+", metavar="NAME=TREE[,VARIABLE:VALUE]")
    parser.add_argument("--batches", type=int, default=10)
    parser.add_argument("--shape", choices=against_trl.SHAPES, default="0.83M")
    parser.add_argument("--smollm2", type=Path, default=against_trl.SMOLLM2, metavar="FOLDER")
    arguments = parser.parse_args()
    shape = against_trl.SHAPES[arguments.shape]
    servers: dict[str, tuple[Path, Serve]] = {}
    with tempfile.TemporaryDirectory(prefix="pair-") as text, contextlib.ExitStack() as stack:
        folder = Path(text)
        against_trl.make_model(folder, shape, arguments.smollm2)
        spec = read_model_spec(folder / "model")
        params = SamplingParams(shape.new_tokens, 1.0, 1.0, -1, tuple(spec.eos_token_ids))
        try:
            for side in arguments.sides:
                name, _, what = side.partition("=")
                tree, *variables = what.split(",")
                (folder / name).mkdir()
                path = run_config(
                    folder / name,
                    folder / "model",
                    rollout={"max_new_tokens": shape.new_tokens, "max_concurrent_requests": 256},
                    server={"max_total_tokens": 65536},
                    precision=shape.precision,
                )
                own = dict(variable.split(":", 1) for variable in variables)
                serve = Serve(path, folder / name / "run", PYTHONPATH=str(Path(tree).resolve()), **own)
                servers[name] = path, serve
            pools: dict[str, tuple[ServerPool, Any, Load]] = {}
            for name, (path, serve) in servers.items():
                serve.wait_for("ready")
                pool = stack.enter_context(ServerPool(load_config(path).config.rollout, spec, serve.attempt))
                pool.wait_ready(1, 120)
                trust(pool)
                pools[name] = pool, pool.loop.run(pool.acquire()), Load()
            walls: dict[str, list[float]] = {name: [] for name in servers}
            used: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
            for number in range(arguments.batches + WARM_UP):
                draw = random.Random(number)
                some = [[draw.randrange(3, spec.vocab_size) for _ in range(11)] for _ in range(shape.num_prompts)]
                prompts = [prompt for prompt in some for _ in range(8)]
                for name in list(servers)[:: 1 if number % 2 else -1]:
                    pool, entry, load = pools[name]
                    root = servers[name][1].process.pid
                    before, client, started = against_trl.cpu_seconds(root), time.process_time(), time.monotonic()
                    pool.loop.run(sample(entry, load, prompts, params, str(number)))
                    wall, client = time.monotonic() - started, time.process_time() - client
                    after = against_trl.cpu_seconds(root)
                    if number >= WARM_UP:
                        walls[name].append(wall)
                        used[name].append({k: s - before.get(k, 0.0) for k, s in after.items()} | {"client": client})
            for name, pairs in used.items():
                means = {kind: statistics.mean(one.get(kind, 0.0) for one in pairs) for kind in pairs[0]}
                shown = "  ".join(f"{kind} {seconds:.3f}" for kind, seconds in sorted(means.items()))
                print(
                    f"{name}: {statistics.median(walls[name]):.2f} s; processor: {shown}; load {os.getloadavg()[0]:.0f}"
                )
        finally:
            for _, serve in servers.values():
                serve.stop()


if __name__ == "__main__":
    main()

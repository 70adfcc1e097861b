"""Tokens a second of a real server with the batched CPU attention and with SGLang's own, and their ratio.

    python tests/benchmarks/rollout_attention.py [--model FOLDER] [--rounds N]

Without --model it makes the tests' small MoE. Run it on an otherwise idle machine; the servers are started one after
the other and answer the same requests: 128 at once, 48 and then 192 new tokens each.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "integration"), str(Path(__file__).parents[2])]

from servers import Serve, run_config, trust
from tiny_models import EOS_TOKEN_ID, make_model

from gspo_mega.config import load_config
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.rollout.client.completion import SamplingParams
from gspo_mega.rollout.pool import ServerPool

NUM_REQUESTS = 128
NEW_TOKENS = (48, 192)


async def burst(pool: ServerPool, num_new: int, vocab_size: int) -> int:
    """Tokens that came back from NUM_REQUESTS requests at once, prompts of 8 to 23 tokens."""
    entry = await pool.acquire()
    params = SamplingParams(num_new, 1.0, 1.0, -1, (EOS_TOKEN_ID,))
    prompts = [tuple(3 + (13 * i + j) % (vocab_size - 3) for j in range(8 + i % 16)) for i in range(NUM_REQUESTS)]
    calls = [entry.client.generate(p, params, request_id=str(i), deadline_seconds=600) for i, p in enumerate(prompts)]
    try:
        return sum(len(c.token_ids) for c in await asyncio.gather(*calls))
    finally:
        await pool.release(entry)


def measure(model: Path, backend: str, rounds: int) -> dict[int, float]:
    """Best of `rounds`, for each of NEW_TOKENS: tokens a second."""
    with tempfile.TemporaryDirectory() as folder:
        config_path = run_config(
            Path(folder), model, rollout={"max_new_tokens": max(NEW_TOKENS)}, server={"attention_backend": backend}
        )
        serve = Serve(config_path, Path(folder) / "run")
        try:
            serve.wait_for("ready")
            spec = read_model_spec(model)
            with ServerPool(load_config(config_path).config.rollout, spec, serve.attempt) as pool:
                pool.wait_ready(1, 60)
                trust(pool)
                best = {}
                for num_new in NEW_TOKENS:
                    for _ in range(rounds):
                        started = time.perf_counter()
                        tokens = pool.loop.run(burst(pool, num_new, spec.vocab_size))
                        best[num_new] = max(best.get(num_new, 0.0), tokens / (time.perf_counter() - started))
                return best
        finally:
            serve.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="Hugging Face folder to serve")
    parser.add_argument("--rounds", type=int, default=3, help="bursts of each length; the best counts")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or make_model(Path(folder) / "moe", moe=True)
        stock = measure(model, "torch_native", args.rounds)
        batched = measure(model, "cpu_batched", args.rounds)
    for num_new in NEW_TOKENS:
        print(
            f"{NUM_REQUESTS} x {num_new} tokens: torch_native {stock[num_new]:.0f} tokens/s,"
            f" cpu_batched {batched[num_new]:.0f} tokens/s, {batched[num_new] / stock[num_new]:.2f} times"
        )


if __name__ == "__main__":
    main()

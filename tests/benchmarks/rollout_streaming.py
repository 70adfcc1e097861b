"""What streaming costs: the same requests as one JSON answer each, and as this package's client reads them.

    python tests/benchmarks/rollout_streaming.py [--requests 256] [--tokens 64] [--rounds 5]

Starts a real SGLang server on the tiny Mixture-of-Experts model of the integration tests and alternates between the
two.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

import aiohttp
from servers import Serve, run_config
from tiny_models import EOS_TOKEN_ID, make_model

from gspo_mega.config import load_config
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.rollout.client.completion import SamplingParams
from gspo_mega.rollout.client.server_client import InFlightRequest
from gspo_mega.rollout.pool import ServerPool
from gspo_mega.rollout.pooled_server import Load
from gspo_mega.rollout.registration import read_secret


async def whole(address: str, key: str, prompts, params) -> int:
    async with aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {key}"}, connector=aiohttp.TCPConnector(limit=0)
    ) as session:

        async def one(prompt):
            body = {
                "input_ids": prompt,
                "sampling_params": params.as_json(),
                "return_logprob": True,
                "return_routed_experts": True,
            }
            async with session.post(address + "/generate", json=body) as response:
                return len(json.loads(await response.text())["output_ids"])

        return sum(await asyncio.gather(*map(one, prompts)))


async def streamed(entry, load: Load, prompts, params) -> int:
    async def one(number, prompt):
        flight = InFlightRequest(120.0, load)
        answer = await entry.client.generate(
            prompt,
            params,
            request_id=str(number),
            deadline_seconds=120.0,
            report_tokens=load.report_tokens(120.0),
            flight=flight,
        )
        return len(answer.token_ids)

    return sum(await asyncio.gather(*(one(i, p) for i, p in enumerate(prompts))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model", moe=True)
        rollout = {
            "max_new_tokens": args.tokens,
            "return_routed_experts": True,
            "max_concurrent_requests": args.requests,
        }
        path = run_config(Path(folder), model, rollout=rollout)
        serve = Serve(path, Path(folder) / "run")
        try:
            serve.wait_for("ready")
            params = SamplingParams(args.tokens, 1.0, 1.0, -1, (EOS_TOKEN_ID,))
            prompts = [[10 + (i + j) % 90 for j in range(20)] for i in range(args.requests)]
            with ServerPool(load_config(path).config.rollout, read_model_spec(model), serve.attempt) as pool:
                pool.wait_ready(1, 60)
                entry, load = pool.loop.run(pool.acquire()), Load()
                rates: dict[str, list[float]] = {"whole": [], "streamed": []}
                for number in range(args.rounds + 1):
                    for name, run in (
                        (
                            "whole",
                            lambda: whole(
                                entry.client.address, read_secret(serve.attempt.api_key_file), prompts, params
                            ),
                        ),
                        ("streamed", lambda: streamed(entry, load, prompts, params)),
                    ):
                        started = time.monotonic()
                        tokens = pool.loop.run(run())
                        if number:  # the first warms up
                            rates[name].append(tokens / (time.monotonic() - started))
                print({name: [round(r) for r in found] for name, found in rates.items()})
                medians = {name: statistics.median(found) for name, found in rates.items()}
                print(
                    f"median tokens/s: whole {medians['whole']:.0f}, streamed {medians['streamed']:.0f}, ratio"
                    f" {medians['streamed'] / medians['whole']:.3f}; reports every {load.report_tokens(120.0)} tokens"
                )
        finally:
            serve.stop()


if __name__ == "__main__":
    main()

"""Real SGLang servers that hold, compute and cache in less than the trainer's precision, against the same model by hand
(`quantized_forward.py`): both experts' kinds of scale, blocks and quantization while loading, an FP8 cache, new weights.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from quantized_forward import QuantizedForward, write_blocks
from servers import Serve, Unending, run_config, trust
from tiny_models import IN_BLOCKS, make_model, perturb

from gspo_mega.config import load_config
from gspo_mega.cpu.sglang_hooks import has_gpu
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.rollout.pool import ServerPool

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed"),
    pytest.mark.skipif(has_gpu(), reason="the emulation is for machines without a GPU"),
]

NUM_SEQUENCES, PROMPT, RESPONSE = 16, 12, 6
# float32 on both sides but for the rounding; measured 2e-6.
CLOSE = 2e-5


class Quantized:
    """A server of a quantization and its pool."""

    def __init__(self, folder: Path, model: Path, served: Path, **server: str) -> None:
        settings = {"start_deadline_seconds": 1200.0, **server}
        config = run_config(folder, served, rollout={"max_new_tokens": 64}, server=settings)
        self.model, self.serve = model, Serve(config, folder / "run", forked=True)
        try:
            self.registration = self.serve.wait_for("ready")
            self.pool = ServerPool(load_config(config).config.rollout, read_model_spec(model), self.serve.attempt)
            trust(self.pool)
            self.pool.wait_ready(1, deadline_seconds=120)
        except BaseException:
            self.serve.stop()
            raise

    def close(self) -> None:
        self.pool.close()
        self.serve.stop()

    def sample(self, prompts: list[tuple[int, ...]]) -> list:
        """One after the other: with some scales a token depends on what else is in the batch. The likeliest tokens: what
        falls on an edge between two codes does so in every run.
        """

        async def each():
            entry = await self.pool.acquire()
            params = Unending(RESPONSE, 0.0, 1.0, -1)
            try:
                return [
                    await entry.client.generate(p, params, request_id=str(i), deadline_seconds=60)
                    for i, p in enumerate(prompts)
                ]
            finally:
                await self.pool.release(entry)

        return self.pool.loop.run(each())

    def update(self, folder: Path, version: int) -> None:
        (control,) = self.pool.controls()
        control.pause(deadline_seconds=60)
        control.update_from_disk(str(folder), version, deadline_seconds=60)
        control.resume(deadline_seconds=60)
        self.pool.commit(version, [(control.server_id, control.generation)])


def gaps(server: Quantized, forward: QuantizedForward, plain: QuantizedForward) -> tuple[np.ndarray, np.ndarray]:
    """Largest |server - by hand| of each sequence, and mean |server - unquantized| of it, in nats."""
    rng = np.random.default_rng(len(server.model.name))
    firsts = rng.permutation(np.arange(3, 500))[:NUM_SEQUENCES]  # no two share a prefix that the cache would have
    prompts = [(int(first), *map(int, rng.integers(3, 500, PROMPT - 1))) for first in firsts]
    found = []
    for prompt, completion in zip(prompts, server.sample(prompts), strict=True):
        tokens = [*prompt, *completion.token_ids]
        by_hand, unquantized = (
            model.log_probs(tokens, num_prompt_tokens=PROMPT)[PROMPT - 1 :] for model in (forward, plain)
        )
        got = np.array(completion.log_probs)
        found.append((np.abs(got - by_hand).max(), np.abs(got - unquantized).mean()))
    return tuple(np.array(found).T)


def agrees(server: Quantized, model: Path, quantization: str, cache_fp8: bool) -> None:
    """A value on the edge between two codes falls to either side by the last bit of float32, in about an eighth of these
    sequences (20 000 values, each with a chance of 2 x 3e-7 / 0.09), and its log-probs then differ by a code's step. So
    most sequences agree to float32, and all of them together differ by a small part of what quantization does.
    """
    forward = QuantizedForward(model, quantization, cache_fp8)
    error, effect = gaps(server, forward, QuantizedForward(model, "none"))
    assert (error <= CLOSE).mean() > 0.5, error
    assert error.mean() < 0.1 * effect.mean(), (error, effect)
    assert effect.min() > 100 * CLOSE, "every sequence shows that the server quantized"


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[Path, Path]:
    """A MoE and its next weights."""
    folder = tmp_path_factory.mktemp("quantized")
    model = make_model(folder / "moe", moe=True, sizes=IN_BLOCKS)
    return model, perturb(model, folder / "next", seed=3)


def test_blocks_and_an_fp8_cache(models, tmp_path):
    model, later = models
    blocks, later_blocks = write_blocks(model, tmp_path / "blocks"), write_blocks(later, tmp_path / "later")
    server = Quantized(tmp_path, model, blocks, quantization="fp8_block", kv_cache="fp8")
    try:
        assert server.registration.precision == (
            "fp32 activations, e4m3 weights in 128 x 128 blocks, quantized by the trainer, e4m3 cache"
        )
        agrees(server, model, "fp8_block", cache_fp8=True)
        server.update(later_blocks, 1)
        agrees(server, later, "fp8_block", cache_fp8=True)
    finally:
        server.close()


def test_quantized_while_loading(models, tmp_path):
    model, later = models
    server = Quantized(tmp_path, model, model, quantization="fp8")
    try:
        assert "quantized by the server while it loads, fp32 cache" in server.registration.precision
        agrees(server, model, "fp8", cache_fp8=False)
        server.update(later, 1)
        agrees(server, later, "fp8", cache_fp8=False)
        (control,) = server.pool.controls()
        (before,) = control.checksums(deadline_seconds=60)
        assert "model.layers.0.mlp.experts.w13_weight_scale" in before
        assert "model.layers.0.mlp.gate.weight_scale" not in before and "lm_head.weight_scale" not in before
        server.update(model, 2)
        (after,) = control.checksums(deadline_seconds=60)
        same = {name for name in before if before[name] == after[name]}
        assert before.keys() == after.keys() and not same, "every tensor moved"
    finally:
        server.close()

"""With `engine.batch_invariant` the real server's log-probs are the trainer's to the last bit, in fp32 and in bf16.

Two data-parallel ranks learn, publish, and score what the server sampled: prompts and responses of many lengths, in
whatever batches the server made of them, with its cache of prefixes on, and in the trainer's packs.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "distributed"))
from rank_pool import RankPool
from servers import Serve, run_config
from test_agreement_trainer import LEARNT_STEPS, Side

from gspo_mega.cpu.sglang_hooks import INVARIANT_ATTENTION_BACKEND, has_gpu

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed"),
    pytest.mark.skipif(has_gpu(), reason="engine.batch_invariant is for machines without a GPU only"),
]


@pytest.fixture(scope="module")
def ranks():
    pool = RankPool(2)
    yield pool
    pool.close()


class Served:
    """A server of its own, in the form in which a `Side` takes one."""

    def __init__(self, folder: Path, model: Path, precision: str) -> None:
        self.config_path = run_config(
            folder,
            model,
            precision=precision,
            engine={"batch_invariant": True},
            rollout={"max_new_tokens": 64, "max_concurrent_requests": 64},
            server={"log_level": "info", "start_deadline_seconds": 1200.0},
        )
        self.serve = Serve(self.config_path, folder / "run", forked=True)
        self.attempt = self.serve.attempt


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_log_probs_are_equal_to_the_last_bit(precision, ranks, dense_model, tmp_path):
    server = Served(tmp_path, dense_model, precision)
    try:
        server.serve.wait_for("ready")
        assert f"'attention_backend': '{INVARIANT_ATTENTION_BACKEND}'" in server.serve.log()
        side = Side(ranks, server, {}, tmp_path / "weights", prompts_per_step=40)
        try:
            side.learn(LEARNT_STEPS)
            side.publish("disk")
            for temperature in (1.0, 0.7):
                agreement = side.roll_out(temperature)
                assert agreement.num_compared == agreement.num_tokens >= 4_000
                assert agreement.largest_gap == 0.0, agreement
            # What is equal is what these weights make of the tokens: other weights are seen.
            side.learn(1)
            assert side.roll_out(1.0).largest_gap > 0
        finally:
            side.close()
    finally:
        server.serve.stop()

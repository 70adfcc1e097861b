"""A policy published as adapters: a real server computes with them what the trainer does, and with each version's own."""

from __future__ import annotations

import importlib.util

import pytest
from agreement_rule import LOG_PROB_TOLERANCE
from conftest import _running
from test_agreement_trainer import RankPool, Side
from tiny_models import make_model

pytestmark = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed")

SECTIONS = {"lora": {"rank": 4, "alpha": 8.0}, "publish": {"lora": "adapter"}}
LAYOUTS = {"dense": {"tensor": 2}, "moe": {"expert": 2}}


@pytest.mark.parametrize("kind", LAYOUTS)
def test_server_and_trainer_agree_on_every_version_of_the_adapters(tmp_path, kind):
    model = make_model(tmp_path / "model", moe=kind == "moe", sizes={"num_hidden_layers": 2})
    rollout = {"max_new_tokens": 32, "return_routed_experts": kind == "moe"}
    server = _running(tmp_path, model, rollout, forked=True, **SECTIONS)
    ranks = RankPool(2)
    try:
        side = Side(ranks, server, LAYOUTS[kind], tmp_path / "weights")
        for _ in range(2):
            side.learn(2)
            # The trainer has gone on: what the server holds is not its policy.
            if side.version:
                assert side.roll_out(1.0).largest_gap > 10 * LOG_PROB_TOLERANCE
            folder = side.publish("disk")
            agreement = side.roll_out(1.0)
            assert agreement.num_tokens >= 5_000
            assert agreement.problems() == [], agreement
            assert sorted(file.name for file in folder.iterdir()) == [
                "adapter_config.json",
                "adapter_model.safetensors",
            ]
        side.close()
    finally:
        ranks.close()
        server.serve.stop()

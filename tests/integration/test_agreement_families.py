"""The other families on the whole road: Hugging Face -> Megatron's files -> Hugging Face -> a real server, and a
trainer before it.

The server starts from what came back from a conversion, is published to by both methods with every tensor verified, and
gives every sampled token the trainer's log-prob. What "the same" means is `agreement_rule.py`.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
from conftest import _running
from converted_models import MODELS, make_converted_model
from test_agreement_trainer import RankPool, Side

from gspo_mega.models.families import FAMILIES

pytestmark = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed")


# A server computes of these nothing that it does not compute of others here. With GSPO_ALL_FAMILIES=1 they run, too.
LEFT_OUT = () if os.environ.get("GSPO_ALL_FAMILIES") else ("glm4_moe_lite", "mistral")


@pytest.mark.parametrize("name", [name for name in MODELS if name not in LEFT_OUT])
def test_server_and_trainer_agree_after_publishing_by_both_methods(name, tmp_path):
    _, _, parallel = MODELS[name]
    rollout = {"max_new_tokens": 64} | (
        {"return_routed_experts": True} if FAMILIES[MODELS[name][0]].experts is not None else {}
    )
    server = _running(tmp_path, make_converted_model(tmp_path, name), rollout, forked=True)
    ranks = RankPool(2)
    try:
        side = Side(ranks, server, parallel, tmp_path / "weights")
        for method in ("disk", "distributed"):
            side.learn(2)
            side.publish(method)
            agreement = side.roll_out(1.0)
            assert agreement.num_tokens >= 10_000
            assert agreement.problems() == [], agreement
        side.close()
    finally:
        ranks.close()
        server.serve.stop()

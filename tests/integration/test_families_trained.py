"""Families through the whole command, from a folder as published ones are. `tests/soak/families_trained.py` tries all."""

from __future__ import annotations

import importlib.util

import pytest
from family_runs import train
from safetensors.torch import load_file

pytestmark = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed")


@pytest.mark.parametrize("variant", ["llama2", "deepseek_v3", "gpt_oss"])
def test_two_steps_of_a_family(tmp_path, variant):
    train(tmp_path, variant, forked=True)


def test_two_steps_of_stacked_experts_through_the_servers_routes(tmp_path):
    """Delta nets, experts that lie in stacks in the folder, in what servers are sent and in the run's `hf`, and a vision
    tower, which only the folder and the run's `hf` have.
    """
    routes = "rollout.return_routed_experts=true", "moe.routing_replay=R3"
    lines = train(tmp_path, "qwen3_5_moe_vl-stacked", *routes, forked=True)
    # Weights are random and routers close to a tie, but the trainer goes through the servers' experts.
    assert max(line["mismatch/abs_log_ratio_max"] for line in lines) < 1e-5, lines
    (exported,) = (tmp_path / "runs").rglob("hf")
    start, end = (load_file(folder / "model.safetensors") for folder in (tmp_path / "model", exported))
    assert {name: tensor.shape for name, tensor in start.items()} == {name: t.shape for name, t in end.items()}
    assert "model.language_model.layers.0.mlp.experts.gate_up_proj" in end
    same = {name for name, tensor in start.items() if tensor.equal(end[name])}
    assert same == {name for name in start if name.startswith("model.visual.")} != set()

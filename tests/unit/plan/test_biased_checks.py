"""What gpt-oss cannot be used with is named before anything starts; what it can, is planned."""

from pathlib import Path

import pytest

from gspo_mega.base.errors import PlanError
from gspo_mega.plan import estimate, plan_run, render_report

SHAPE = Path(__file__).parents[3] / "configs" / "models" / "gpt_oss_20b.json"
EIGHT = ("cluster.ranks_per_node=8", "cluster.gpus_per_node=8", "parallel={tensor: 2, expert: 8}")


@pytest.mark.parametrize(
    ("device", "overrides", "text"),
    [
        ("cpu", ["precision=fp8"], "precision: fp8: gpt_oss has been tried with Megatron's plain layers only"),
        ("gpu", ["precision=bf16"], "engine.transformer_engine: left out, which on a GPU means true"),
        (
            "cpu",
            ["precision=bf16", "engine.transformer_engine=true"],
            "engine.transformer_engine: true: Transformer Engine's attention with sinks",
        ),
        ("cpu", ["server.attention_backend=torch_native"], "torch_native without GPUs: none of SGLang's backends"),
        (
            "cpu",
            ["cluster.ranks_per_node=2", "parallel={tensor: 2, expert_tensor: 2}"],
            "parallel.expert_tensor: 2: Megatron adds the biases of experts once for each rank",
        ),
        ("cpu", ["engine.fuse_activation=true"], "engine.fuse_activation: true: Megatron's fused activation"),
        ("cpu", ["lora={rank: 4, alpha: 8}"], "lora: set with gpt_oss: adapters on its biased layers"),
        (
            "cpu",
            ["server.quantization=fp8"],
            "server.quantization: fp8 with gpt_oss: this package has no quantised form",
        ),
        ("cpu", ["server.quantization=fp8_block"], "server.quantization: fp8_block with gpt_oss"),
    ],
)
def test_what_has_not_been_tried_is_named(load, device, overrides, text):
    with pytest.raises(PlanError) as refused:
        plan_run(load(*overrides), device, SHAPE)
    assert text in str(refused.value)


def test_on_gpus_it_is_planned_with_megatrons_plain_layers(load):
    plan = plan_run(load(*EIGHT, "precision=bf16", "engine.transformer_engine=false"), "gpu", SHAPE)
    report = render_report(plan, estimate(plan))
    assert "20.9 G parameters, 4.19 G active per token" in report
    assert "12 of 24 layers attend to the last 128 tokens" in report


def test_other_models_have_no_such_limits(load, shape):
    plan = plan_run(load("precision=bf16"), "gpu", shape("moe"))
    assert "attend to the last" not in render_report(plan, estimate(plan))

"""What the optimizer's memory settings need of a machine: every branch, and who asks before anything is built."""

import pytest

from gspo_mega.base.errors import PlanError
from gspo_mega.config.schema import Optimizer
from gspo_mega.plan import plan_run
from gspo_mega.plan.validate_precision import optimizer_problems


@pytest.mark.parametrize(
    ("settings", "has_gpu", "has_fused_adam", "said"),
    [
        ({}, False, False, {}),
        (dict(moments_dtype="bf16"), True, True, {}),
        (dict(moments_dtype="bf16"), False, False, {"optimizer.moments_dtype": "engine.transformer_engine: true"}),
        (dict(moments_dtype="bf16"), False, True, {}),
        (dict(moments_dtype="fp8"), True, False, {"optimizer.moments_dtype": "install transformer-engine"}),
        (dict(cpu_offload_fraction=0.5), True, False, {}),
        (dict(cpu_offload_fraction=0.5), False, False, {"optimizer.cpu_offload_fraction": "no GPU to move"}),
        (dict(overlap=True), False, False, {}),
    ],
)
def test_what_a_machine_lacks(settings, has_gpu, has_fused_adam, said):
    problems = dict(optimizer_problems(Optimizer(lr=1.0, **settings), has_gpu, has_fused_adam))
    assert problems.keys() == said.keys()
    assert all(said[key] in text for key, text in problems.items())


@pytest.mark.parametrize(
    ("override", "key", "valid"),
    [
        ("optimizer.moments_dtype=bf16", "optimizer.moments_dtype", "fp32"),
        ("optimizer.cpu_offload_fraction=0.25", "optimizer.cpu_offload_fraction", "0"),
    ],
)
def test_a_plan_for_machines_without_gpu_refuses(load, shape, override, key, valid):
    loaded = load("precision=bf16", override)
    with pytest.raises(PlanError, match=f"{key}: .*; nearest valid: {valid}$"):
        plan_run(loaded, "cpu", shape("dense"))
    plan_run(loaded, "gpu", shape("dense"))
    plan_run(loaded, None, shape("dense"))


@pytest.mark.parametrize("overrides", [["precision=fp8"], ["precision=bf16", "engine.transformer_engine=true"]])
def test_small_moments_come_with_transformer_engine_on_a_cpu(load, shape, overrides):
    loaded = load("optimizer.moments_dtype=fp8", *overrides)
    assert plan_run(loaded, "cpu", shape("dense")).config.optimizer.moments_dtype == "fp8"

"""What is fused, in the plan's words, and what is refused there."""

import pytest

from gspo_mega.base.errors import PlanError
from gspo_mega.plan import plan_run, render_report

BF16, TE = "precision=bf16", "engine.transformer_engine=true"
GPU = (
    "fused: activation (by default on a GPU), permutation (by default on a GPU), weight gradient (by default on a GPU)"
)


@pytest.mark.parametrize(
    ("kind", "overrides", "device", "lines"),
    [
        ("moe", [BF16], "gpu", [GPU]),
        (
            "moe",
            [BF16],
            None,
            [f"on GPUs: {GPU}", "without GPUs: not fused: activation (without a GPU only if asked), "],
        ),
        (
            "dense",
            [BF16],
            "gpu",
            ["fused: activation (by default on a GPU), weight", "not fused: permutation (no expe"],
        ),
        (
            "moe",
            ["precision=fp32"],
            "gpu",
            ["fused: activation (by default on a GPU); not fused: permutation (Megatron's"],
        ),
        ("moe", [BF16, "engine.fuse_activation=false"], "gpu", ["; not fused: activation (engine.fuse_activation)"]),
        ("moe", [BF16, TE, "engine.fuse_permutation=true"], "cpu", ["engine   fused: permutation (engine.fuse_perm"]),
        (
            "moe",
            [BF16, "cluster.ranks_per_node=2", "parallel={expert: 2, expert_dispatcher: deepep}"],
            "gpu",
            [GPU, "experts' tokens by deepep (parallel.expert_dispatcher)"],
        ),
    ],
)
def test_the_plan_names_what_is_fused_and_why(load, shape, kind, overrides, device, lines):
    report = render_report(plan_run(load(*overrides), device, shape(kind)))
    for line in lines:
        assert line in report


DEEPEP = "parallel={expert: 2, expert_dispatcher: deepep}"
PLAIN = "there is no such operation in Megatron's plain layers; nearest valid: leave it out (null)"


@pytest.mark.parametrize(
    ("kind", "overrides", "device", "text"),
    [
        (
            "dense",
            [BF16, "engine.fuse_permutation=true"],
            "gpu",
            "engine.fuse_permutation: true, but the model (qwen3) has no experts; nearest valid: leave it out (null)",
        ),
        ("moe", ["precision=fp32", "engine.fuse_permutation=true"], None, PLAIN),
        ("moe", [BF16, "engine.fuse_weight_gradient=true"], "cpu", PLAIN),
        (
            "dense",
            [BF16, "parallel.expert_dispatcher=deepep"],
            "gpu",
            "expert_dispatcher: deepep, but the model (qwen3) has no experts; nearest valid: alltoall",
        ),
        ("moe", [BF16, DEEPEP], "cpu", "deepep without GPUs: DeepEP consists of GPU kernels; nearest valid: alltoall"),
        ("moe", ["precision=fp32", DEEPEP], "gpu", "deepep with precision fp32: DeepEP moves bf16 numbers; nearest"),
        (
            "moe",
            [BF16, "parallel.expert_dispatcher=hybridep"],
            "gpu",
            "hybridep with expert 1 and expert_tensor 1: no other rank has experts; nearest valid: alltoall",
        ),
    ],
)
def test_what_cannot_be_fused_or_sent_is_refused(load, shape, kind, overrides, device, text):
    ranks = 2 if DEEPEP in overrides else 1
    with pytest.raises(PlanError) as error:
        plan_run(load(*overrides, f"cluster.ranks_per_node={ranks}"), device, shape(kind))
    assert text in str(error.value)


def test_what_a_gpu_could_fuse_is_not_refused_where_the_device_is_unknown(load, shape):
    plan_run(load(BF16, "engine.fuse_weight_gradient=true"), None, shape("moe"))

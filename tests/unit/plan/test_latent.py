"""The plan for a model of DeepSeek-V3's kind: what does not divide, what a rank and a server hold, what is shown."""

from dataclasses import replace
from pathlib import Path

import pytest

from gspo_mega.base.errors import PlanError
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.models.tensors import count_parameters
from gspo_mega.plan import estimate, plan_run, render_report
from gspo_mega.plan.activations import layer_activations
from gspo_mega.plan.memory import GIB, server_memory
from gspo_mega.plan.state import ModelShares

SHAPES = Path(__file__).parents[3] / "configs" / "models"


@pytest.fixture
def plan(load, shape, tmp_path):
    """A plan of the tiny shape, or of DeepSeek-V3's own, with changes to its config.json."""

    def planned(*overrides, model="certify_mla", **changes):
        import json

        file = tmp_path / "shape.json"
        file.write_text(json.dumps(json.loads((SHAPES / f"{model}.json").read_text()) | changes))
        return plan_run(load(*overrides), "cpu" if model == "certify_mla" else None, file)

    return planned


@pytest.mark.parametrize(
    ("overrides", "changes", "text"),
    [
        (
            ["cluster.ranks_per_node=3", "parallel={tensor: 3, expert_tensor: 3}"],
            {},
            "parallel.tensor: 3 does not divide the model's attention heads 4, intermediate size 128, shared experts' intermediate size 32",
        ),
        (
            ["cluster.ranks_per_node=2", "parallel={tensor: 2, expert: 2}"],
            dict(intermediate_size=129),
            "parallel.tensor: 2 does not divide the model's intermediate size 129",
        ),
        (
            ["server.tensor=4", "publish.verify=replicas"],
            dict(intermediate_size=126),
            "server.tensor: 4 does not fit the model's 4 heads, 4 key-value heads and intermediate size 2",
        ),
        (
            ["cluster.ranks_per_node=3", "parallel.pipeline=3"],
            {},
            "parallel.pipeline: 3 does not divide the model's 4 layers",
        ),
        (["precision=fp8", "fp8.recipe=blockwise"], {}, "kv_lora_rank + qk_rope_head_dim 40"),
    ],
)
def test_what_does_not_divide_is_named(plan, overrides, changes, text):
    with pytest.raises(PlanError) as refused:
        plan(*overrides, **changes)
    assert text in str(refused.value)


def test_context_parallelism_and_the_expert_bias_are_planned(plan):
    assert (
        plan("cluster.ranks_per_node=2", "parallel.context=2", "moe.expert_bias_update_rate=1e-3").layout.context == 2
    )


def test_layers_for_multi_token_prediction_are_named(plan):
    assert not any("num_nextn_predict_layers" in notice for notice in plan().notices)
    (notice,) = [n for n in plan(num_nextn_predict_layers=1).notices if "num_nextn_predict_layers" in n]
    assert notice.startswith("num_nextn_predict_layers 1: layers for multi-token prediction are neither loaded")


def test_the_ranks_of_a_layout_hold_the_model_and_nothing_of_the_bias(plan):
    """Tensor 2 x expert 2: everything cut once, but norms, routers and down-projections, which both tensor ranks
    have.
    """
    found = plan("cluster.ranks_per_node=2", "parallel={tensor: 2, expert: 2}", vocab_size=512)
    spec = found.spec
    a_layer = 2 * 64 + 24 + 32 + (24 + 32 + 8) * 64
    copied = 4 * a_layer + 3 * 16 * 64 + 64
    total = count_parameters(spec).total - 3 * 16  # the biases
    for rank in range(2):
        held = ModelShares(spec).state(found.config, found.layout, 0).of_rank(rank).parameters
        assert 2 * held == total + copied


def test_a_dense_layer_keeps_what_dense_layers_keep(plan):
    on = ["cluster.gpu_memory_gib=80", "precision=bf16"]
    one, two = (plan(*on, first_k_dense_replace=k) for k in (1, 2))
    dense, experts = (
        layer_activations(one.config, one.spec, one.layout, "gpu", has_experts=kind) for kind in (False, True)
    )
    assert dense.attention == experts.attention and dense.mlp != experts.mlp
    assert layer_activations(one.config, one.spec, one.layout, "gpu") == experts
    kept = [estimate(of).memory.parts["activations"] for of in (one, two)]
    assert kept[0] - kept[1] == pytest.approx(one.config.batch.micro_batch_tokens * (experts.mlp - dense.mlp), abs=1)


def test_a_server_caches_latents(load):
    """DeepSeek-V3 at tensor 8: 61 x 576 bf16 elements a token on every GPU."""
    spec = read_model_spec(SHAPES / "deepseek_v3.json")
    config = load("server.tensor=8", "precision=bf16", "publish.verify=replicas").config
    memory = server_memory(config, spec, 0, 80 * GIB)
    assert memory.cache // memory.cache_tokens == 61 * 576 * 2
    heads = server_memory(config, replace(spec, latent=None), 0, 80 * GIB)
    assert memory.cache_tokens > 3 * heads.cache_tokens


def test_the_report_of_deepseek_v3(plan):
    """256 GPUs: pipeline 1 because 61 is a prime number."""
    overrides = (
        "cluster={num_nodes: 32, ranks_per_node: 8, gpu: H200, num_rollout_nodes: 4}",
        "parallel={tensor: 8, expert: 64, expert_tensor: 1}",
        "precision=bf16",
        "batch={prompts_per_step: 64, group_size: 8, micro_batch_tokens: 8192}",
        "server={tensor: 16, num_nodes: 2, num_servers: 2}",
        "publish={verify: replicas, deadline_seconds: 900}",
        "recompute.granularity=full",
    )
    found = plan(*overrides, model="deepseek_v3")
    report = render_report(found, estimate(found))
    assert (
        "deepseek_v3: 61 layers, hidden 7168, 128 heads x 192 (128 key-value), vocabulary 129280 (padded 129280)"
        in report
    )
    assert (
        "latents of 1536 (query) and 512 (key and value), 256 experts of 2048, 8 per token, shared 2048, intermediate"
        " 18432 in the first 3 layers" in report
    )
    assert "671 G parameters, 37.6 G active per token" in report
    figures = estimate(found)
    assert figures.time is not None and figures.time.total > 0
    # 6 FLOPs a weight and token trained on, and 2 for the old pass: the matrices of the estimate are those of the
    # count.
    assert figures.flops_per_token == pytest.approx(2 * 36.6e9, rel=0.02)

"""What gpt-oss, and models with other norms or windows, cannot be used with is named before anything starts; what it can, is planned."""

import json
from pathlib import Path

import pytest

from gspo_mega.base.errors import PlanError
from gspo_mega.models.families import FAMILIES
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
            "engine.transformer_engine: true: Transformer Engine's layers with sinks and windows",
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


@pytest.mark.parametrize(
    ("family", "keys", "overrides", "text"),
    [
        (
            "minimax_m2",
            {},
            ["precision=bf16", "engine.transformer_engine=true"],
            "layers with norms over all heads have",
        ),
        ("olmo3", {}, ["precision=fp8"], "precision: fp8: olmo3 has been tried with Megatron's plain layers only"),
        ("olmo3", {}, ["server.attention_backend=torch_native"], "was tried with windows and norms over all heads"),
        (
            "olmo3",
            {},
            ["lora={rank: 4, alpha: 8}", "publish.lora=adapter"],
            "publish.lora: adapter, and the model (olmo3) has norms of outputs: no server",
        ),
        ("mistral", {}, ["train.num_steps=1"], "server.context_tokens: SGLang 0.5.23 attends to everything in mistral"),
        ("mistral", {}, ["server.context_tokens=25", "train.num_steps=1"], "its window is of 24 tokens"),
    ],
)
def test_what_has_not_been_tried_with_other_norms_and_windows_is_named(load, tmp_path, family, keys, overrides, text):
    with pytest.raises(PlanError) as refused:
        plan_run(load(*overrides), "cpu", shape_of(tmp_path, family, keys))
    assert text in str(refused.value)


@pytest.mark.parametrize("keys", [{"sliding_window": None}, {"sliding_window": 128}])
def test_a_window_that_never_acts_is_none(load, tmp_path, keys):
    plan = plan_run(load("train.num_steps=1"), "cpu", shape_of(tmp_path, "mistral", keys))
    assert plan.spec.window is None


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_an_estimate(load, tmp_path, family):
    from family_models import VARIANTS

    variant = next(name for name, (of, _) in VARIANTS.items() if of == family)
    widths = dict.fromkeys(("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"), 64)
    own = {key: width for key, width in widths.items() if key in VARIANTS[variant][1]}
    plan = plan_run(load("cluster.ranks_per_node=2", "parallel={pipeline: 2}"), "cpu", shape_of(tmp_path, variant, own))
    assert plan.spec.family == family and "ranks    2" in render_report(plan, estimate(plan))


def shape_of(folder, variant, keys):
    from family_models import VARIANTS, variant_config

    raw = variant_config(variant, **{"intermediate_size": 64} | keys).to_dict()
    raw["architectures"] = [FAMILIES[VARIANTS[variant][0]].architecture]
    (folder / "shape.json").write_text(json.dumps(raw))
    return folder / "shape.json"


def test_on_gpus_it_is_planned_with_megatrons_plain_layers(load):
    plan = plan_run(load(*EIGHT, "precision=bf16", "engine.transformer_engine=false"), "gpu", SHAPE)
    report = render_report(plan, estimate(plan))
    assert "20.9 G parameters, 4.19 G active per token" in report
    assert "12 of 24 layers attend to the last 128 tokens" in report


def test_other_models_have_no_such_limits(load, shape):
    plan = plan_run(load("precision=bf16"), "gpu", shape("moe"))
    assert "attend to the last" not in render_report(plan, estimate(plan))

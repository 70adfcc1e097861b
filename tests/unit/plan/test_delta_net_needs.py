"""The plan for models with gated delta nets: what they cost, and what they cannot be used with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from published_qwen3_5 import SIZES, qwen3_5, text_model

from gspo_mega.base.errors import PlanError
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.models.tensors import (
    attention_crossover_tokens,
    count_parameters,
    forward_flops_per_token,
    hf_tensors,
)
from gspo_mega.plan import estimate, plan_run, render_report
from gspo_mega.plan.activations import layer_activations
from gspo_mega.plan.memory import server_memory
from gspo_mega.plan.state import ModelShares, state_bytes
from gspo_mega.plan.validate_delta import validate_delta_nets

SHAPES = Path(__file__).parents[3] / "configs" / "models"
SMALL, LARGE = SHAPES / "certify_qwen3_next.json", SHAPES / "qwen3_next_80b.json"
WIDE = dict(intermediate_size=64, moe_intermediate_size=32)
PLAIN = ("precision=bf16", "engine.transformer_engine=false")


def test_flops_by_hand():
    spec = read_model_spec(LARGE)
    counts = count_parameters(spec)
    vectors = sum(entry.num_elements for entry in hf_tensors(spec) if len(entry.shape) == 1)
    matrices = 2 * (counts.active - counts.embedding - vectors)
    # Of 32 heads in 36 layers: the state read twice and written once, and chunks of 64 with 65 / 2 positions on average.
    rule = 36 * 32 * (6 * 128 * 128 + 2 * (3 * 128 + 2 * 128) * 65 / 2)
    assert forward_flops_per_token(spec, 1) == pytest.approx(matrices + rule + 12 * 2 * 16 * 512)
    # Only the 12 layers with attention cost more for a longer sequence.
    longer = forward_flops_per_token(spec, 4097) - forward_flops_per_token(spec, 1)
    assert longer == pytest.approx(12 * 2 * 16 * 512 * 2048)
    crossover = attention_crossover_tokens(spec)
    assert forward_flops_per_token(spec, crossover) == pytest.approx(2 * (matrices + rule), rel=1e-3)


def test_a_server_caches_only_layers_with_attention_and_keeps_room_for_states(load):
    spec, config = read_model_spec(LARGE), load("precision=bf16").config
    memory = server_memory(config, spec, count_parameters(spec).total, 640 * 2**30)
    room = int(640 * 2**30 * config.server.memory_fraction) - memory.weights
    assert memory.cache_tokens == int(room / 1.9) // (2 * 12 * 2 * 256 * 2)


def test_a_layer_is_planned_with_the_larger_of_both_kinds(load):
    plan = plan_run(load(*PLAIN), "gpu", LARGE)
    both = layer_activations(plan.config, plan.spec, plan.layout, "gpu")
    without = layer_activations(plan.config, replace(plan.spec, delta=None), plan.layout, "gpu")
    # The projection's rows for every token: q, k, v and z in bf16 before and after the convolution, and copies.
    assert both.attention > without.attention > 0
    assert both.attention > 2 * (2 * 8192 + 2 * 4096 + 3 * 4096)
    assert both.mlp == without.mlp


def test_the_report_says_what_the_model_is(load):
    plan = plan_run(load(*PLAIN, "cluster.ranks_per_node=8", "parallel={tensor: 2, expert: 8}"), "gpu", LARGE)
    report = render_report(plan, estimate(plan))
    assert "gated delta nets in 36 layers (16 x 128 keys, 32 x 128 values)" in report
    assert "79.7 G parameters, 3.87 G active per token" in report


@pytest.mark.parametrize(
    ("device", "overrides", "text"),
    [
        (
            "cpu",
            ["cluster.ranks_per_node=2", "parallel={tensor: 2, expert: 2, sequence: false}"],
            "parallel.sequence: false with tensor 2: Megatron does not add up",
        ),
        (
            "cpu",
            ["cluster.ranks_per_node=8", "parallel={context: 8}"],
            "parallel.context: 8 does not divide the 4 key heads of gated delta nets on a tensor rank",
        ),
        ("cpu", ["server.quantization=fp8", "train.num_steps=1"], "server.quantization: fp8 with qwen3_next"),
        (
            "cpu",
            ["server.quantization=fp8_block"],
            "gated delta nets' key size (heads x head size) 32, gated delta nets' value size (heads x head size) 96",
        ),
        (
            "cpu",
            ["lora={rank: 4, alpha: 8}", "publish.lora=adapter"],
            "publish.lora: adapter, and the model (qwen3_next) has gated delta nets",
        ),
        (
            "cpu",
            ["lora={rank: 4, alpha: 8, targets: [conv1d]}"],
            "no linear layer 'conv1d'; valid: in_proj_qkvz, in_proj_ba, out_proj, gate_proj,",
        ),
        ("cpu", ["publish.verify_all_every=3"], "publish.verify_all_every: 3: servers also hold 1 + the weight"),
        ("cpu", ["engine.batch_invariant=true"], "engine.batch_invariant: true, and the model is qwen3_next"),
    ],
)
def test_what_cannot_be_is_named(load, device, overrides, text):
    with pytest.raises(PlanError) as refused:
        plan_run(load(*overrides), device, SMALL)
    assert text in str(refused.value)


WIDE_FP8 = SHAPES / "certify_fp8_qwen3_5.json"


def test_fp8_needs_whole_sides_of_a_ranks_share(load, tmp_path):
    """Queries, keys, values and gates of delta nets and the input of the output projection, on each rank; what Megatron
    multiplies together, betas and alphas too, in the whole."""

    def said(*overrides: str, **sizes) -> str:
        (file := tmp_path / "shape.json").write_text(json.dumps(json.loads(WIDE_FP8.read_text()) | sizes))
        with pytest.raises(PlanError) as refused:
            plan_run(load("precision=fp8", *overrides), "cpu", file)
        return str(refused.value)

    plan_run(load("precision=fp8", "cluster.ranks_per_node=2", "parallel={tensor: 2}"), "cpu", WIDE_FP8)
    assert "gated delta nets' value size 520" in said(linear_num_value_heads=4, linear_value_head_dim=130)
    narrow = said("cluster.ranks_per_node=2", "parallel={tensor: 2}", linear_value_head_dim=1)
    assert "gated delta nets' query, key, value and gate size 544 / 2 ranks" not in narrow  # 272 = 17 x 16
    assert "gated delta nets' value size 16 / 2 ranks" in narrow
    text = said("fp8.recipe=mxfp8", linear_num_value_heads=8)
    assert "gated delta nets' projection, with betas and alphas, 1040" in text and "gate size" not in text
    # The gate of attention counts: 8 x 40 query rows with gates and 4 x 40 of keys and values are 480 on two ranks.
    assert "query, gate, key and value size 120 / 2 ranks" in said(
        "cluster.ranks_per_node=2", "parallel={tensor: 2}", head_dim=10
    )


@pytest.mark.parametrize("size", ["80b", "0.8B"])
def test_published_models_are_planned_in_fp8(load, tmp_path, size):
    """On eight tensor ranks, too, where betas and alphas of a rank are 8 rows, which FP8 could not multiply."""
    file = tmp_path / "shape.json"
    raw = json.loads(LARGE.read_text()) if size == "80b" else text_model(qwen3_5(size))
    file.write_text(json.dumps(raw))
    layout = "parallel={tensor: 8, expert: 8}" if raw.get("num_experts") else "parallel={tensor: 8}"
    eight = ("precision=fp8", "cluster.ranks_per_node=8", layout, "batch.micro_batch_tokens=1024")
    plan_run(load(*eight, "fp8.recipe=blockwise", "train.num_steps=1"), "gpu", file)


def test_fp8_copies_of_delta_nets_are_planned(load):
    """Both orientations of every weight that FP8 computes; the input projection is never stored in FP8 only."""

    def bytes_of(*overrides: str):
        plan = plan_run(load("precision=fp8", *overrides), "cpu", WIDE_FP8)
        state = ModelShares(plan.spec).state(plan.config, plan.layout, 0).largest
        return state, state_bytes(plan.config, state)

    state, plain = bytes_of()
    _, stored = bytes_of("fp8.parameters=true", "optimizer.distributed=true")
    delta = 2 * 1568 * 256
    linear = delta + 2 * (256 * 512) + 2 * (768 + 256) * 256 + 4 * 3 * 512 * 256
    assert (state.linear, state.kept) == (linear, delta)
    assert plain.fp8_copies == 2 * linear and stored.fp8_copies == linear + delta
    assert plain.weights - stored.weights == linear - delta


@pytest.mark.parametrize(
    ("shape", "quantization", "stacked", "said"),
    [
        ("certify_fp8_qwen3_5", "fp8", False, None),
        ("certify_fp8_qwen3_5_moe", "fp8_block", False, None),
        ("certify_fp8_qwen3_5_moe", "fp8_block", True, "has a layer's experts in stacks"),
        ("certify_fp8_qwen3_5", "int8", False, "int8 with qwen3_5: "),
        ("certify_qwen3_next", "fp8", False, "fp8 with qwen3_next: "),
    ],
)
def test_quantised_servers_of_delta_nets_are_accepted_where_they_ran(load, shape, quantization, stacked, said):
    spec = replace(read_model_spec(SHAPES / f"{shape}.json"), stacks_experts=stacked)

    def texts(train):
        config = load(train, f"server.quantization={quantization}").config
        return [one.text for one in validate_delta_nets(config, spec) if one.key == "server.quantization"]

    found = texts("train.num_steps=1")
    assert found == [] if said is None else len(found) == 1 and said in found[0]
    assert texts("train={num_steps: 1, from_rollouts: /recorded}") == [], "it has no servers"


def test_a_plan_for_gpus_says_that_transformer_engines_layers_have_not_run_there(load):
    def said(device: str, *overrides: str) -> bool:
        plan = plan_run(load("precision=bf16", "cluster.ranks_per_node=2", *overrides), device, SMALL)
        return any("gated delta nets with Transformer Engine's layers" in notice for notice in plan.notices)

    assert said("gpu") and said("gpu", "engine.transformer_engine=true")
    assert not said("gpu", "engine.transformer_engine=false") and not said("cpu", "engine.transformer_engine=true")


@pytest.mark.parametrize("size", SIZES)
def test_every_published_size_is_planned(load, tmp_path, size):
    """As a text model, and as published: a rank holds the same weights."""
    layout = "parallel={tensor: 8, expert: 8}" if "-A" in size else "parallel={tensor: 8}"
    file, states = tmp_path / "shape.json", []
    for raw in (text_model(qwen3_5(size)), qwen3_5(size)):
        file.write_text(json.dumps(raw))
        plan = plan_run(load(*PLAIN, "cluster.ranks_per_node=8", layout, "train.num_steps=1"), "gpu", file)
        figures = estimate(plan)
        assert "gated delta nets in" in render_report(plan, figures)
        states.append(figures.states)
        file.unlink()
    assert states[0] == states[1]


@pytest.mark.parametrize("shape", ["certify_qwen3_5.json", "certify_qwen3_next.json", "certify_qwen3_5_moe.json"])
def test_servers_are_sent_merged_adapters_only(load, shape):
    plan_run(load("lora={rank: 4, alpha: 8}"), "cpu", SHAPES / shape)
    with pytest.raises(
        PlanError, match="publish.lora: adapter, and the model .* has gated delta nets: SGLang's classes"
    ):
        plan_run(load("lora={rank: 4, alpha: 8}", "publish.lora=adapter"), "cpu", SHAPES / shape)


def test_tensor_ranks_divide_the_key_heads(load, tmp_path):
    file = tmp_path / "shape.json"
    file.write_text(json.dumps(json.loads(SMALL.read_text()) | dict(linear_num_key_heads=1, linear_num_value_heads=2)))
    with pytest.raises(PlanError, match="key heads of gated delta nets 1"):
        plan_run(load("cluster.ranks_per_node=2", "parallel={tensor: 2, expert: 2}"), "cpu", file)


def test_irregular_layers_are_refused_because_sglang_cannot_serve_them(load, tmp_path):
    file = tmp_path / "shape.json"
    kinds = ["linear_attention", "full_attention", "full_attention", "linear_attention"]
    file.write_text(json.dumps(json.loads(SMALL.read_text()) | dict(layer_types=kinds)))
    with pytest.raises(PlanError, match="SGLang can have attention only in every n-th layer"):
        plan_run(load("train.num_steps=1"), "cpu", file)


@pytest.mark.parametrize("variant", ["qwen3_5_vl", "qwen3_vl_moe"])
def test_a_plan_names_the_vision_tower_and_its_bytes(load, tmp_path, variant):
    from family_models import make_family_folder
    from safetensors.torch import load_file

    folder = make_family_folder(tmp_path / "model", variant, **WIDE)
    tower = [t for name, t in load_file(folder / "model.safetensors").items() if name.startswith("model.visual.")]
    held = sum(t.numel() * t.element_size() for t in tower)
    plan = plan_run(load("train.num_steps=1"), "cpu", folder)
    said = f"(the vision tower; {len(tower)} tensors, {held / 1e9:.3g} GB) are neither loaded nor trained nor published"
    assert [said in notice for notice in plan.notices if "model.visual.*" in notice] == [True] and held > 10_000
    (folder / "model.safetensors").unlink()
    plan = plan_run(load("train.num_steps=1"), "cpu", folder)
    assert any("model.visual.*" in notice and "if it has any" in notice for notice in plan.notices)


def test_what_servers_of_a_vision_language_class_cannot_be(load, tmp_path):
    from family_models import variant_config

    file = tmp_path / "shape.json"
    raw = variant_config("qwen3_vl", intermediate_size=64).to_dict() | {
        "architectures": ["Qwen3VLForConditionalGeneration"]
    }
    file.write_text(json.dumps(raw))
    with pytest.raises(
        PlanError, match="server.quantization: int8 with qwen3_vl: quantised servers of vision-language"
    ):
        plan_run(load("train.num_steps=1", "server.quantization=int8"), "cpu", file)
    plan_run(load("train={num_steps: 1, from_rollouts: /recorded}", "server.quantization=int8"), "cpu", file)
    with pytest.raises(PlanError, match="algorithm: ppo with qwen3_vl: a critic is saved as a classifier"):
        plan_run(load("train={num_steps: 1, from_rollouts: /recorded}", "algorithm=ppo"), "cpu", file)
    with pytest.raises(PlanError, match="publish.lora: adapter, and the model .qwen3_vl. has a vision tower"):
        plan_run(load("train.num_steps=1", "lora={rank: 4, alpha: 8}", "publish.lora=adapter"), "cpu", file)

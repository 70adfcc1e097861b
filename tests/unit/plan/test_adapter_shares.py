"""Adapters in a plan: counts by hand, what is frozen, and what a model has no adapters for."""

from dataclasses import replace
from pathlib import Path

import pytest

from gspo_mega.base.errors import PlanError
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.plan import resolve_layout
from gspo_mega.plan.state import (
    ModelShares,
    has_reference,
    num_adapter_parameters,
    state_bytes,
    trained_parameters,
)
from gspo_mega.plan.validate import validate_lora

MODELS = Path(__file__).parents[3] / "configs/models"
LORA = "lora={rank: 4, alpha: 8, targets: [q_proj, v_proj, o_proj]}"
# The quickstart's dense model: 3 layers, hidden 64, 4 x 16 heads, 2 key-value.
HALVES = 3 * 4 * ((64 + 64) + (64 + 32) + (64 + 64))
UNUSED_ROWS = 3 * 4 * 32  # of B in the fused q, k and v: k has no adapter


def test_a_rank_holds_the_model_frozen_and_adapters_trained(load, shape):
    config = load(LORA, "optimizer.distributed=false", "precision=bf16").config
    spec = read_model_spec(shape("dense"))
    shares = ModelShares(spec)
    state = shares.state(config, resolve_layout(config, spec), 0).of_rank(0)
    whole = shares.state(config.model_copy(update={"lora": None}), resolve_layout(config, spec), 0).of_rank(0)
    assert num_adapter_parameters(config.lora, spec) == trained_parameters(config.lora, spec, 10**9) == HALVES
    assert (state.frozen, state.optimized) == (whole.parameters, HALVES + UNUSED_ROWS)
    assert state.parameters == state.frozen + state.optimized and state.gradients == state.optimized
    size = state_bytes(config, state)
    assert (size.weights, size.gradients, size.main) == (2 * state.parameters, *[4 * state.optimized] * 2)
    assert size.moments == 8 * state.optimized


def test_tensor_ranks_share_rows_of_b_and_columns_of_a(load, shape):
    spec = read_model_spec(shape("dense"))

    def optimized(ranks):
        sizes = (f"cluster.ranks_per_node={ranks}", f"parallel.tensor={ranks}")
        config = load(LORA, "optimizer.distributed=false", *sizes).config
        return ModelShares(spec).state(config, resolve_layout(config, spec), 0).of_rank(0).optimized

    replicated = 3 * 4 * (64 + 64 + 64)  # A of q and v, B of o
    assert optimized(1) - optimized(2) == (HALVES + UNUSED_ROWS - replicated) // 2


def test_a_reference_is_a_second_model_only_if_it_has_a_folder(load):
    kl = ("algorithm=grpo", "kl.coefficient=0.1")
    assert has_reference(load(*kl).config) and not has_reference(load(LORA, *kl).config)
    assert has_reference(load(LORA, *kl, "kl.reference_path=other").config)


@pytest.mark.parametrize(
    ("kind", "overrides", "said"),
    [
        (
            "dense",
            ["lora={rank: 4, alpha: 8, targets: [w1]}"],
            "has no linear layer 'w1'; valid: q_proj, k_proj, v_proj",
        ),
        (
            "moe",
            ["lora={rank: 4, alpha: 8}", "cluster.ranks_per_node=2", "parallel={tensor: 2, expert_tensor: 2}"],
            "an expert's adapter is whole on its rank; to leave experts without adapters, set `lora.targets:"
            " [q_proj, k_proj, v_proj, o_proj]`",
        ),
        (
            "moe",
            ["lora={rank: 4, alpha: 8, targets: [q_proj, down_proj]}", "publish.lora=adapter"],
            "has experts with adapters: SGLang computes them only if gate_proj and down_proj are both in lora.targets",
        ),
    ],
)
def test_what_the_model_has_no_adapters_for_is_refused(load, shape, kind, overrides, said):
    with pytest.raises(PlanError) as error:
        resolve_layout(load(*overrides).config, read_model_spec(shape(kind)))
    assert said in str(error.value)


def test_adapters_of_experts_and_of_attention_are_served_where_a_server_was_compared(load, shape):
    spec = read_model_spec(shape("moe"))
    for targets in ("[]", "[q_proj, v_proj]", "[gate_proj, down_proj]"):
        config = load(f"lora={{rank: 4, alpha: 8, targets: {targets}}}", "publish.lora=adapter").config
        resolve_layout(config, spec)
    config = load("lora={rank: 4, alpha: 8}", "publish.lora=adapter").config
    others = {
        "experts: servers with adapters were compared": replace(spec, family="mixtral", qk_norm=False),
        "latent attention: SGLang applies the adapters of kv_b_proj": read_model_spec(MODELS / "certify_mla.json"),
    }
    for said, other in others.items():
        (found,) = validate_lora(config, other)
        assert said in found.text

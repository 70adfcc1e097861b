"""Adapters in every layout are those of one rank: gradients, three optimizer steps, merged weights."""

from __future__ import annotations

import numpy as np
from family_models import make_family_folder
from layout_models import make_folder
from safetensors.numpy import load_file
from test_layouts import flat, relative

LORA = dict(rank=4, alpha=8.0)
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
# Between them every kind of parallelism; tests/soak/role_layouts.py has more.
DENSE = dict(world=4, tensor=2, pipeline=2)
EXPERTS = dict(world=4, context=2, expert=2, distributed=True)
COPIED = dict(world=2, tensor=2, expert=2)
CONTEXT = dict(world=2, context=2)


def test_adapters_equal_those_of_one_rank(rank_pools, tmp_path):
    compare(rank_pools, make_folder(tmp_path / "dense", moe=False, layers=2), DENSE)


def test_adapters_of_experts_equal_those_of_one_rank(rank_pools, tmp_path):
    compare(rank_pools, make_folder(tmp_path / "moe", moe=True, layers=2), EXPERTS)


def test_adapters_of_latent_attention_equal_those_of_one_rank(rank_pools, tmp_path):
    compare(rank_pools, make_family_folder(tmp_path / "latent", "deepseek_v3"), COPIED, targets=LATENT)


# In fp32 layouts would differ by more than the tolerance on some processors: delta nets amplify what it rounds.
def test_adapters_beside_gated_delta_nets_equal_those_of_one_rank(rank_pools, tmp_path):
    compare(
        rank_pools, make_family_folder(tmp_path / "delta", "qwen3_5"), dict(world=2, tensor=2), CONTEXT, exactly=True
    )


def compare(rank_pools, folder, *layouts, targets=(), exactly=False):
    want = run(rank_pools, folder, dict(world=1), targets, exactly)
    for layout in layouts:
        check(run(rank_pools, folder, layout, targets, exactly), want, folder, tolerance=1e-6 if exactly else 1e-5)


def run(rank_pools, folder, layout, targets=(), exactly=False) -> dict:
    """`exactly`: gradients are those of fp64."""
    parallel = dict(layout)
    world, distributed = parallel.pop("world"), parallel.pop("distributed", False)
    job = dict(folder=str(folder), parallel=parallel, lora={**LORA, "targets": targets})
    ranks = rank_pools(world)
    found = ranks.run("lora_jobs:run", optimizer=dict(lr=1e-3, distributed=distributed), **job)[0]
    if exactly:
        found["gradient"] = ranks.run("lora_jobs:exact_gradients", **job)[0]
    return found


def half_of(name: str, half: str) -> str:
    return f"base_model.model.{name.removesuffix('.weight')}.lora_{half}.weight"


def check(got, want, folder, tolerance=1e-5):
    assert got["first"].keys() == want["first"].keys()
    for name, value in want["first"].items():  # the start does not depend on the layout
        assert np.array_equal(got["first"][name], value), name
        assert (np.abs(value).max() > 0) == ("lora_A" in name)
    assert np.abs(got["log_probs"] - want["log_probs"]).max() < 1e-5
    for name, gradient in want["gradient"].items():
        assert np.abs(gradient).max() > 0, f"{name} has no gradient: the comparison would prove nothing"
        assert relative(got["gradient"][name] - gradient, gradient) < tolerance, name
    assert np.allclose(got["grad_norms"], want["grad_norms"], rtol=1e-5)
    start = load_file(folder / "model.safetensors")
    updates = {name: value - start[name] for name, value in want["merged"].items()}
    error = {name: got["merged"][name] - value for name, value in want["merged"].items()}
    assert relative(flat(error), flat(updates)) < 1e-4
    for name, update in updates.items():
        a, b = (got["adapters"].get(half_of(name, half)) for half in "AB")
        if a is not None:
            assert np.abs(update - 2.0 * b @ a).max() < 1e-6, name  # alpha / rank
    for name, update in updates.items():  # norms, embeddings and head are the model's own, to the bit
        is_adapted = half_of(name, "A") in got["adapters"]
        assert is_adapted == bool(np.any(update)), name
        if not is_adapted:
            assert np.array_equal(got["merged"][name], start[name]), name

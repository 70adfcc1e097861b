"""Adapters on Transformer Engine's layers in bf16: against Megatron's plain layers, layouts against one rank, merged
weights, and a checkpoint that goes from one kind of layer to the other and back.
"""

from __future__ import annotations

import numpy as np
import pytest
from family_models import make_family_folder
from layout_jobs import recorded_sequences
from layout_models import make_folder
from te_noise import EXPERT_GRADIENT_NOISE, GRADIENT_NOISE, LOG_PROB_NOISE, flat, relative

LORA = dict(rank=4, alpha=8.0)
TE, PLAIN = dict(transformer_engine=True), dict(transformer_engine=False)
# Latent attention only: few tokens reach each of that model's experts, and none some of them.
TARGETS = {"latent": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")}
# Between them every kind of parallelism, sequence parallelism included.
LAYOUTS = {
    "TP2+SP": ("dense", dict(world=2, tensor=2)),
    "CP2": ("dense", dict(world=2, context=2)),
    "PP2xTP2+SP": ("dense", dict(world=4, tensor=2, pipeline=2)),
    "EP2": ("moe", dict(world=2, expert=2)),
    "TP2+SPxEP2": ("moe", dict(world=2, tensor=2, expert=2)),
    "PP2xEP2": ("moe", dict(world=4, pipeline=2, expert=2)),
    "latent TP2+SPxEP2": ("latent", dict(world=2, tensor=2, expert=2)),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    made = {kind: make_folder(root / kind, moe=kind == "moe", layers=2) for kind in ("dense", "moe")}
    return {kind: str(folder) for kind, folder in made.items()} | {
        # Experts in the last layer only: no router after it can choose otherwise.
        "latent": str(make_family_folder(root / "latent", "deepseek_v3", first_k_dense_replace=3))
    }


@pytest.fixture(scope="module")
def computed(rank_pools, models):
    """What a layout computes before any step, with random halves; each thing once."""
    known: dict = {}

    def compute(kind: str, engine: dict, *, targets=None, world: int = 1, recompute=None, **parallel) -> dict:
        key = repr((kind, engine, targets, world, recompute, parallel))
        if key not in known:
            lora = {**LORA, "targets": TARGETS.get(kind, ()) if targets is None else targets}
            job = dict(folder=models[kind], parallel=parallel, steps=0, lora=lora)
            sections = {} if recompute is None else dict(recompute=recompute)
            optimizer = dict(lr=1e-3, distributed=False)
            known[key] = rank_pools(world, transformer_engine=True).run(
                "lora_jobs:run", precision="bf16", engine=engine, optimizer=optimizer, **job, **sections
            )[0]
        return known[key]

    return compute


def per_token(got: dict, want: dict) -> np.ndarray:
    """The mean difference of each sequence's log-probs, nats."""
    lengths = [int(sequence["mask"].sum()) for sequence in recorded_sequences()]
    differences = np.split(got["log_probs"] - want["log_probs"], np.cumsum(lengths)[:-1])
    return np.array([abs(part.mean()) for part in differences if len(part)])


def same_to_bf16(got: dict, want: dict) -> None:
    assert got["gradient"].keys() == want["gradient"].keys()
    assert per_token(got, want).max() < LOG_PROB_NOISE
    assert relative(flat(got["gradient"]), flat(want["gradient"])) < GRADIENT_NOISE
    for name, gradient in want["gradient"].items():
        assert np.abs(gradient).max() > 0, f"{name} has no gradient: the comparison would prove nothing"
        noise = EXPERT_GRADIENT_NOISE if ".experts." in name else 2 * GRADIENT_NOISE
        assert relative(got["gradient"][name], gradient) < noise, name
    for name, value in want["merged"].items():
        assert np.array_equal(got["merged"][name], value), name


@pytest.mark.parametrize("kind", ["dense", "moe", "latent"])
def test_adapters_are_those_of_plain_layers(computed, kind):
    """A's gradient shows that an adapter multiplies the normed input: without the norm it would be another one."""
    plain, engine = computed(kind, PLAIN), computed(kind, TE)
    same_to_bf16(engine, plain)
    assert not any(name.startswith("TE") for name in plain["linears"])
    assert all(name.startswith("TE") and "Norm" not in name for name in engine["linears"])
    assert ("TEColumnParallelGroupedLinear" in engine["linears"]) == (kind != "dense")


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_layers_without_adapters_are_those_of_plain_layers(computed, kind):
    """With a norm that no adapter needs, and experts that have none in one of their two products."""
    targets = ("o_proj", "down_proj")
    same_to_bf16(computed(kind, TE, targets=targets), computed(kind, PLAIN, targets=targets))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_one_rank(computed, layout):
    kind, parallel = LAYOUTS[layout]
    same_to_bf16(computed(kind, TE, **parallel), computed(kind, TE))


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_recomputed_layers_give_the_same_gradient_to_the_bit(computed, kind):
    want = computed(kind, TE)["gradient"]
    got = computed(kind, TE, recompute=dict(granularity="full", num_layers=1))["gradient"]
    assert all(np.array_equal(got[name], gradient) for name, gradient in want.items())


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_fused_operations_change_no_adapter(computed, kind):
    """With those that a GPU fuses by default."""
    fused = TE | dict(fuse_activation=True) | (dict(fuse_permutation=True) if kind == "moe" else {})
    same_to_bf16(computed(kind, fused), computed(kind, TE))


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_the_model_without_adapters_is_the_reference(rank_pools, models, kind):
    sections = dict(precision="bf16", engine=TE, lora=LORA)
    found = rank_pools(1, transformer_engine=True).run(
        "lora_jobs:own_base", folder=models[kind], parallel={}, **sections
    )[0]
    assert found["starts_as_base"] and found["stands_still"]
    assert found["moved"] > 1e-3
    assert found["norms"][0] == 0 < found["norms"][1] < found["norms"][2]


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_a_checkpoint_goes_to_the_other_layers_and_back(rank_pools, models, tmp_path, kind):
    """In another layout each time. What it holds does not change, to the bit."""
    common = dict(folder=models[kind], lora=LORA, precision="bf16")
    narrow, wide = {"dense": ({}, dict(tensor=2, pipeline=2)), "moe": (dict(expert=2), dict(expert=2, pipeline=2))}[
        kind
    ]

    def run(plan: list[str], engine: dict, folder: str, parallel: dict) -> dict:
        pool = rank_pools(4 if parallel is wide else 2, transformer_engine=True)
        job = dict(run_dir=str(tmp_path / folder), plan=plan, engine=engine, parallel=parallel)
        return pool.run("checkpoint_jobs:run", **job, **common)[0]["weights"]

    for first, second in ((PLAIN, TE), (TE, PLAIN)):
        folder = "from_te" if first is TE else "from_plain"
        written = run(["start", "train", "save"], first, folder, narrow)
        read = run(["start", "load"], second, folder, wide)
        assert all(np.array_equal(read[name], value) for name, value in written.items())
        started = run(["start"], second, folder, wide)
        assert any(not np.array_equal(started[name], value) for name, value in written.items())

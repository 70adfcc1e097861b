"""Counts by hand, and the parts of Megatron's arithmetic that no small layout reaches: buckets, FP8, offloading."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.plan import resolve_layout
from gspo_mega.plan.state import ModelShares, Share, State, _Buffer, state_bytes

# The quickstart's dense model: hidden 64, 4 x 16 heads, 2 key-value, intermediate 128, vocabulary 512.
ATTENTION = 64 * 64 + 2 * 32 * 64 + 64 * 64 + 2 * 16
LAYER = ATTENTION + 3 * 64 * 128 + 2 * 64


def share(elements, own_bucket=False):
    return Share("x", elements, expert_data=False, own_bucket=own_bucket, linear=True)


def test_one_rank_holds_the_whole_model(load, shape):
    config, spec = load("optimizer.distributed=false").config, read_model_spec(shape("dense"))
    state = ModelShares(spec).state(config, resolve_layout(config, spec), 0).of_rank(0)
    assert state == State(
        parameters=2 * 512 * 64 + 3 * LAYER + 64,
        linear=3 * (ATTENTION - 32 + 3 * 64 * 128),
        padding=0,
        optimized=state.parameters,
    )


def test_tied_embeddings_are_on_both_ends_of_a_pipeline(load, shape):
    config = load("cluster.ranks_per_node=3", "parallel.pipeline=3", "optimizer.distributed=false").config
    spec = read_model_spec(shape("dense", tie_word_embeddings=True))
    layout, shares = resolve_layout(config, spec), ModelShares(spec)
    held = [shares.state(config, layout, stage).of_rank(stage).parameters for stage in range(3)]
    assert held == [LAYER + 512 * 64, LAYER, LAYER + 512 * 64 + 64]


def test_virtual_stages_take_layers_in_turns(load, shape):
    config = load("cluster.ranks_per_node=2", "parallel={pipeline: 2, virtual_pipeline: 2}").config
    spec = read_model_spec(shape("dense", num_hidden_layers=4))
    chunks = ModelShares(spec).chunks(resolve_layout(config, spec), 1)
    layers = [
        sorted({int(s.name.split(".")[2]) for s in chunk if s.name.startswith("decoder.layers")}) for chunk in chunks
    ]
    assert layers == [[1], [3]]


def test_a_buffer_pads_starts_and_ends():
    # From the back: 100 at 0, 50 at 128, ends at 178, rounded to lcm(3, 128) = 384.
    buffer = _Buffer([share(50), share(100)], 3, None, distributed=True)
    assert (buffer.num_elements, buffer.end) == (150, 384)
    assert [buffer.owned(rank) for rank in range(3)] == [100, 50, 0]
    plain = _Buffer([share(50), share(100)], 3, None, distributed=False)
    assert (plain.end, plain.owned(2)) == (150, 150)


def test_a_full_bucket_and_tied_embeddings_start_another():
    assert _Buffer([share(100), share(100)], 2, 100, distributed=True).end == 256
    assert _Buffer([share(100), share(100)], 2, 101, distributed=True).end == 256  # 100 at 128, ends at 228
    assert _Buffer([share(10), share(10), share(10)], 2, 1000, distributed=True).end == 256  # at 0, 64 and 128
    tied = _Buffer([share(10), share(10, own_bucket=True), share(10)], 2, None, distributed=True)
    assert tied.end == 3 * 128
    assert [tied.owned(rank) for rank in range(2)] == [30, 0]


def test_overlap_makes_buckets_on_the_first_stage(load, shape):
    spec = replace(read_model_spec(shape("dense")), hidden_size=4096, intermediate_size=16384, vocab_size=1000)
    ends = []
    for overlap in ("false", "true"):
        config = load("cluster.ranks_per_node=7", "batch.num_mini_batches=1", f"optimizer.overlap={overlap}").config
        ends.append(ModelShares(spec).state(config, resolve_layout(config, spec), 0).of_rank(0))
    assert ends[0].parameters == ends[1].parameters and ends[0].padding < ends[1].padding


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["precision=fp32"], dict(weights=4000, main=0, moments=4000, fp8_copies=0, padding=80)),
        (["precision=bf16"], dict(weights=2000, main=2000, moments=4000, fp8_copies=0, padding=60)),
        (["precision=bf16", "optimizer.moments_dtype=bf16"], dict(weights=2000, main=2000, moments=2000, padding=60)),
        (
            ["precision=bf16", "optimizer.gradients_dtype=bf16"],
            dict(weights=2000, main=2000, gradients=2000, padding=40),
        ),
        (["precision=fp8"], dict(weights=2000, main=2000, fp8_copies=1200)),
        (["precision=fp8", "fp8.parameters=true"], dict(weights=1400, fp8_copies=600)),
        (["precision=bf16", "algorithm=grpo", "kl.coefficient=0.1"], dict(weights=2000, reference=2000)),
        (["precision=fp8", "algorithm=grpo", "kl.coefficient=0.1"], dict(weights=2000, reference=2600)),
        (
            ["precision=fp8", "fp8.parameters=true", "algorithm=grpo", "kl.coefficient=0.1"],
            dict(weights=1400, reference=1400),
        ),
        # A quarter of main weights and moments, and of gradients in fp32.
        (["precision=bf16", "optimizer.cpu_offload_fraction=0.25"], dict(main=1500, moments=3000, offloaded=2000)),
    ],
)
def test_bytes(load, overrides, expected):
    size = state_bytes(load(*overrides).config, State(parameters=1000, linear=600, padding=10, optimized=500))
    assert {name: getattr(size, name) for name in expected} == expected
    assert size.gradients == expected.get("gradients", 4000)


@pytest.mark.parametrize("distributed", [True, False])
def test_megatrons_own_theoretical_formula(load, distributed):
    """training/theoretical_memory_usage.py of Megatron-LM: 18 bytes a parameter, or 6 + 12 / data-parallel size, of the
    most loaded stage; here for Llama-3-70B, whose numbers it was written for. It leaves out padding.
    """
    spec = read_model_spec(Path(__file__).parents[3] / "configs" / "models" / "llama3_70b.json")
    config = load(
        "precision=bf16",
        "cluster={num_nodes: 8, ranks_per_node: 8}",
        "parallel={tensor: 4, pipeline: 4}",
        "batch.num_mini_batches=1",
        f"optimizer.distributed={str(distributed).lower()}",
    ).config
    layers, hidden, tensor, pipeline, data = 80, 8192, 4, 4, 4
    gqa, gated = 8 / 64, 3 / 2
    in_layers = (
        2 * layers * hidden * hidden * ((1 + gqa) * 1 + 28672 / hidden * gated + 1 / hidden + 1 / (layers * hidden))
    )
    theirs = (in_layers / pipeline + 128256 * hidden) / tensor * (6 + 12 / data if distributed else 18)
    ours = state_bytes(config, ModelShares(spec).state(config, resolve_layout(config, spec), 0).largest).on_device
    assert ours == pytest.approx(theirs, rel=1e-3)


def test_the_most_that_a_rank_owns_is_the_largest_of_all_ranks():
    rng, padded = random.Random(0), 0
    for _ in range(150):
        sizes = [rng.choice([1, rng.randint(1, 300), 64 * rng.randint(1, 40)]) for _ in range(rng.randint(1, 30))]
        shares = [Share("x", size, False, rng.random() < 0.15, False) for size in sizes]
        buffer = _Buffer(shares, rng.choice([1, 2, 3, 8, 64]), rng.choice([None, 500, 3000]), rng.random() < 0.95)
        owned = [buffer.owned(rank) for rank in range(buffer.num_ranks)]
        assert buffer.most_owned() == max(owned)
        padded += max(owned) < buffer.end // buffer.num_ranks
    assert padded > 50, "padding that no rank is without was not tried"

"""The search, and what it says of layouts that others have published. Rates are those of `gpus.py`, fixed
beforehand.
"""

import json
from pathlib import Path

import pytest

from gspo_mega.base.errors import ConfigError, PlanError
from gspo_mega.config import load_config
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.plan.memory import in_flight
from gspo_mega.plan.search import parse_grid, render_block, render_search, search_layouts

SHAPES = Path(__file__).parents[3] / "configs" / "models"


def test_a_grid():
    assert parse_grid("4x8") == (4, 8)
    for wrong in ("4", "x8", "0x8", "4x8x2", "4 x 8"):
        with pytest.raises(ConfigError, match="nodes x GPUs per node, for example 4x8"):
            parse_grid(wrong)


def test_ranking_reasons_and_block(load, shape, tmp_path):
    loaded = load("precision=bf16", "cluster.gpu=H100")
    search = search_layouts(loaded.config, read_model_spec(shape("moe")), 1, 4)
    assert len(search.fitting) > 4 and search.too_large == []
    assert [c.seconds for c in search.fitting] == sorted(c.seconds for c in search.fitting)
    assert len({c.name for c in search.fitting}) == len(search.fitting)
    assert search.refused["parallel.expert"] > 0  # tensor 2 with expert 1 among them
    text = render_search(search)
    assert f"{len(search.fitting)} layouts fit 79 GiB (H100)" in text
    assert "\nrefused: " in text and f"parallel.expert {search.refused['parallel.expert']}" in text
    best = search.fitting[0]
    block = tmp_path / "best.yaml"
    lines = [line for line in loaded.text.splitlines() if not line.startswith("cluster")]
    block.write_text("\n".join([*lines, render_block(best.config)]))
    again = load_config(block).config
    assert (
        again.parallel == best.config.parallel.model_copy()
        and again.recompute.granularity == best.config.recompute.granularity
    )
    assert again.cluster.ranks_per_node == 4


def test_what_does_not_fit_and_what_cannot_run(load, shape):
    spec = read_model_spec(shape("dense"))
    small = search_layouts(load("precision=bf16", "cluster.gpu_memory_gib=1").config, spec, 1, 2)
    assert small.fitting == [] and len(small.too_large) > 1
    assert f"{len(small.too_large)} do not fit; the smallest of them" in render_search(small)
    with pytest.raises(PlanError, match=r"no layout on 1 x 64 GPUs can run; refused by .*batch.num_mini_batches"):
        search_layouts(
            load("batch.num_mini_batches=32").config, read_model_spec(shape("dense", num_hidden_layers=1)), 1, 64
        )


def test_stages_of_unequal_numbers_of_layers_are_tried(load, shape):
    """61 layers, a prime number as DeepSeek-V3 has: more than one stage only where the last or both ends are lighter."""
    found = search_layouts(load("precision=bf16").config, read_model_spec(shape("dense", num_hidden_layers=61)), 1, 8)
    layers = {c.layout.pipeline: c.layout.stage_layers for c in found.fitting}
    assert layers[2] == (31, 30) and layers[4] == (15, 16, 16, 14) and layers[8] == (7, 8, 8, 8, 8, 8, 8, 6)
    (eight,) = (c for c in found.fitting if c.layout.pipeline == 8 and c.config.recompute.granularity == "none")
    assert (
        "pipeline: 8\n  first_stage_layers: 7\n  last_stage_layers: 6" in render_block(eight.config)
        and "(7..6 layers)" in eight.name
    )


def published(load, model, grid, *overrides):
    config = load("precision=bf16", "cluster.gpu=H100", "optimizer.overlap=true", *overrides).config
    return search_layouts(config, read_model_spec(model), *grid)


def fastest_of(search, recompute="none", **sizes):
    """The fastest candidate of these sizes, whether it fits or not."""
    candidates = [c for c in search.fitting + search.too_large if c.config.recompute.granularity == recompute]
    return min(
        (c for c in candidates if all(getattr(c.layout, k) == v for k, v in sizes.items())), key=lambda c: c.seconds
    )


def test_qwen3_30b_on_four_nodes(load):
    """NeMo-RL's grpo-qwen3-30ba3b-4n8g: TP1 PP1 EP8, 4096 tokens, 64 x 32 trajectories. Its time is within 15 % of the
    best, and without recomputation it fits, as theirs does (whose gradients are bf16, which leaves it more room).
    """
    search = published(
        load,
        SHAPES / "qwen3_30b_a3b.json",
        (4, 8),
        "batch={prompts_per_step: 64, group_size: 32, micro_batch_tokens: 4096}",
        "data.max_prompt_tokens=512",
        "rollout.max_new_tokens=3584",
    )
    theirs = fastest_of(search, tensor=1, pipeline=1, context=1, expert=8)
    assert theirs.seconds < 1.15 * search.fitting[0].seconds
    assert 0.9 * search.memory_bytes < theirs.memory.peak < search.memory_bytes


def test_llama3_70b_on_eight_nodes(load):
    """NeMo 24.12's performance summary, 64 H100: TP4 PP4 CP2 VP5, 8192 tokens, 128 sequences a step. Its time is within
    15 % of the best, and without recomputation it fits, as theirs does.

    Both fuse the gate, its SiLU and their product (`engine.fuse_activation`). Unfused, a layer keeps two tensors of the
    intermediate size more, and it would not fit.
    """
    search = published(
        load,
        SHAPES / "llama3_70b.json",
        (8, 8),
        "batch={prompts_per_step: 64, group_size: 8, micro_batch_tokens: 8192}",
        "data.max_prompt_tokens=1024",
        "rollout.max_new_tokens=7168",
    )
    theirs = fastest_of(search, tensor=4, pipeline=4, context=2, virtual_pipeline=5)
    assert theirs.seconds < 1.15 * search.fitting[0].seconds
    assert 0.85 * search.memory_bytes < theirs.memory.peak < search.memory_bytes
    layers = in_flight(theirs.layout, 0, 100) * len(theirs.layout.chunk_layers(0)[0])
    assert theirs.memory.peak + 2 * 2 * 28672 / 4 * 8192 / 2 * layers > search.memory_bytes


def test_qwen3_235b_on_thirty_two_nodes(load, tmp_path):
    """NeMo-RL's grpo-qwen3-235b-32n8g: TP2 PP8 CP2 EP16 with recomputation, 8192 tokens, 16 x 32 trajectories in one
    step. Their 94 layers, 11 of them on each end stage, count as 96: the embedding and the head as one each.

    A miss, stated and not tuned away: its time is nearly twice the best's. Nearly all of that is its expert groups,
    which reach over two nodes: Megatron's all-to-all sends a token to each of its 8 experts, 4 of them on the other
    node. With expert groups of 8, inside a node, the same layout is within 25 % of the best; the rest is recomputation.
    """
    shape = tmp_path / "shape.json"
    shape.write_text(json.dumps(json.loads((SHAPES / "qwen3_235b_a22b.json").read_text()) | {"num_hidden_layers": 96}))
    search = published(
        load,
        shape,
        (32, 8),
        "batch={prompts_per_step: 16, group_size: 32, num_mini_batches: 1, micro_batch_tokens: 8192}",
        "data.max_prompt_tokens=1024",
        "rollout.max_new_tokens=7168",
        "algorithm=grpo",
        "kl={coefficient: 0.01}",
    )
    sizes, best = dict(tensor=2, pipeline=8, context=2, virtual_pipeline=None), search.fitting[0]
    theirs, inside = fastest_of(search, "full", expert=16, **sizes), fastest_of(search, "full", expert=8, **sizes)
    assert theirs.memory.peak < search.memory_bytes
    assert 1.8 * best.seconds < theirs.seconds < 2.1 * best.seconds
    assert 1.15 * best.seconds < inside.seconds < 1.25 * best.seconds
    assert theirs.time.training["exchange"] > 3.5 * inside.time.training["exchange"]

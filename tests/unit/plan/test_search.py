"""The search, and what it says of layouts that others have published. Rates are those of `gpus.py`, fixed beforehand."""

from pathlib import Path

import pytest

from gspo_mega.config import load_config
from gspo_mega.errors import ConfigError, PlanError
from gspo_mega.model.huggingface import read_model_spec
from gspo_mega.plan.search import parse_grid, render_block, render_search, search_layouts

SHAPES = Path(__file__).parents[3] / "configs" / "models"


def test_a_grid():
    assert parse_grid("4x8") == (4, 8)
    for wrong in ("4", "x8", "0x8", "4x8x2", "4 x 8"):
        with pytest.raises(ConfigError, match="nodes x GPUs a node, for example 4x8"):
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
    assert again.parallel == best.config.parallel.model_copy() and again.recompute.granularity == best.config.recompute.granularity
    assert again.cluster.ranks_per_node == 4


def test_what_does_not_fit_and_what_cannot_run(load, shape):
    spec = read_model_spec(shape("dense"))
    small = search_layouts(load("precision=bf16", "cluster.gpu_memory_gib=1").config, spec, 1, 2)
    assert small.fitting == [] and len(small.too_large) > 1
    assert f"{len(small.too_large)} do not fit; the smallest of them" in render_search(small)
    with pytest.raises(PlanError, match=r"no layout on 1 x 64 GPUs can run; refused by .*batch.num_mini_batches"):
        search_layouts(load("batch.num_mini_batches=32").config, spec, 1, 64)


def published(load, model, grid, *overrides):
    config = load("precision=bf16", "cluster.gpu=H100", *overrides).config
    return search_layouts(config, read_model_spec(SHAPES / f"{model}.json"), *grid)


def slower_than_best(search, recompute="none", **sizes):
    """How much slower than the fastest that fits is this layout, and its memory over the GPU's."""
    candidates = [c for c in search.fitting + search.too_large if c.config.recompute.granularity == recompute]
    found = [c for c in candidates if all(getattr(c.layout, k) == v for k, v in sizes.items())]
    fastest = min(found, key=lambda c: c.seconds)
    return fastest.seconds / search.fitting[0].seconds - 1, fastest.memory.peak / search.memory_bytes


def test_qwen3_30b_on_four_nodes(load):
    """NeMo-RL's grpo-qwen3-30ba3b-4n8g: TP1 PP1 EP8, 4096 tokens, 64 x 32 trajectories. Its time is within 15 % of the best.

    A miss, stated and not tuned away: without recomputation a pack of 4096 tokens is estimated at 5 % more than the
    GPU has, while theirs is reported to run.
    """
    search = published(
        load, "qwen3_30b_a3b", (4, 8), "batch={prompts_per_step: 64, group_size: 32, micro_batch_tokens: 4096}",
        "data.max_prompt_tokens=512", "rollout.max_new_tokens=3584",
    )  # fmt: skip
    slower, memory = slower_than_best(search, tensor=1, pipeline=1, context=1, expert=8)
    assert slower < 0.15
    assert 1.0 < memory < 1.1


def test_llama3_70b_on_eight_nodes(load):
    """NeMo 24.12's performance summary, 64 H100: TP4 PP4 CP2 VP5, 8192 tokens, 128 sequences a step. Its time is within 15 % of
    the best; its memory without recomputation is estimated 3 % above the GPU's, a miss like the one above."""
    search = published(
        load, "llama3_70b", (8, 8), "batch={prompts_per_step: 64, group_size: 8, micro_batch_tokens: 8192}",
        "data.max_prompt_tokens=1024", "rollout.max_new_tokens=7168",
    )  # fmt: skip
    slower, memory = slower_than_best(search, tensor=4, pipeline=4, context=2, virtual_pipeline=5)
    assert slower < 0.15
    assert 1.0 < memory < 1.1


def test_qwen3_235b_on_thirty_two_nodes(load):
    """NeMo-RL's grpo-qwen3-235b-32n8g: TP2 PP8 CP2 EP16. 94 layers on 8 stages of uneven size are not to be had here; the
    nearest is PP2. Within 15 % of the best that recomputes, as theirs does."""
    search = published(
        load, "qwen3_235b_a22b", (32, 8), "batch={prompts_per_step: 64, group_size: 32, micro_batch_tokens: 8192}",
        "data.max_prompt_tokens=1024", "rollout.max_new_tokens=7168",
    )  # fmt: skip
    slower, memory = slower_than_best(search, "full", tensor=2, pipeline=2, context=2, expert=16)
    assert memory < 1
    alike = next(c for c in search.fitting if c.config.recompute.granularity == "full")
    assert (1 + slower) * search.fitting[0].seconds / alike.seconds < 1.15
    # The miss: recomputation is theirs for their uneven stages' sake, and layouts that fit without it come out faster.
    assert 0.15 < slower < 0.35

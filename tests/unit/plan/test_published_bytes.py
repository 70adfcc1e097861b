"""Sizes of published versions and of servers' weights by the precision that servers hold."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gspo_mega.config import load_config
from gspo_mega.models.block_fp8 import quantization_config
from gspo_mega.models.huggingface import spec_from_config
from gspo_mega.models.spec import BlockFp8
from gspo_mega.models.tensors import count_parameters
from gspo_mega.plan import plan_run, render_report
from gspo_mega.plan.disk import disk_use
from gspo_mega.plan.memory import server_memory
from gspo_mega.plan.servers import needs_start_folder, version_bytes, weight_bytes

ROOT = Path(__file__).parents[3]
SPEC = spec_from_config(json.loads((ROOT / "configs/models/qwen3_4b.json").read_text()))
TOTAL = count_parameters(SPEC).total


def configured(precision: str = "bf16", method: str = "disk", **server):
    config = load_config(ROOT / "configs/quickstart.yaml").config
    return config.model_copy(
        update={
            "precision": precision,
            "server": config.server.model_copy(update=server),
            "publish": config.publish.model_copy(update={"method": method}),
        }
    )


@pytest.mark.parametrize("precision, server, size", [("fp32", {}, 4), ("bf16", {}, 2), ("fp32", {"dtype": "bf16"}, 2)])
def test_plain_weights_have_the_servers_precision(precision, server, size):
    config = configured(precision, **server)
    assert (
        version_bytes(config, SPEC, TOTAL) == weight_bytes(config.server, config.precision, SPEC, TOTAL) == size * TOTAL
    )


def test_blocks_take_a_byte_and_a_scale_in_16384():
    """Qwen3-4B: 3.63 G parameters in linear layers, 0.39 G in the embedding."""
    config = configured(quantization="fp8_block")
    embedding = SPEC.vocab_size * SPEC.hidden_size
    norms = SPEC.num_layers * (2 * SPEC.hidden_size + 2 * SPEC.head_dim) + SPEC.hidden_size
    linear = TOTAL - embedding - norms
    assert version_bytes(config, SPEC, TOTAL) == linear + 4 * (linear // 128**2) + 2 * (embedding + norms)
    assert weight_bytes(config.server, config.precision, SPEC, TOTAL) == version_bytes(config, SPEC, TOTAL)


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_what_a_server_quantises_itself_is_sent_plain_and_held_small(kind):
    config = configured(quantization=kind)
    assert version_bytes(config, SPEC, TOTAL) == 2 * TOTAL
    held = weight_bytes(config.server, config.precision, SPEC, TOTAL)
    assert 1.0 < held / version_bytes(configured(quantization="fp8_block"), SPEC, TOTAL) < 1.002


def test_a_server_has_the_more_room_for_its_cache():
    def memory(**server):
        return server_memory(configured(max_total_tokens=None, **server), SPEC, TOTAL, 80 * 2**30)

    plain, blocks = memory(quantization="none"), memory(quantization="fp8_block")
    small = memory(quantization="fp8_block", kv_cache="fp8")
    assert blocks.weights < 0.56 * plain.weights and blocks.cache_tokens > plain.cache_tokens
    assert abs(small.cache_tokens / blocks.cache_tokens - 2) < 1e-3


def test_the_disk_holds_versions_in_the_servers_form_and_the_folder_to_start_from():
    def published(spec=SPEC, **changes) -> int:
        config = configured(**changes)
        use = disk_use(config, spec, TOTAL, 1)
        assert use is not None
        return use.parts.get("published weights", 0)

    keep = configured().publish.keep_last
    size = version_bytes(configured(quantization="fp8_block"), SPEC, TOTAL)
    assert published() == (keep + 1) * 2 * TOTAL
    assert published(quantization="fp8_block") == (keep + 2) * size
    assert published(method="distributed") == 0
    assert published(method="distributed", quantization="fp8_block") == size
    in_blocks = replace(SPEC, stored=BlockFp8())
    assert not needs_start_folder(configured(quantization="fp8_block"), in_blocks)
    assert published(in_blocks, method="distributed") == 2 * TOTAL, "plain servers of a model in blocks"


def test_the_plan_says_that_servers_start_from_a_copy(load, shape):
    def said(kind: str, **changes: object) -> bool:
        loaded = load(f"server.quantization={kind}")
        return "start from a copy of model.path as FP8 blocks" in render_report(
            plan_run(loaded, model=shape("dense", hidden_size=128, intermediate_size=128, **changes))
        )

    blocks = {"quantization_config": quantization_config(BlockFp8())}
    sizes = {"head_dim": 128}
    assert said("fp8_block", **sizes) and not said("fp8_block", **sizes, **blocks) and not said("none")

"""Layers per pipeline stage: as Megatron divides them, whatever the YAML gives the ends."""

from itertools import product

import pytest
import torch
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from gspo_mega.base.errors import PlanError
from gspo_mega.config.schema import Parallel
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.plan import plan_run
from gspo_mega.plan.layout import lighter_ends, stage_layers
from gspo_mega.plan.resolve import layout_of

ENDS = (None, 1, 2, 3, 4)


def megatron_chunks(num_layers, pipeline, virtual, first, last):
    """By stage, the layers of each of its chunks; None where Megatron refuses."""
    if pipeline == 2 and None not in (first, last) and first + last == num_layers:
        last = None  # as the engine says it: Megatron divides by the number of stages in between
    try:
        config = TransformerConfig(
            num_layers=num_layers,
            hidden_size=8,
            num_attention_heads=1,
            pipeline_model_parallel_size=pipeline,
            pipeline_dtype=torch.float32,
            virtual_pipeline_model_parallel_size=virtual,
            num_layers_in_first_pipeline_stage=first,
            num_layers_in_last_pipeline_stage=last,
        )
        places = [
            (stage, chunk) for stage in range(pipeline) for chunk in ([None] if virtual is None else range(virtual))
        ]
        found = {}
        for stage, chunk in places:
            start = get_transformer_layer_offset(config, chunk, stage)
            found.setdefault(stage, []).append(range(start, start + get_num_layers_to_build(config, chunk, stage)))
        # Megatron does not see that a stage is left without layers, or with fewer than none.
        return list(found.values()) if all(chunk for chunks in found.values() for chunk in chunks) else None
    except (ValueError, AssertionError):
        return None


@pytest.mark.parametrize("pipeline", [2, 3, 4])
@pytest.mark.parametrize("virtual", [None, 2])
def test_every_stage_has_the_layers_that_megatron_builds(load, shape, pipeline, virtual):
    tried, kept = 0, 0
    for num_layers, first, last in product(range(2, 15), ENDS, ENDS):
        parallel = Parallel(
            pipeline=pipeline, virtual_pipeline=virtual, first_stage_layers=first, last_stage_layers=last
        )
        ours, theirs = stage_layers(num_layers, parallel), megatron_chunks(num_layers, pipeline, virtual, first, last)
        divided = ours is not None and not any(count % (virtual or 1) for count in ours)
        assert divided == (theirs is not None), (num_layers, first, last, ours, theirs)
        tried += 1
        if theirs is None:
            continue
        kept += 1
        config = load(f"cluster.ranks_per_node={pipeline}").config.model_copy(update={"parallel": parallel})
        layout = layout_of(config, read_model_spec(shape("dense", num_hidden_layers=num_layers)))
        assert [layout.chunk_layers(stage) for stage in range(pipeline)] == theirs
    assert kept > 5 and tried - kept > 5


@pytest.mark.parametrize("num_layers", [3, 13, 36, 61, 94])
@pytest.mark.parametrize("pipeline", [1, 2, 4, 8, 16, 32])
def test_lighter_ends_hold_every_layer(num_layers, pipeline):
    ends = lighter_ends(num_layers, pipeline)
    if ends is None:
        middle = -(-num_layers // pipeline) * (pipeline - 2)
        assert pipeline == 1 or num_layers % pipeline == 0 or num_layers < middle + 2
        return
    layers = stage_layers(num_layers, Parallel.model_validate({"pipeline": pipeline, **ends}))
    assert layers is not None
    assert sum(layers) == num_layers and max(layers) == -(-num_layers // pipeline)
    assert layers[-1] == min(layers), "the last stage has the head besides"


def ranks(n):
    return f"cluster.ranks_per_node={n}"


@pytest.mark.parametrize(
    "overrides, key, text, valid",
    [
        (
            ["parallel.first_stage_layers=1"],
            "parallel.first_stage_layers",
            "has all layers",
            "leave it out (null)",
        ),
        (["parallel.last_stage_layers=3"], "parallel.last_stage_layers", "has all layers", "leave it out (null)"),
        (
            [ranks(2), "parallel={pipeline: 2, first_stage_layers: 1, last_stage_layers: 1}"],
            "parallel.last_stage_layers",
            "the two stages have 2 layers, and the model has 3",
            "last_stage_layers: 1",
        ),
        (
            [ranks(2), "parallel={pipeline: 2, first_stage_layers: 3}"],
            "parallel.first_stage_layers",
            "0 layers are left for the 1 other stages of 2",
            "last_stage_layers: 1",
        ),
        (
            [ranks(2), "parallel={pipeline: 2, virtual_pipeline: 2, first_stage_layers: 2}"],
            "parallel.virtual_pipeline",
            "does not divide the 1 layers of a pipeline stage",
            "leave it out (null)",
        ),
        (
            [ranks(2), "parallel={pipeline: 2, last_stage_layers: 1}", "recompute={granularity: full, num_layers: 2}"],
            "recompute.num_layers",
            "1 or 2 layers of a model chunk",
            "1",
        ),
    ],
)
def test_numbers_that_cannot_be(load, shape, overrides, key, text, valid):
    """Of three layers."""
    with pytest.raises(PlanError) as error:
        plan_run(load(*overrides), model=shape("dense"))
    (line,) = str(error.value).splitlines()
    assert f" {key}: " in line and text in line and line.endswith(f"; nearest valid: {valid}")

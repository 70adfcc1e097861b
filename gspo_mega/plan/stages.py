"""How many layers each pipeline stage has: all alike, or the first and the last stage as the YAML says, as Megatron
divides them.

Owns the arithmetic and its refusals. Stages with fewer layers leave room for the embedding or the head, or make a
number of layers divide that else would not.
"""

from __future__ import annotations

from collections.abc import Iterator

from gspo_mega.base.errors import Violation
from gspo_mega.config.schema import Config, Parallel
from gspo_mega.models.spec import ModelSpec
from gspo_mega.plan.layout_sizes import Sizes
from gspo_mega.plan.model_division import dividing, divisors, given_ends, nearest, stage_layers

_KEYS = ("parallel.first_stage_layers", "parallel.last_stage_layers")


def lighter_ends(num_layers: int, pipeline: int) -> dict[str, int | None] | None:
    """The values of both keys with which `pipeline` stages hold the layers, no stage more than needed, the last one the
    fewest; None where that takes none of its ends, or cannot be done.
    """
    if pipeline < 2 or num_layers % pipeline == 0 or num_layers < pipeline:
        return None
    most = -(-num_layers // pipeline)
    last = num_layers - most * (pipeline - 1)
    if last >= 1 and last >= most - 2:
        return {"first_stage_layers": None, "last_stage_layers": last}
    both = num_layers - most * (pipeline - 2)
    if both < 2:
        return None
    return {"first_stage_layers": both - both // 2, "last_stage_layers": both // 2}


def check_stages(config: Config, spec: ModelSpec, sizes: Sizes) -> Iterator[Violation]:
    """What of `parallel.pipeline` and its keys cannot run, and a block of recomputed layers that does not divide a
    chunk.
    """
    parallel, pipeline = config.parallel, config.parallel.pipeline
    given = [key for key, end in zip(_KEYS, given_ends(parallel), strict=True) if end]
    virtual = parallel.virtual_pipeline
    if pipeline == 1 and (given or virtual is not None):
        for key in given:
            yield Violation(key, "the only pipeline stage has all layers", "leave it out (null)")
        if virtual is not None:
            yield Violation(
                "parallel.virtual_pipeline",
                f"{virtual} chunks per rank need pipeline stages, and pipeline is 1",
                "leave it out (null)",
            )
        return
    layers = stage_layers(spec.num_layers, parallel)
    if layers is None:
        yield from _undivided(given, spec, parallel, sizes)
        return
    kinds = sorted(set(layers))
    if virtual is not None and (odd := [count for count in kinds if count % virtual]):
        choices = [d for d in divisors(kinds[-1]) if d > 1 and not any(count % d for count in kinds)]
        yield Violation(
            "parallel.virtual_pipeline",
            f"{virtual} does not divide the {_words(odd)} layers of a pipeline stage",
            nearest(virtual, choices) or "leave it out (null)",
        )
        return
    chunks = [count // (virtual or 1) for count in kinds]
    block = config.recompute.num_layers
    if config.recompute.granularity == "full" and any(count % block for count in chunks):
        # Megatron reads a layer behind the chunk's last one.
        valid = [d for d in divisors(chunks[-1]) if not any(count % d for count in chunks)]
        yield Violation(
            "recompute.num_layers",
            f"{block} does not divide the {_words(chunks)} layers of a model chunk",
            nearest(block, valid),
        )


def _undivided(given: list[str], spec: ModelSpec, parallel: Parallel, sizes: Sizes) -> Iterator[Violation]:
    first, last = given_ends(parallel)
    pipeline, ends = parallel.pipeline, lighter_ends(spec.num_layers, parallel.pipeline)
    described = ", ".join(f"{key}: {value}" for key, value in (ends or {}).items() if value is not None)
    if given:
        middle, left = pipeline - len(given), spec.num_layers - sum(first) - sum(last)
        valid = described or "leave both keys out (null)"
        if middle:
            yield Violation(
                given[-1],
                f"{left} layers are left for the {middle} other stages of {pipeline}, which have equally many, at least"
                " one",
                valid,
            )
        else:
            yield Violation(
                given[-1],
                f"the two stages have {sum(first) + sum(last)} layers, and the model has {spec.num_layers}",
                valid,
            )
        return
    valid = nearest(pipeline, dividing(sizes.world, sizes.model // pipeline, divisors(spec.num_layers)))
    yield Violation(
        "parallel.pipeline",
        f"{pipeline} does not divide the model's {spec.num_layers} layers",
        f"{valid} or `parallel: {{{described}}}`" if ends else valid,
    )


def _words(counts: list[int]) -> str:
    return " or ".join(map(str, counts))

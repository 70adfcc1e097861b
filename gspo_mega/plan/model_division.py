"""How a model's sizes divide over ranks, and the nearest sizes that do.

Owns no refusal: those are `layout_checks.py`'s, `stages.py`'s and `expert_checks.py`'s.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from gspo_mega.config.schema import Config, Parallel
from gspo_mega.models.spec import ModelSpec


def nearest(value: int, valid: Iterable[int]) -> str:
    """The closest valid values below and above, in words."""
    choices = sorted(set(valid))
    below = [choice for choice in choices if choice < value][-1:]
    above = [choice for choice in choices if choice > value][:1]
    return " or ".join(map(str, below + above))


def divisors(number: int) -> list[int]:
    """All positive divisors, ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def dividing(world: int, others: int, choices: list[int]) -> list[int]:
    """The `choices` whose product with `others` divides `world`; all of them where none does (the number of ranks then
    has to change too).
    """
    return [choice for choice in choices if world % (choice * others) == 0] or choices


def can_divide_model(config: Config, spec: ModelSpec) -> bool:
    """Do `parallel.tensor` and `parallel.pipeline` divide the model? Where not, checks that follow from these sizes are
    left out: the sizes have to change first.
    """
    return not undivided_sizes(spec, config.parallel.tensor) and bool(stage_layers(spec.num_layers, config.parallel))


def stage_layers(num_layers: int, parallel: Parallel) -> tuple[int, ...] | None:
    """Layers of each stage; None where they do not add up, or where a stage would have none."""
    first, last = given_ends(parallel)
    middle = parallel.pipeline - len(first) - len(last)
    left = num_layers - sum(first) - sum(last)
    if middle < 0 or left < middle or (left % middle if middle else left):
        return None
    return (*first, *[left // max(1, middle)] * middle, *last)


def given_ends(parallel: Parallel) -> tuple[list[int], list[int]]:
    """The numbers of layers that the YAML gives the first and the last stage: one each, or none."""
    first, last = parallel.first_stage_layers, parallel.last_stage_layers
    return [] if first is None else [first], [] if last is None else [last]


def undivided_sizes(spec: ModelSpec, tensor: int) -> list[str]:
    """The model's sizes that `tensor` ranks do not divide, in words."""
    # With more ranks than key-value heads, several ranks share a head: Megatron gathers the projection's rows.
    shared = tensor % spec.num_kv_heads == 0 and 2 * spec.num_kv_heads * spec.head_dim % tensor == 0
    sizes = [
        ("attention heads", spec.num_heads),
        ("key-value heads", 0 if shared or spec.latent is not None else spec.num_kv_heads),
    ]
    if not spec.has_experts(0):
        sizes.append(("intermediate size", spec.intermediate_size))
    if spec.moe is not None:
        sizes.append(("shared experts' intermediate size", spec.moe.shared_intermediate_size))
    return [f"{name} {size}" for name, size in sizes if size % tensor]

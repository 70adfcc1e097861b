"""What an optimizer step reads of each parameter: its gradient after clipping, its settings and its moments.

Owns the way from the model's parameters to those of Megatron's optimizers: the same ones, fp32 copies, or this data
rank's shards of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer

from gspo_mega.engine.megatron_optimizer import is_counted, is_decoupled, read_gradient
from gspo_mega.engine.process_groups import ParallelGroups, device

if TYPE_CHECKING:
    from megatron.core.optimizer.optimizer import ChainedOptimizer

# What decides a parameter's update besides its gradient and its moments.
SETTINGS = ("lr", "weight_decay", "betas", "eps")


@dataclass(frozen=True)
class Held:
    """A parameter as an optimizer of this rank holds it. `model`: the model's; `main`: the optimizer's own, of the
    elements [start, end) of the flattened one; `settings`: its parameter group's.
    """

    model: torch.nn.Parameter
    main: torch.Tensor
    start: int
    end: int
    part: MegatronOptimizer
    settings: dict[str, Any]


def held_parameters(optimizer: ChainedOptimizer) -> Iterator[Held]:
    """Every parameter of which this rank steps some elements."""
    for part in optimizer.chained_optimizers:
        settings = {id(main): group for group in part.param_groups for main in group["params"]}
        for model, main in _pairs(part):
            if main is None or id(main) not in settings:
                continue
            start, end = 0, model.numel()
            if hasattr(part, "model_float16_groups"):
                shards: Any = part  # only the distributed optimizer has this method
                where = shards._get_model_param_range_map(model)["param"]
                start, end = where.start, where.end
            yield Held(model, main, start, end, part, settings[id(main)])


def _pairs(part: Any) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    """(model's, optimizer's) parameters; Megatron has a class for each kind of optimizer, with lists of its own."""
    if hasattr(part, "model_float16_groups"):  # the distributed optimizer
        own = part.shard_float16_groups if is_decoupled(part) else part.shard_fp32_from_float16_groups
        lists = [(part.model_float16_groups, own), (part.model_fp32_groups, part.shard_fp32_groups)]
    elif hasattr(part, "float16_groups"):
        lists = [
            (part.float16_groups, part.fp32_from_float16_groups),
            (part.fp32_from_fp32_groups, part.fp32_from_fp32_groups),
        ]
    else:
        own = [group["params"] for group in part.param_groups]
        lists = [(own, own)]
    for models, mains in lists:
        for of_group in zip(models, mains, strict=True):
            yield from zip(*of_group, strict=True)


@torch.no_grad()
def put_in_gradient_buffers(optimizer: ChainedOptimizer, values: Callable[[Held], torch.Tensor | None]) -> None:
    """Overwrite this rank's elements of every parameter's `main_grad` with `values` of the shape of `Held.main`; None
    leaves them. What the optimizer has read already is not changed by it.
    """
    for held in held_parameters(optimizer):
        found = values(held)
        if found is not None:
            gradient: Any = held.model
            gradient.main_grad.view(-1)[held.start : held.end].copy_(found.reshape(-1))


def step_gradient(held: Held) -> torch.Tensor | None:
    """The gradient that the next step reads: float32 of the shape of `held.main`, None if there is none."""
    return read_gradient(held.part, held.main)


def moment(held: Held, name: str) -> torch.Tensor | None:
    """Adam's `exp_avg` or `exp_avg_sq`, of the shape of `held.main`; None before the first step, and where it is kept
    in eight bits.
    """
    optimizer = held.part.optimizer
    found = optimizer.state.get(held.main, {}).get(name)
    return None if found is None or found.dtype == torch.uint8 else found


def counted_squares(
    optimizer: ChainedOptimizer, groups: ParallelGroups, kinds: tuple[str, ...], kind_of: Callable[[torch.Tensor], str]
) -> dict[str, float]:
    """The squares of the gradients that count in the norm now, by the kind of the model's parameter. Collective over
    all ranks, which get the same.
    """
    sums: dict[int, torch.Tensor] = {}
    summed_over: dict[int, dist.ProcessGroup] = {}
    for part in optimizer.chained_optimizers:
        group = part.get_grad_stats_parallel_group()
        summed_over[id(group)] = group
        sums.setdefault(id(group), torch.zeros(len(kinds), dtype=torch.float64, device=device()))
    for held in held_parameters(optimizer):
        gradient = step_gradient(held)
        if gradient is not None and is_counted(held.part, held.main, groups):
            place = kinds.index(kind_of(held.model))
            sums[id(held.part.get_grad_stats_parallel_group())][place] += gradient.double().square().sum()
    for key, values in sums.items():
        dist.all_reduce(values, group=summed_over[key])
    return dict(zip(kinds, torch.stack([*sums.values()]).sum(dim=0).tolist(), strict=True))

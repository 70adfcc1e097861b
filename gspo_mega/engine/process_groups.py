"""The process groups of a layout, and small agreements between ranks as JSON.

This is the only file that reads Megatron's `parallel_state`. It creates Megatron's groups for a layout, returns them as
plain values, and destroys them; it knows nothing of models or batches. With the JSON functions ranks exchange names,
digests and problems over the host (gloo) group, without pickle. Tensors of the model take other paths.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.tensor_parallel import random as megatron_random

from gspo_mega.config.deadlines import COLLECTIVE_SECONDS
from gspo_mega.config.schema import Parallel
from gspo_mega.cpu.backend import is_cpu_backend


@dataclass(frozen=True)
class RankGroup:
    """One process group as this rank sees it. `ranks` are global ranks in group order."""

    group: dist.ProcessGroup
    rank: int
    size: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class ParallelGroups:
    """All groups of this rank. `data` excludes context parallelism, `data_context` includes it.

    `host` is a gloo group of all ranks for small host-side traffic (shards, metrics). It differs from the default group
    also on a machine without a GPU, so that its traffic never interleaves with collectives of the model.
    """

    world: RankGroup
    tensor: RankGroup
    pipeline: RankGroup
    context: RankGroup
    data: RankGroup
    data_context: RankGroup
    expert: RankGroup
    expert_tensor: RankGroup
    expert_data: RankGroup
    host: RankGroup

    @property
    def is_lead(self) -> bool:
        """True on rank 0, which acts for all ranks if a single one must."""
        return self.world.rank == 0

    @property
    def is_first_stage(self) -> bool:
        return self.pipeline.rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline.rank == self.pipeline.size - 1

    @property
    def reports(self) -> bool:
        """True on the ranks whose part of a report counts: one rank per tensor group of the last stage."""
        return self.is_last_stage and self.tensor.rank == 0


def _group(group: object) -> RankGroup:
    """The group as this rank sees it. `group`: returned by Megatron or torch, whose annotations also allow None, a
    number and a list.
    """
    if not isinstance(group, dist.ProcessGroup):
        raise RuntimeError(f"this rank is not in the process group: got {group!r} instead of a group")
    ranks = tuple(dist.get_process_group_ranks(group))
    return RankGroup(group=group, rank=ranks.index(dist.get_rank()), size=len(ranks), ranks=ranks)


def groups_of(parallel: Parallel, seed: int) -> ParallelGroups:
    """Create the groups of a run's layout (`parallel`). `seed`: `run.seed`. Collective, as `create_groups`."""
    return create_groups(
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        virtual_pipeline=parallel.virtual_pipeline,
        context=parallel.context,
        expert=parallel.expert,
        expert_tensor=parallel.expert_tensor,
        seed=seed,
    )


def create_groups(
    *,
    tensor: int = 1,
    pipeline: int = 1,
    virtual_pipeline: int | None = None,
    context: int = 1,
    expert: int = 1,
    expert_tensor: int = 1,
    seed: int = 1,
    timeout_seconds: float = COLLECTIVE_SECONDS,
) -> ParallelGroups:
    """Create Megatron's groups for a layout over the default process group, and seed Megatron's RNG trackers.

    Collective over all ranks. Ranks follow Megatron's order tensor, context, expert, data, pipeline (fastest first).
    Raises Megatron's RuntimeError if the sizes do not divide the world; `plan` refuses such a layout earlier.
    """
    gc.collect()  # frees groups of an earlier layout that are no longer in use
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=virtual_pipeline,
        context_parallel_size=context,
        expert_model_parallel_size=expert,
        expert_tensor_parallel_size=expert_tensor,
        distributed_timeout_minutes=max(1, int(timeout_seconds // 60)),
    )
    model_parallel_cuda_manual_seed(seed)
    host = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
    return ParallelGroups(
        world=_group(dist.group.WORLD),
        tensor=_group(parallel_state.get_tensor_model_parallel_group()),
        pipeline=_group(parallel_state.get_pipeline_model_parallel_group()),
        context=_group(parallel_state.get_context_parallel_group()),
        data=_group(parallel_state.get_data_parallel_group()),
        data_context=_group(parallel_state.get_data_parallel_group(with_context_parallel=True)),
        expert=_group(parallel_state.get_expert_model_parallel_group()),
        expert_tensor=_group(parallel_state.get_expert_tensor_parallel_group()),
        expert_data=_group(parallel_state.get_expert_data_parallel_group()),
        host=_group(host),
    )


# The modules that `destroy_groups` dismantles.
_users: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


def dismantle_with_groups(module: torch.nn.Module) -> None:
    """Register a module that is useless without the current groups: `destroy_groups` dismantles it."""
    _users.add(module)


def destroy_groups() -> None:
    """Destroy every group but the default one, so that the same processes can use another layout. Collective.

    Modules registered by `dismantle_with_groups` are unusable afterwards. The connections of a gloo group and its three
    threads end when nothing refers to the group any more. Megatron's data parallelism, token dispatchers and rotary
    embeddings would refer to their groups for ever, so they are dismantled here. The last threads end when the caller
    drops its own references.
    """
    for module in list(_users):
        _dismantle(module)
    _users.clear()
    _forget_amax_histories()
    parallel_state.destroy_model_parallel()
    for name, value in list(vars(parallel_state).items()):
        if isinstance(value, dist.ProcessGroup):  # Megatron does not reset all of them
            setattr(parallel_state, name, None)
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    gc.collect()


def _forget_amax_histories() -> None:
    """Drop the state that Transformer Engine keeps outside of its modules: with delayed scaling, every module's
    histories and the group over which they are reduced. The first pass of the next layout would reduce them again.
    """
    reset = getattr(megatron_random.FP8GlobalStateManager, "reset", None)  # Megatron's own stand-in has no state
    if reset is not None:
        reset()


def _dismantle(module: torch.nn.Module) -> None:
    """Cut references that Python's garbage collector cannot see or that live as long as the process.

    A gradient hook refers to the data parallelism around its parameter through autograd's C++ nodes, which the
    collector does not inspect. A cache around a method refers to every object that the method was called on.
    """
    for kind in {kind for part in module.modules() for kind in type(part).__mro__}:
        for member in vars(kind).values():
            if hasattr(member, "cache_clear"):
                member.cache_clear()
    vars(module).clear()


def stage_flags(virtual_stage: int | None) -> tuple[bool, bool]:
    """Whether one model chunk of this rank holds the embedding, and whether it holds the LM head."""
    return (
        parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=virtual_stage),
        parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=virtual_stage),
    )


def tensor_group() -> dist.ProcessGroup:
    """This rank's tensor-parallel group, for a module that Megatron builds without naming it."""
    group: Any = parallel_state.get_tensor_model_parallel_group()  # declared as if it might be none
    return group


def device() -> torch.device:
    """The device of this rank's tensors."""
    return torch.device("cpu") if is_cpu_backend() else torch.device("cuda", torch.cuda.current_device())

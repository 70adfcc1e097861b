"""Megatron's data parallelism around the model chunks, and the parameter gathers that it may leave unfinished.

With `optimizer.overlap` gradients are reduced bucket by bucket during the backward pass. With `optimizer.distributed`
as well, parameters are gathered after the optimizer step while the next forward pass begins: a module waits for its own
bucket when it is called. Code that reads parameters in any other way (the LM head in chunks, export, publish,
checkpoints) calls `await_parameters` first.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from gspo_mega.config.schema import Optimizer
from gspo_mega.engine.process_groups import ends_with_groups

if TYPE_CHECKING:
    from gspo_mega.engine.model import PolicyModel


def wrap_data_parallel(
    megatron_config: TransformerConfig, chunks: list[PolicyModel], settings: Optimizer
) -> list[DistributedDataParallel]:
    """Megatron's DDP around each chunk: gradient buffers of `settings.gradients_dtype`, summed (not averaged) over data
    ranks.

    With `settings.overlap` it also sets in `megatron_config` how Megatron's schedules delay reductions until the last
    micro-batch, and gives every chunk its `await_parameters`.
    """
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=settings.gradients_dtype == "fp32",
        use_distributed_optimizer=settings.distributed,
        overlap_grad_reduce=settings.overlap,
        overlap_param_gather=settings.overlap and settings.distributed,
        # `start_parameter_gathers` starts all gathers at once. If modules started them on demand, ranks whose experts
        # got no token would start theirs in another order, and the ranks would wait for each other.
        align_param_gather=settings.overlap and settings.distributed,
        average_in_collective=False,
        fp8_param_gather=bool(megatron_config.fp8 and megatron_config.fp8_param),
    )
    wrapped = [
        DistributedDataParallel(megatron_config, ddp_config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    for chunk in wrapped:
        ends_with_groups(chunk)
    if settings.overlap:
        no_sync, start = [w.no_sync for w in wrapped], [w.start_grad_sync for w in wrapped]
        schedule: Any = megatron_config  # Megatron declares one function; its interleaved schedule takes one per chunk
        schedule.no_sync_func = no_sync if len(wrapped) > 1 else no_sync[0]
        # Pipeline stages start their reductions together, after the same backward pass, so that none slows a neighbour.
        schedule.grad_sync_func = start if len(wrapped) > 1 else start[0]
        for chunk, around in zip(chunks, wrapped, strict=True):
            chunk.await_parameters = partial(_await_parameters, around)
    return wrapped


def start_parameter_gathers(wrapped: Iterable[DistributedDataParallel]) -> None:
    """Start gathering what each data rank updated in an optimizer step, if gathers overlap. Does not wait.

    Collective over the data-parallel groups, also after a skipped step: the buckets' state must stay the same.
    """
    for chunk in wrapped:
        if chunk.ddp_config.overlap_param_gather:
            _await_parameters(chunk)
            chunk.start_param_sync()


def _await_parameters(wrapped: DistributedDataParallel) -> None:
    """Wait until no parameter of the chunk is being gathered; starts nothing."""
    for bucket_group in (*wrapped.bucket_groups, *wrapped.expert_parallel_bucket_groups):
        if bucket_group.param_gather_handle is not None:
            bucket_group.finish_param_sync(skip_next_bucket_dispatch=True)

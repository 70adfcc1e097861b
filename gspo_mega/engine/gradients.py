"""Whole gradients on every rank, for those who want to look at them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel


@torch.no_grad()
def complete_gradients(wrapped: Sequence[DistributedDataParallel]) -> None:
    """Make every parameter's `main_grad` the reduced gradient in full.

    With the distributed optimizer the reduction leaves each data-parallel rank its own part of a gradient buffer
    only; the parts are exchanged here, in place. Elsewhere it does nothing. Collective over the data-parallel groups.
    """
    for chunk in wrapped:
        if not chunk.ddp_config.use_distributed_optimizer:
            continue
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                part = bucket.grad_data.view(group.size(), -1)[group.rank()].clone()
                dist.all_gather(list(bucket.grad_data.view(group.size(), -1).unbind()), part, group=group)

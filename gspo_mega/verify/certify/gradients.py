"""Whole gradients on every rank, which certify compares tensor by tensor.

Owns the exchange of the parts that the distributed optimizer leaves on each rank. Computing gradients is the engine's.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist

from gspo_mega.engine.critic import CriticEngine
from gspo_mega.engine.policy import PolicyEngine


@torch.no_grad()
def complete_gradients(engine: PolicyEngine | CriticEngine) -> None:
    """Make every parameter's `main_grad` the whole reduced gradient, in place.

    With the distributed optimizer the reduction leaves each data-parallel rank only its own part of a gradient buffer;
    this exchanges the parts. Without it nothing is left to do. Collective over the data-parallel groups.
    """
    for chunk in engine.wrapped:
        if not chunk.ddp_config.use_distributed_optimizer:
            continue
        wrapped = cast(
            Any, chunk
        )  # torch declares `buffers` a method of every module; Megatron's wrapper makes it a list
        for buffer in (*wrapped.buffers, *wrapped.expert_parallel_buffers):
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                part = bucket.grad_data.view(group.size(), -1)[group.rank()].clone()
                dist.all_gather(list(bucket.grad_data.view(group.size(), -1).unbind()), part, group=group)

"""Balance without a loss: the expert bias moves towards experts that were given too few tokens (arXiv:2408.15664).

After an optimizer step, for each layer, with c_i the tokens of the mini-batch that went to expert i:

    bias_i += rate x sign(mean(c) - c_i)

Counted are positions that a trained log-prob depends on, in training passes alone: not padding and filler, not the old
pass and not the reference's. So the bias is the same to the bit in every layout and packing in which the routes are the
same. Where routes are replayed, those taken count. Under R2 the mini-batches of a step all follow the bias of the old
pass, and answer it together; under R3 they follow the servers', which is the published one.

Megatron would move the bias with the gradients' reduction, before it is known whether the step is applied, and count
padding; its own update is given a rate of zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from gspo_mega.engine.process_groups import ParallelGroups, device
from gspo_mega.engine.routing import Routers, Routes, expert_bias_of
from gspo_mega.records import MicroBatch


class ExpertBias:
    """The biases of this rank's routers. Does nothing where `rate` is 0."""

    def __init__(self, rate: float, routers: Routers, groups: ParallelGroups, num_layers: int) -> None:
        self._rate, self._routers, self._groups, self._num_layers = rate, routers, groups, num_layers
        self._counts: torch.Tensor | None = None

    def count(self, micro_batches: Sequence[MicroBatch], routes: Sequence[Routes]) -> None:
        """Of one training pass over a mini-batch: the routes that each micro-batch took through this rank's routers."""
        if self._rate == 0:
            return
        assert self._routers.moe is not None
        num_experts = self._routers.moe.num_experts
        counts = torch.zeros(self._num_layers, num_experts, dtype=torch.int64, device=device())
        for micro_batch, taken in zip(micro_batches, routes, strict=True):
            counted = self._routers.compared(micro_batch)
            for layer, experts in taken.items():
                counts[layer] += torch.bincount(experts[counted].flatten().long(), minlength=num_experts)
        self._counts = counts

    @torch.no_grad()
    def update(self) -> dict[str, float]:
        """Move the biases by what was counted last. Returns this rank's part of: a layer's largest count over its mean,
        summed over layers, and the number of those. Collective over all ranks where the rate is above 0."""
        if self._counts is None:
            return {}
        counts, self._counts = self._counts, None
        # Each (position, layer) is on one rank.
        dist.all_reduce(counts, group=self._groups.world.group)
        mean = counts.double().mean(dim=1, keepdim=True)
        direction = (mean - counts).sign().float()
        for layer, router in self._routers.all():
            expert_bias_of(router).add_(self._rate * direction[layer])
        if self._groups.world.rank != 0:
            return {}
        used = mean[:, 0] > 0
        ratios = counts.amax(dim=1)[used] / mean[used, 0]
        return {"load_max_over_mean": float(ratios.sum()), "num_loads": float(used.sum())}

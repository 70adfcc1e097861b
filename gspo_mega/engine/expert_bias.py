"""Balance without a loss: the expert bias favours experts that received too few tokens (arXiv:2408.15664).

After an optimizer step, for each layer, where c_i tokens of the mini-batch went to expert i:

    bias_i += rate x sign(mean(c) - c_i)

The counts cover positions that a trained log-prob depends on, in training passes alone; they exclude padding, filler,
the old pass and the reference's pass. The bias is therefore bitwise the same in every layout and packing with the same
routes. Replayed routes count as taken. Under R2 all mini-batches of a step follow the bias of the old pass; under R3
they follow the servers' bias, which is the published one.

Megatron's own update moves the bias during gradient reduction, before it is known if the step is applied, and counts
padding. It runs at a rate of zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from gspo_mega.base.records import MicroBatch
from gspo_mega.engine.process_groups import ParallelGroups, device
from gspo_mega.engine.routing import Routers, Routes, expert_bias_of


class ExpertBias:
    """The biases of this rank's routers. Does nothing if `rate` is 0."""

    def __init__(self, rate: float, routers: Routers, groups: ParallelGroups, num_layers: int) -> None:
        self._rate, self._routers, self._groups, self._num_layers = rate, routers, groups, num_layers
        self._counts: torch.Tensor | None = None

    def count(self, micro_batches: Sequence[MicroBatch], routes: Sequence[Routes]) -> None:
        """Count the routes of one training pass over a mini-batch.

        routes: for each micro-batch the routes taken through this rank's routers, [t, k] int16 expert ids per layer.
        """
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
        """Move the biases by the last counts. Collective over all ranks if the rate is above 0.

        Returns this rank's part of the sum over layers of the largest count over the mean count, and of the number of
        layers.
        """
        if self._counts is None:
            return {}
        counts, self._counts = self._counts, None
        # Each (position, layer) is on exactly one rank.
        dist.all_reduce(counts, group=self._groups.world.group)
        mean = counts.double().mean(dim=1, keepdim=True)
        direction = (mean - counts).sign().float()
        for layer, router in self._routers.all():
            expert_bias_of(router).add_(self._rate * direction[layer])
        if not self._groups.is_lead:
            return {}
        used = mean[:, 0] > 0
        ratios = counts.amax(dim=1)[used] / mean[used, 0]
        return {"load_max_over_mean": float(ratios.sum()), "num_loads": float(used.sum())}

"""Megatron's load-balancing loss and router z-loss in the training passes: their scale and their reported values.

For one pack of T positions (padding included) and one layer of E experts, k per token, let f_i be the share of the
T x k choices that went to expert i, and P_i the mean softmax probability of expert i:

    balance = E sum_i f_i P_i                            (arXiv:2101.03961; 1 when even)
    z       = mean_t logsumexp(router logits_t)^2        (arXiv:2202.08906)

With sigmoid scores P_i is the mean share of a token's sum, and f_i ignores expert bias and groups.

The loss of a mini-batch gains coefficient x sum over layers of the mean over its packs, weighted by T. This depends on
the packs alone: neither on the number of micro-batches or data-parallel ranks, nor on tensor, context, expert or
pipeline parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_config import TransformerConfig

from gspo_mega.base.records import MicroBatch
from gspo_mega.config.schema import Moe
from gspo_mega.engine.megatron_versions import clear_router_losses, router_losses, router_losses_know_their_parts
from gspo_mega.engine.process_groups import ParallelGroups, device


class LoadBalancing:
    """The router losses of one rank. `num_routers`: layers with experts on this rank. Does nothing if both are off."""

    def __init__(
        self, settings: Moe, megatron_config: TransformerConfig, groups: ParallelGroups, num_routers: int
    ) -> None:
        self._settings, self._config, self._groups, self._num_routers = settings, megatron_config, groups, num_routers
        self._num_micro_batches = 0

    @property
    def is_on(self) -> bool:
        return has_router_losses(self._settings)

    def start(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Set the scale for a mini-batch, before its training pass. Collective over data-parallel ranks if a loss is
        on.

        Each rank back-propagates its part of a pack's mean times the T / (tensor x context) positions that it holds:
        Megatron expects a later division by tokens, which this loss has already had. The scale is therefore
        tensor x context (in Megatron versions that leave this factor out) over the mini-batch's positions.
        """
        if not self.is_on:
            return
        num_positions = torch.tensor(
            float(sum(m.num_tokens for m in micro_batches)), dtype=torch.float64, device=device()
        )
        if self._groups.data.size > 1:
            dist.all_reduce(num_positions, group=self._groups.data.group)
        scale = (1 if router_losses_know_their_parts() else self._parts) / float(num_positions)
        # Routers read the coefficients in every forward, recomputed ones included. Megatron has no other way to scale
        # them.
        self._config.moe_aux_loss_coeff = megatron_coefficient(self._settings) * scale
        if self._settings.z_loss_coefficient > 0:
            self._config.moe_z_loss_coeff = self._settings.z_loss_coefficient * scale
        self._num_micro_batches = len(micro_batches)
        clear_router_losses()

    def sums(self) -> dict[str, float]:
        """This rank's part of each loss (before its coefficient), summed over layers and packs, and their number.

        Valid after a training pass. Sums over all ranks, divided by the summed number, are means.
        """
        if not self.is_on:
            return {}
        losses = router_losses()
        sums = {"num_router_losses": self._num_routers * self._num_micro_batches / self._parts}
        if "load_balancing_loss" in losses:  # each rank of a pack holds its share of the value
            sums["load_balancing_loss"] = float(losses["load_balancing_loss"].sum())
        if "z_loss" in losses:  # each rank of a pack holds the mean over its own positions
            sums["z_loss"] = float(losses["z_loss"].sum()) / self._parts
        clear_router_losses()
        return sums

    @property
    def _parts(self) -> int:
        """Ranks that share one pack's positions."""
        return self._groups.tensor.size * self._groups.context.size


def megatron_coefficient(settings: Moe) -> float:
    """The load-balancing coefficient in effect: 0 if the loss is off."""
    return settings.load_balancing_coefficient if settings.load_balancing != "none" else 0.0


def has_router_losses(settings: Moe) -> bool:
    """Whether one of the routers' losses is on."""
    return megatron_coefficient(settings) > 0 or settings.z_loss_coefficient > 0

"""Megatron's load-balancing loss and router z-loss in the training passes: their scale, and their values for a curve.

Of one pack of T positions (padding included) and one layer of E experts, k a token, with f_i the share of the T x k
choices that went to expert i and P_i the mean softmax probability of expert i:

    balance = E sum_i f_i P_i        (arXiv:2101.03961; 1 when even; of sigmoid scores P_i is the mean share of a
    token's sum, and
                                      f_i is counted without expert bias and groups)
    z       = mean_t logsumexp(router logits_t)^2        (arXiv:2202.08906)

What is added to the loss of a mini-batch is coefficient x sum over layers of the mean over its packs, weighed by T.
That depends on the packs alone: not on how many micro-batches or data-parallel ranks they are dealt to, nor on tensor,
context, expert or pipeline parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_config import TransformerConfig

from gspo_mega.config.schema import Moe
from gspo_mega.engine.megatron_versions import clear_router_losses, router_losses, router_losses_know_their_parts
from gspo_mega.engine.process_groups import ParallelGroups, device
from gspo_mega.records import MicroBatch


class LoadBalancing:
    """The router losses of one rank. `num_routers`: layers with experts on this rank. Does nothing where both are
    off.
    """

    def __init__(
        self, settings: Moe, megatron_config: TransformerConfig, groups: ParallelGroups, num_routers: int
    ) -> None:
        self._settings, self._config, self._groups, self._num_routers = settings, megatron_config, groups, num_routers
        self._num_micro_batches = 0

    @property
    def is_on(self) -> bool:
        return megatron_coefficient(self._settings) > 0 or self._settings.z_loss_coefficient > 0

    def start(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Before a training pass: set the scale for its mini-batch. Collective over data-parallel ranks where on.

        Each rank of a pack's T positions back-propagates its part of the pack's mean times the T / (tensor x context)
        positions that it holds (Megatron counts on a later division by tokens, which this loss has had already).
        Hence the factor tensor x context, where Megatron leaves it out, over the mini-batch's positions.
        """
        if not self.is_on:
            return
        num_positions = torch.tensor(
            float(sum(m.num_tokens for m in micro_batches)), dtype=torch.float64, device=device()
        )
        if self._groups.data.size > 1:
            dist.all_reduce(num_positions, group=self._groups.data.group)
        scale = (1 if router_losses_know_their_parts() else self._parts) / float(num_positions)
        # Routers read the coefficients at every forward, recomputed ones included; Megatron offers no other way to
        # scale them.
        self._config.moe_aux_loss_coeff = megatron_coefficient(self._settings) * scale
        if self._settings.z_loss_coefficient > 0:
            self._config.moe_z_loss_coeff = self._settings.z_loss_coefficient * scale
        self._num_micro_batches = len(micro_batches)
        clear_router_losses()

    def sums(self) -> dict[str, float]:
        """After a training pass, this rank's part of: each loss (before its coefficient) summed over layers and packs,
        and the number of those. Added over all ranks and divided, they are means."""
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
    """The load-balancing coefficient in effect: 0 where the loss is off."""
    return settings.load_balancing_coefficient if settings.load_balancing != "none" else 0.0

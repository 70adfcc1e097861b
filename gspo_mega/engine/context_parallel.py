"""The one sum that the loss shares between context-parallel ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from gspo_mega.engine.process_groups import Group


class _SumForward(torch.autograd.Function):
    """Sum over the group; the gradient goes back to each rank's own addend unchanged."""

    @staticmethod
    def forward(ctx, values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = values.detach().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None]:
        (grad,) = grad_outputs
        return grad, None


def sum_over_context(values: torch.Tensor, context: Group) -> torch.Tensor:
    """The sum over the context group, [S] of the dtype of `values`, identical on its ranks.

    values: [S] float32 or float64, this rank's partial sums per sequence, nats in the losses.
    Every rank then computes the same per-sequence loss and back-propagates its own tokens only. The gradient is
    complete once gradients are summed over the group, which data-parallel reduction does.
    Collective over the context group if its size is above 1.
    """
    return values if context.size == 1 else _SumForward.apply(values, context.group)


def with_known_sum(values: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """`sum_over_context` without communication, for a sum that is already known: `total` with the gradient of `values`.

    values: [S] float32 or float64, this rank's partial sums per sequence, finite. total: [S] of the same dtype, their
    sum over the context group, identical on its ranks. Returns [S] of that dtype.
    """
    return total + (values - values.detach())

"""How sequences are divided over context-parallel ranks, and the one sum the loss shares between them.

Each sequence is cut into 2 x size equal chunks; rank r holds chunks r and 2 x size - 1 - r, so that causal
attention costs every rank the same. Transformer Engine uses the same layout.
"""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist

from gspo_mega.engine.process_groups import Group


def local_positions(length: int, size: int, rank: int) -> torch.Tensor:
    """Positions of one sequence that `rank` holds: [length / size] int64, on the host, local to the context rank.

    Raises ValueError unless 2 x size divides `length`, a number of tokens.
    """
    if size == 1:
        return torch.arange(length)
    if length % (2 * size):
        raise ValueError(f"a sequence of {length} padded tokens does not divide into 2 x {size} chunks")
    chunks = torch.arange(length).view(2 * size, -1)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])


def local_rows(cu_seqlens: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    """Rows of a pack that `rank` holds, in its own order: [T / size] int64, on the host, local to the context rank.

    cu_seqlens: [S+1] int32 or int64 offsets of the whole pack's sequences in tokens, the same on every rank.
    """
    if size == 1:
        return torch.arange(int(cu_seqlens[-1]))
    bounds = cu_seqlens.tolist()
    return torch.cat([start + local_positions(end - start, size, rank) for start, end in itertools.pairwise(bounds)])


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

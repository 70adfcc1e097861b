"""The critic's head: a number for each chosen hidden state, and the model that owns it in place of an LM head.

Owns the product in chunks and its gradient over tensor ranks. The head is whole on every tensor rank; all of them
compute the same values from the same gathered states, so that its gradient needs no sum over them.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch.autograd.function import once_differentiable

from gspo_mega.engine.model import PolicyModel
from gspo_mega.engine.process_groups import Group


class ValueModel(PolicyModel):
    """A `PolicyModel` whose last stage owns `value_head` [1, H] of the model's dtype, zero at the start, and no LM
    head. Embeddings are never tied to anything."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs | {"share_embeddings_and_output_weights": False})
        if self.post_process:
            del self.output_layer
            self.value_head = torch.nn.Linear(
                self.config.hidden_size, 1, bias=False, dtype=self.config.params_dtype, device="cpu"
            )
            torch.nn.init.zeros_(self.value_head.weight)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Of the backbone and, on the last stage, the head."""
        has_head, self.post_process = self.post_process, False  # Megatron would look for the LM head's tensor
        try:
            return super().sharded_state_dict(*args, **kwargs)
        finally:
            self.post_process = has_head

    def value_weight(self) -> torch.Tensor:
        """The head of the last stage: [1, H] of the model's dtype. Raises ValueError on other stages."""
        self.await_parameters()
        if not self.post_process:
            raise ValueError("this chunk holds no value head; only the last pipeline stage does")
        return self.value_head.weight


class _ChunkedValues(torch.autograd.Function):
    """h w^T for each row, widened chunk by chunk. hidden [N, H], weight [1, H] of one dtype; returns [N] float32, or
    float64 if they are."""

    @staticmethod
    def forward(ctx, hidden: torch.Tensor, weight: torch.Tensor, chunk_rows: int) -> torch.Tensor:
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        column = weight[0].to(wide)
        values = hidden.new_empty(hidden.size(0), dtype=wide)
        for start in range(0, hidden.size(0), chunk_rows):
            rows = slice(start, start + chunk_rows)
            values[rows] = hidden[rows].to(wide) @ column
        ctx.save_for_backward(hidden, weight)
        ctx.chunk_rows = chunk_rows
        return values

    @staticmethod
    @once_differentiable
    # `once_differentiable` makes `ctx` positional; autograd passes it so.
    def backward(ctx, *grad_outputs: torch.Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad_values,) = grad_outputs
        hidden, weight = ctx.saved_tensors
        column = weight[0].to(grad_values.dtype)
        grad_hidden, grad_column = torch.empty_like(hidden), torch.zeros_like(column)
        for start in range(0, hidden.size(0), ctx.chunk_rows):
            rows = slice(start, start + ctx.chunk_rows)
            grad_hidden[rows] = (grad_values[rows, None] * column).to(hidden.dtype)
            grad_column += grad_values[rows] @ hidden[rows].to(grad_values.dtype)
        return grad_hidden, grad_column[None].to(weight.dtype), None


def token_values(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    rows: torch.Tensor,
    *,
    tensor_group: Group,
    sequence_parallel: bool,
    chunk_rows: int,
) -> torch.Tensor:
    """The value of the state at each of `rows`: [N] float32 in the unit of rewards, the same on all tensor ranks.

    hidden_states: [t, 1, H] of the model's dtype, the last stage's output; with `sequence_parallel` t is this tensor
    rank's share. weight: [1, H] of that dtype, the same on all tensor ranks. rows: [N] int64, positions in this context
    rank's (gathered) pack. chunk_rows: rows that are widened at once. Differentiable with respect to hidden_states and
    weight. Collective over the tensor group with `sequence_parallel`.
    """
    hidden = hidden_states
    if tensor_group.size > 1 and sequence_parallel:
        # Every rank has the whole gradient of the gathered states, so each keeps its share of it and adds up nothing.
        hidden = gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=False, group=tensor_group.group
        )
    return _ChunkedValues.apply(hidden.squeeze(1).index_select(0, rows), weight, chunk_rows)

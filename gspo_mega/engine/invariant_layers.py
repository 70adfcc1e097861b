"""Megatron's plain layers with operations that do not depend on the batch, for `engine.batch_invariant`.

This module says which class stands where in a layer. The operations are those of `gspo_mega.cpu`, which the servers
call too. `plan/validate_precision.py` refuses models and layouts that cannot have them. Only the forward pass gives the
same row in any batch: the usual operations compute the gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.autograd.function import once_differentiable

from gspo_mega.cpu import batch_invariant
from gspo_mega.cpu.batch_invariant import attend as attend_in_fixed_order
from gspo_mega.cpu.packed_sdpa import attend, padded_layout
from gspo_mega.engine.attention import PackedAttention
from gspo_mega.engine.precision import mlp_submodules

ACTIVATION = batch_invariant.silu


def is_batch_invariant(megatron_config: TransformerConfig) -> bool:
    """Whether this configuration uses the layers of this module, which its activation function shows."""
    return megatron_config.activation_func is ACTIVATION


class InvariantColumnLinear(ColumnParallelLinear):
    """Megatron's linear layer of one tensor rank, with rows that do not depend on each other."""

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, *_: object, **options: Any) -> torch.Tensor:
        return batch_invariant.linear(input, weight, options["bias"])


class InvariantRowLinear(RowParallelLinear):
    """The same for the output of attention and the second half of the MLP."""

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, *_: object, **options: Any) -> torch.Tensor:
        return batch_invariant.linear(input, weight, options["bias"])


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: PackedSeqParams, scale: float
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.params, ctx.scale = params, scale
        layout = padded_layout(params)
        q, k, v = (part[layout.query_rows] for part in (query, key, value))
        last_keys = torch.arange(q.size(1)).expand(q.size(0), -1)
        output = attend_in_fixed_order(q, k, v, last_keys, scale)
        return output.flatten(0, 1)[layout.packed].flatten(1)

    @staticmethod
    @once_differentiable
    # `once_differentiable` makes `ctx` positional; autograd passes it so.
    def backward(ctx: Any, grad: torch.Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        with torch.enable_grad():
            leaves = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
            output = attend(leaves[0], leaves[1], leaves[2], ctx.params, None, ctx.scale)
        return *torch.autograd.grad(output, leaves, grad), None, None


class InvariantAttention(PackedAttention):
    """`PackedAttention` of one context rank, which adds over the keys in a fixed order."""

    def forward(
        self,
        query,
        key,
        value,
        attention_mask,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params=None,
    ):
        if packed_seq_params is None:
            raise ValueError("InvariantAttention takes packed sequences only; packed_seq_params is None")
        scale = query.size(-1) ** -0.5 if self.softmax_scale is None else self.softmax_scale
        return _Attention.apply(query, key, value, packed_seq_params, scale)


def use_invariant_parts(attention: Any, layer: Any) -> None:
    """Put this module's parts into the spec of a plain dense layer, in place. `attention`, `layer`: Megatron's
    submodules of its attention, and of the layer itself.
    """
    attention.core_attention = InvariantAttention
    attention.linear_qkv, attention.linear_proj = InvariantColumnLinear, InvariantRowLinear
    mlp = mlp_submodules(layer.mlp)
    mlp.linear_fc1, mlp.linear_fc2 = InvariantColumnLinear, InvariantRowLinear

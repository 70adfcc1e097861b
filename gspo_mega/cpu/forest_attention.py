"""Causal attention over a pack whose rows share prefixes: every token attends to its node and to the node's ancestors.

A pack is a forest. Its nodes are runs of tokens in preorder, so the descendants of a node are the tokens right after
it, up to one bound. Attention is then a sum of blocks without a mask: each node attends to itself causally, and all
descendants of a node attend to the whole of it. A block gives an output and the logsumexp of its scores; blocks of
one query are merged by their logsumexps, as ring attention does (arXiv:2310.01889). No score of two tokens that do not
share a path is computed, and no mask is in memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class ForestNodes:
    """The nodes of a pack of C computed tokens, in preorder. `starts` [n + 1]: where each begins, and C. `ends` [n]:
    where the last descendant of each ends. `depths` [C] int64: the position of each token in its rows. `num_rows` [C]
    int64: how many rows have each token, 0 for padding; None where nothing asks for it. `num_row_tokens`: their sum.
    """

    starts: list[int]
    ends: list[int]
    depths: torch.Tensor
    num_rows: torch.Tensor | None = None
    num_row_tokens: int = 0

    def blocks(self) -> Iterator[tuple[slice, slice, bool]]:
        """(queries, keys, whether it is causal) of every block; the first block of each query comes before its
        others.
        """
        spans = [slice(start, end) for start, end in itertools.pairwise(self.starts)]
        for span in spans:
            if span.stop > span.start:
                yield span, span, True
        for span, end in zip(spans, self.ends, strict=True):
            if end > span.stop > span.start:
                yield slice(span.stop, end), span, False


def forest_of(params: PackedSeqParams) -> ForestNodes | None:
    """The forest of a pack, which its parameters carry in an attribute of this package's own; None if its rows share
    nothing.
    """
    return getattr(params, "forest", None)


def set_forest(params: PackedSeqParams, nodes: ForestNodes) -> None:
    """Make a pack a forest. `params`: those of one sequence of all its computed tokens."""
    holder: Any = params
    holder.forest = nodes


def forest_attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    nodes: ForestNodes,
    softmax_scale: float | None = None,
) -> torch.Tensor:
    """Attention of every token to its node up to itself and to all ancestors of the node: [C, heads x v].

    query [C, heads, d], key [C, kv_heads, d], value [C, kv_heads, v <= d], on a CPU. `softmax_scale`: 1 / sqrt(d) if
    None.
    """
    value_dim = value.size(-1)
    shared = query.size(1) // key.size(1)
    if value_dim < query.size(-1):  # torch has no fused attention for values narrower than keys
        value = F.pad(value, (0, query.size(-1) - value_dim))
    if shared > 1:
        key, value = (x.repeat_interleave(shared, dim=1) for x in (key, value))
    out = _ForestAttention.apply(query, key, value, nodes, softmax_scale)
    return out[..., :value_dim].flatten(1)


def _heads_first(x: torch.Tensor, rows: slice) -> torch.Tensor:
    """[1, heads, rows, d] of x [C, heads, d], as torch's kernels take it."""
    return x[rows].transpose(0, 1)[None]


class _ForestAttention(torch.autograd.Function):
    """query, key, value [C, heads, d] of one dtype. Returns [C, heads, d] of it.

    With a query's merged output o and logsumexp l over all its keys, p_ij = exp(s_ij - l_i) is its probability of a key
    in any block, so the kernel's backward pass gives a block's part of the gradients when it gets o and l in place of
    the block's own.
    """

    @staticmethod
    def forward(ctx, query, key, value, nodes: ForestNodes, scale: float | None) -> torch.Tensor:
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        out = torch.empty_like(query, dtype=wide)
        log_sums = query.new_empty((query.size(1), query.size(0)), dtype=wide)  # [heads, C]
        for queries, keys, is_causal in nodes.blocks():
            part, sums = attend(
                _heads_first(query, queries),
                _heads_first(key, keys),
                _heads_first(value, keys),
                0.0,
                is_causal,
                attn_mask=None,
                scale=scale,
            )
            part, sums = part[0].transpose(0, 1), sums[0]
            if is_causal:
                out[queries], log_sums[:, queries] = part.to(wide), sums
                continue
            before = log_sums[:, queries]
            merged = torch.logaddexp(before, sums)
            kept, added = (part_sums.sub(merged).exp_().t()[..., None] for part_sums in (before, sums))
            out[queries] = out[queries] * kept + part * added
            log_sums[:, queries] = merged
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, log_sums)
        ctx.nodes, ctx.scale = nodes, scale
        return out

    @staticmethod
    @once_differentiable
    # `once_differentiable` makes `ctx` positional; autograd passes it so.
    def backward(ctx, *grad_outputs: torch.Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad_out,) = grad_outputs
        query, key, value, out, log_sums = ctx.saved_tensors
        attend_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        grads = [torch.zeros_like(x, dtype=log_sums.dtype) for x in (query, key, value)]
        grad_query, grad_key, grad_value = grads
        for queries, keys, is_causal in ctx.nodes.blocks():
            parts = attend_backward(
                _heads_first(grad_out, queries),
                _heads_first(query, queries),
                _heads_first(key, keys),
                _heads_first(value, keys),
                _heads_first(out, queries),
                log_sums[:, queries].t().contiguous().t()[None],  # the kernel's own strides
                0.0,
                is_causal,
                attn_mask=None,
                scale=ctx.scale,
            )
            for grad, rows, part in zip((grad_query, grad_key, grad_value), (queries, keys, keys), parts, strict=True):
                grad[rows] += part[0].transpose(0, 1)
        return *(grad.to(query.dtype) for grad in grads), None, None

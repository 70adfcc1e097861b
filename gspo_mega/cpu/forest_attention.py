"""Causal attention over a pack whose rows share prefixes: every token attends to its node and to the node's ancestors.

A pack is a forest. Its nodes are runs of tokens in preorder, so the descendants of a node are the tokens right after
it, up to one bound. Attention is then a sum of blocks without a mask: each node attends to itself causally, and all
descendants of a node attend to the whole of it. A block gives an output and the logsumexp of its scores; blocks of
one query are merged by their logsumexps, as ring attention does (arXiv:2310.01889). No score of two tokens that do not
share a path is computed, and no mask is in memory. A sliding window leaves a token few keys, the last ones of its path;
`ForestNodes.windows` names them, and `packed_sdpa.py` attends to them with masks of a window's size.

Context ranks hold parts of the pack's queries, and all keys. This is for CPUs; GPUs have `engine/flex_attention.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class ForestNodes:
    """The nodes of a pack of C computed tokens, in preorder. `starts` [n + 1]: where each begins, and C. `ends` [n]:
    where the last descendant of each ends. `depths` [C] int64: the position of each token in its rows. `num_rows` [t]
    int64: how many rows have each of this context rank's tokens, 0 for padding; None where nothing asks for it.
    `num_row_tokens`: their sum over the whole pack. `held`: the ranges of positions whose queries this context rank
    has, ascending; None for all. With several ranks no node reaches from one range into another (`for_rank`).
    """

    starts: list[int]
    ends: list[int]
    depths: torch.Tensor
    num_rows: torch.Tensor | None = None
    num_row_tokens: int = 0
    held: tuple[slice, ...] | None = None
    # What all layers share, by window; `masks` is for `engine/flex_attention.py`.
    _windows: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = field(default_factory=dict, compare=False)
    masks: dict[int | None, Any] = field(default_factory=dict, compare=False)

    def for_rank(self, size: int, rank: int) -> ForestNodes:
        """The same forest for context rank `rank` of `size`, which holds the positions of `terms.local_positions` of a
        sequence of C tokens. A node that reaches over their bounds is cut into a chain of nodes.
        """
        if size == 1:
            return self
        length = self.starts[-1] // (2 * size)
        starts, ends = [], []
        for (start, stop), end in zip(itertools.pairwise(self.starts), self.ends, strict=True):
            cuts = [start, *range(start // length * length + length, stop, length)]
            starts += cuts
            ends += [end] * len(cuts)
        held = tuple(slice(k * length, (k + 1) * length) for k in (rank, 2 * size - 1 - rank))
        return replace(self, starts=[*starts, self.starts[-1]], ends=ends, held=held, _windows={}, masks={})

    def blocks(self) -> Iterator[tuple[slice, slice, bool]]:
        """(queries, keys, whether it is causal) of every block with queries of this rank; the first block of each query
        comes before its others. Queries are places among this rank's positions, keys are positions of the pack.
        """
        spans = [slice(start, end) for start, end in itertools.pairwise(self.starts)]
        for span in spans:
            for own in self._own(span.start, span.stop):
                yield own, span, True
        for span, end in zip(spans, self.ends, strict=True):
            for own in self._own(span.stop, end):
                yield own, span, False

    def _own(self, start: int, stop: int) -> Iterator[slice]:
        """The places of this rank's positions from `start` to `stop`, one slice for each range that it holds."""
        before = 0
        for part in self.held or (slice(0, self.starts[-1]),):
            first, last = max(start, part.start), min(stop, part.stop)
            if last > first:
                yield slice(before + first - part.start, before + last - part.start)
            before += part.stop - part.start

    def parents(self) -> list[int]:
        """The parent of each node, -1 for a root."""
        found: list[int] = []
        path: list[int] = []
        for node, start in enumerate(self.starts[:-1]):
            while path and self.ends[path[-1]] <= start:
                path.pop()
            found.append(path[-1] if path else -1)
            path.append(node)
        return found

    def paths(self, length: int) -> Iterator[torch.Tensor]:
        """For every node, the last `length` positions before it on its path, or fewer: [<= length] int64, ascending."""
        parents = self.parents()
        for node in parents:
            parts, missing = [torch.arange(0)], length
            while node >= 0 and missing > 0:
                first, last = self.starts[node], self.starts[node + 1]
                parts.append(torch.arange(max(first, last - missing), last))
                node, missing = parents[node], missing - (last - first)
            yield torch.cat(parts[::-1])

    def windows(self, window: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What this rank's tokens attend to if it is the last `window` tokens of each one's path: (keys, mask) of at
        most `window` queries at a time, all of them in order. keys [K] int64, positions of the pack; mask [queries, K]
        bool, True where the query attends to the key. All layers share them.
        """
        if window not in self._windows:
            self._windows[window] = list(self._make_windows(window))
        return self._windows[window]

    def _make_windows(self, window: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for (start, stop), before in zip(itertools.pairwise(self.starts), self.paths(window - 1), strict=True):
            if not any(self._own(start, stop)):
                continue
            path = torch.cat([before, torch.arange(start, stop)])
            for first in range(len(before), len(path), window):
                last = min(first + window, len(path))
                oldest = max(0, first - window + 1)
                distance = torch.arange(first, last)[:, None] - torch.arange(oldest, last)
                yield path[oldest:last], (distance >= 0) & (distance < window)


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
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of this rank's tokens to their node up to themselves and to all ancestors of the node: [t, heads x v].

    query [t, heads, d], key [C, kv_heads, d], value [C, kv_heads, v <= d], on a CPU. `softmax_scale`: 1 / sqrt(d) if
    None. `sinks` [heads]: the score of one more term of each head's softmax, which has no value.
    """
    value_dim = value.size(-1)
    shared = query.size(1) // key.size(1)
    if value_dim < query.size(-1):  # torch has no fused attention for values narrower than keys
        value = F.pad(value, (0, query.size(-1) - value_dim))
    if shared > 1:
        key, value = (x.repeat_interleave(shared, dim=1) for x in (key, value))
    out = _ForestAttention.apply(query, key, value, sinks, nodes, softmax_scale)
    return out[..., :value_dim].flatten(1)


def _heads_first(x: torch.Tensor, rows: slice) -> torch.Tensor:
    """[1, heads, rows, d] of x [C, heads, d], as torch's kernels take it; bf16 widened to float32.

    The backward kernel takes up to four times as long for a block of some 60 bf16 queries as for one of float32, and
    widening costs a fiftieth of it.
    """
    x = x[rows].transpose(0, 1)[None]
    return x if x.dtype == torch.float64 else x.float()


class _ForestAttention(torch.autograd.Function):
    """query [t, heads, d], key and value [C, heads, d] of one dtype, sinks [heads] or None. Returns [t, heads, d].

    With a query's merged output o and logsumexp l over all its keys, p_ij = exp(s_ij - l_i) is its probability of a key
    in any block, so the kernel's backward pass gives a block's part of the gradients when it gets o and l in place of
    the block's own. A sink z is one more term of the sum, of the probability exp(z - l_i). It has no value, so its
    gradient is -sum_i exp(z - l_i) (o_i . do_i).
    """

    @staticmethod
    def forward(ctx, query, key, value, sinks, nodes: ForestNodes, scale: float | None) -> torch.Tensor:
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        out = torch.empty_like(query, dtype=wide)
        log_sums = query.new_empty((query.size(1), query.size(0)), dtype=wide)  # [heads, t]
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
                out[queries], log_sums[:, queries] = part, sums
                continue
            before = log_sums[:, queries]
            merged = torch.logaddexp(before, sums)
            kept, added = (part_sums.sub(merged).exp_().t()[..., None] for part_sums in (before, sums))
            out[queries] = out[queries] * kept + part * added
            log_sums[:, queries] = merged
        if sinks is not None:
            merged = torch.logaddexp(log_sums, sinks.to(wide)[:, None])
            out *= log_sums.sub_(merged).exp_().t()[..., None]
            log_sums = merged
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, out, log_sums)
        ctx.nodes, ctx.scale = nodes, scale
        return out

    @staticmethod
    @once_differentiable
    # `once_differentiable` makes `ctx` positional; autograd passes it so.
    def backward(ctx, *grad_outputs: torch.Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad_out,) = grad_outputs
        query, key, value, sinks, out, log_sums = ctx.saved_tensors
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
        grad_sinks = None
        if sinks is not None:
            products = (grad_out * out).sum(dim=-1, dtype=log_sums.dtype).t()
            grad_sinks = -((sinks.to(log_sums.dtype)[:, None] - log_sums).exp() * products).sum(dim=1).to(sinks.dtype)
        return *(grad.to(query.dtype) for grad in grads), grad_sinks, None, None

"""Causal attention over packed sequences with torch's SDPA, for use without Transformer Engine's kernels.

It takes the same packed (`thd`) input and context-parallel layout as Transformer Engine's attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

from gspo_mega.algorithm.terms import local_positions
from gspo_mega.cpu.forest_attention import ForestNodes, forest_attend, forest_of


@dataclass
class PaddedLayout:
    """The place of each packed row in a [S, longest] rectangle; all tensors are this rank's.

    `query_rows` [S, Lq] and `key_rows` [S, Lk] int64 are indices of packed rows (0 for padding). `mask` [S, 1, Lq, Lk]
    bool is True if the query attends to the key, or None for plain causal attention. `packed` [t] int64 selects this
    rank's rows from the flattened query rectangle. `positions` [S, Lq] int64 are those of the queries, 0 for padding.
    """

    query_rows: torch.Tensor
    key_rows: torch.Tensor
    mask: torch.Tensor | None
    packed: torch.Tensor
    positions: torch.Tensor
    masks: dict[tuple[int | None, bool, torch.dtype], torch.Tensor] = field(default_factory=dict)

    def to(self, device: torch.device) -> PaddedLayout:
        mask = None if self.mask is None else self.mask.to(device)
        rows = (self.query_rows.to(device), self.key_rows.to(device))
        return PaddedLayout(*rows, mask, self.packed.to(device), self.positions.to(device))

    def explicit_mask(self, window: int | None, has_sink: bool, dtype: torch.dtype) -> torch.Tensor:
        """Return what is added to the scores of causal attention to the last `window` tokens, all of them if None: [S,
        1, Lq, Lk] of `dtype`, 0 or -inf, with one more column of 0 for a sink. All layers of a kind share one.
        """
        key = (window, has_sink, dtype)
        if key not in self.masks:
            keys = torch.arange(self.key_rows.size(1), device=self.positions.device)
            positions = self.positions[:, None, :, None]
            hidden = keys > positions
            if window is not None:
                hidden = hidden | (keys <= positions - window)
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)
            self.masks[key] = F.pad(mask, (0, 1)) if has_sink else mask
        return self.masks[key]


def _pad(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def padded_layout(params: PackedSeqParams, cp_size: int = 1, cp_rank: int = 0) -> PaddedLayout:
    """Return the layout of a pack, made once for all layers."""
    holder: Any = params  # keeps the layout in an attribute that Megatron's class does not declare
    cached = getattr(params, "padded_layout", None)
    if cached is not None:
        return cached
    lengths = (params.cu_seqlens_q[1:] - params.cu_seqlens_q[:-1]).tolist()
    local = [length // cp_size for length in lengths]
    starts = [0]
    for length in local:
        starts.append(starts[-1] + length)
    query_rows = [torch.arange(starts[s], starts[s + 1]) for s in range(len(lengths))]
    queries = _pad(query_rows)
    packed = torch.cat([torch.arange(n) + s * queries.size(1) for s, n in enumerate(local)])
    own_positions = _pad([local_positions(length, cp_size, cp_rank) for length in lengths])
    if cp_size == 1:
        layout = PaddedLayout(queries, queries, None, packed, own_positions)
    else:
        key_rows, mask = [], torch.zeros(len(lengths), 1, queries.size(1), max(lengths), dtype=torch.bool)
        for s, length in enumerate(lengths):
            rows = torch.empty(length, dtype=torch.int64)
            for rank in range(cp_size):
                positions = local_positions(length, cp_size, rank)
                rows[positions] = torch.arange(local[s]) + starts[s] + rank * starts[-1]
            key_rows.append(rows)
            own = local_positions(length, cp_size, cp_rank)
            mask[s, 0, : local[s], :length] = own[:, None] >= torch.arange(length)[None]
            mask[s, 0, local[s] :, 0] = True  # padding rows attend to one key, so that no row is fully masked
        layout = PaddedLayout(queries, _pad(key_rows), mask, packed, own_positions)
    holder.padded_layout = layout = layout.to(params.cu_seqlens_q.device)
    return layout


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    params: PackedSeqParams,
    context_group: dist.ProcessGroup | None,
    softmax_scale: float | None,
    sinks: torch.Tensor | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Compute causal grouped-query attention over packed sequences.

    query [t, heads, d], key [t, kv_heads, d], value [t, kv_heads, v] of one float dtype, where t is this rank's share
    of the packed tokens and v equals d except in latent attention. Returns [t, heads * v] of that dtype. Under context
    parallelism each rank holds the two chunks of every sequence that `local_positions` names; keys and values are
    gathered over the context group; None is a group of one rank. `softmax_scale`: 1 / sqrt(d) if None. `sinks` [heads]:
    the score of one more term of each head's softmax, which has no value. `window`: a token attends to this many of the
    last tokens, itself included; to all if None. Rows that share prefixes (`forest_attention.py`) are one sequence of
    all computed tokens, on a CPU. Collective over the context group if its size is above 1.
    """
    cp_size, cp_rank = (1, 0) if context_group is None else (context_group.size(), context_group.rank())
    if (forest := forest_of(params)) is not None:
        key, value = (of_whole_pack(x, context_group) for x in (key, value))
        if window is not None:
            return _attend_to_windows(query, key, value, forest, softmax_scale, sinks, window)
        return forest_attend(query, key, value, forest, softmax_scale, sinks)
    key, value = (_gathered(x, context_group) for x in (key, value))
    layout = padded_layout(params, cp_size, cp_rank)
    value_dim = value.size(-1)
    q = query[layout.query_rows].transpose(1, 2)  # [S, heads, Lq, d]
    k, v = (x[layout.key_rows].transpose(1, 2) for x in (key, value))
    mask = layout.mask
    if sinks is not None or window is not None:
        mask = layout.explicit_mask(window, sinks is not None, query.dtype)
    if sinks is not None:
        scale = 1 / math.sqrt(query.size(-1)) if softmax_scale is None else softmax_scale
        q, k, v = with_sinks(q, k, v, sinks / scale)
        softmax_scale = scale
    if value_dim < q.size(-1):  # torch has no fused attention for values narrower than keys
        v = F.pad(v, (0, q.size(-1) - value_dim))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=softmax_scale, enable_gqa=True
    )
    out = out.transpose(1, 2).flatten(0, 1)[layout.packed][..., :value_dim]
    return out.flatten(1)


def _gathered(x: torch.Tensor, context_group: dist.ProcessGroup | None) -> torch.Tensor:
    """The rows of all context ranks, rank after rank."""
    if context_group is None or context_group.size() == 1:
        return x
    return gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True, group=context_group)


def of_whole_pack(x: torch.Tensor, context_group: dist.ProcessGroup | None) -> torch.Tensor:
    """x [C, ...] of a pack that is one sequence, from this context rank's part [t, ...]. Collective over the context
    group if its size is above 1.
    """
    gathered, size = _gathered(x, context_group), 1 if context_group is None else context_group.size()
    if size == 1:
        return gathered
    rows = torch.cat([local_positions(len(gathered), size, rank) for rank in range(size)])
    return gathered[rows.argsort().to(gathered.device)]


def _attend_to_windows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    nodes: ForestNodes,
    softmax_scale: float | None,
    sinks: torch.Tensor | None,
    window: int,
) -> torch.Tensor:
    """`attend` to the last `window` tokens of each token's path. key [C, kv_heads, d], value [C, kv_heads, v]."""
    value_dim, scale = value.size(-1), 1 / math.sqrt(query.size(-1)) if softmax_scale is None else softmax_scale
    parts = nodes.windows(window)
    rows = torch.cat([keys for keys, _ in parts]).to(key.device)
    all_keys, all_values = (x.index_select(0, rows).split([len(keys) for keys, _ in parts]) for x in (key, value))
    outs = []
    for q, k, v, (_, mask) in zip(query.split([len(mask) for _, mask in parts]), all_keys, all_values, parts):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        mask = mask.to(q.device)
        if sinks is not None:
            q, k, v = with_sinks(q, k, v, sinks / scale)
            mask = F.pad(mask, (0, 1), value=True)
        if value_dim < q.size(-1):
            v = F.pad(v, (0, q.size(-1) - value_dim))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
        outs.append(out[0].transpose(0, 1)[..., :value_dim])
    return torch.cat(outs).flatten(1)


def with_sinks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, products: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys and values with one more key, after all others, whose product with a query of head h is
    `products[h]`, and whose value is zero: a sink for an attention that has none.

    query [S, heads, Lq, d], key and value [S, kv_heads, Lk, d or v], products [heads]; the gradient reaches them all.
    Query heads share keys, so queries and keys get one more element for each head that shares a key: in a query, 1 at
    the head's own place; in the new key, the products of all these heads; zero elsewhere.
    """
    batch, heads, num_queries, _ = query.shape
    kv_heads = key.size(1)
    shared = heads // kv_heads
    places = torch.eye(shared, dtype=query.dtype, device=query.device).repeat(kv_heads, 1)  # [heads, shared]
    query = torch.cat([query, places[None, :, None].expand(batch, heads, num_queries, shared)], dim=-1)
    sink = F.pad(products.to(key.dtype).view(1, kv_heads, 1, shared), (key.size(-1), 0))
    key = torch.cat([F.pad(key, (0, shared)), sink.expand(batch, -1, -1, -1)], dim=2)
    return query, key, F.pad(value, (0, 0, 0, 1))

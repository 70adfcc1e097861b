"""Batched attention for SGLang on a CPU: one scaled-dot-product call for many requests.

SGLang's own CPU fallback (`torch_native`) loops over requests. With 128 concurrent requests, that loop is most of the
scheduler's time. Here requests of similar length share a call: they are padded to the longest, masked, and read from
the flattened cache with `index_select` (advanced indexing costs about ten times as much). `BatchedCpuAttention`
computes causal self-attention of decode and prefill, whole or in sliding windows, with or without sinks, which the
stock backend does not have. The stock backend does everything else (cross attention, encoders).

`InvariantCpuAttention`, at the end, is the attention of `engine.batch_invariant`: it uses the same plans and caches,
and its order of additions does not depend on the batch.

Only a server process imports this file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch.nn.functional import pad, scaled_dot_product_attention

from gspo_mega.algorithm.fp8 import from_fp8
from gspo_mega.cpu.batch_invariant import attend as attend_in_fixed_order

_MAX_SCORES = 1 << 22
"""The most query x key positions of all requests in one call. It limits the padded copies and the mask."""
_WIDENED = 1 << 18
"""About how many numbers of the keys are widened to float32 at a time."""


@dataclass
class _Decode:
    """Requests of similar length that decode one token each. B requests, K padded keys.

    `members` [B], their rows of the query, None if they are all rows in order; `slots` [B, K] int64, cache slots;
    `lengths` [B], the keys of each.
    """

    members: torch.Tensor | None
    slots: torch.Tensor
    lengths: torch.Tensor
    _per_heads: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def per_heads(self, kv_heads: int, window: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rows [B * heads * K] of a cache seen as [slots * heads, dim], and the bias [B * heads, 1, K] float32,
        -inf where a key is missing or more than `window` tokens before the query's (no limit if `window` is below 0).
        """
        found = self._per_heads.get((kv_heads, window))
        if found is None:
            rows = self.slots[:, None] * kv_heads + torch.arange(kv_heads)[:, None]
            keys, lengths = torch.arange(self.slots.shape[1]), self.lengths[:, None]
            missing = keys >= lengths
            if window >= 0:
                missing |= keys < lengths - 1 - window
            bias = torch.zeros(missing.shape).masked_fill_(missing, -torch.inf)[:, None]
            found = self._per_heads[kv_heads, window] = (rows.reshape(-1), bias.repeat_interleave(kv_heads, dim=0))
        return found


@dataclass
class Bucket:
    """Requests of similar length that share one call. B requests, Q padded queries, K padded keys.

    `query_rows` [B*Q] int64, rows of the flat query; `valid_rows` [n] int64, which of the B*Q are no padding, None if
    all are; `slots` [B*K], cache slots; `last_key` [B, Q], the position of each query.
    """

    num_requests: int
    num_queries: int
    num_keys: int
    query_rows: torch.Tensor
    valid_rows: torch.Tensor | None
    slots: torch.Tensor
    last_key: torch.Tensor
    _masks: dict[int, torch.Tensor] = field(default_factory=dict)

    def mask(self, window: int) -> torch.Tensor:
        """Return [B, 1, Q, K] bool, True where attention is allowed: to keys at most `window` tokens before the query's
        (no limit if `window` is below 0).
        """
        found = self._masks.get(window)
        if found is None:
            keys, last = torch.arange(self.num_keys), self.last_key[:, None, :, None]
            found = keys <= last
            if window >= 0:
                found &= keys >= last - window
            self._masks[window] = found
        return found


def group_by_length(num_queries: list[int], num_keys: list[int], max_scores: int = _MAX_SCORES) -> list[list[int]]:
    """Return groups of request indices, whose padded work is at most about four times the real work.

    Both counts of a group's members are more than half of its largest, and members x queries x keys stays
    within `max_scores` (a single request may exceed it).
    """
    groups: list[list[int]] = []
    order = sorted(range(len(num_keys)), key=lambda i: (-num_queries[i], -num_keys[i]))
    open_groups: list[tuple[list[int], int, int]] = []
    for index in order:
        for members, queries, keys in open_groups:
            fits = num_queries[index] * 2 > queries and keys < num_keys[index] * 2 and num_keys[index] <= keys
            if fits and (len(members) + 1) * queries * keys <= max_scores:
                members.append(index)
                break
        else:
            members = [index]
            groups.append(members)
            open_groups.append((members, num_queries[index], num_keys[index]))
    return groups


class BatchedCpuAttention(TorchNativeAttnBackend):
    """Equal to `torch_native` up to rounding (log-probs within 1e-5 in fp32), and several times as fast."""

    def __init__(self, model_runner):
        super().__init__(model_runner)
        self._buckets: list[Bucket] = []
        self._decodes: list[_Decode] = []

    def get_cpu_graph_seq_len_fill_value(self) -> int:
        """Return the length of a request that only fills up a batch of data-parallel attention."""
        return 1

    def init_forward_metadata(self, forward_batch):
        """Plan the calls once per forward; every layer reuses the plan."""
        super().init_forward_metadata(forward_batch)
        self._buckets, self._decodes = [], []
        if forward_batch.forward_mode.is_idle():
            return
        assert self.req_to_token_pool is not None, "the pool exists before the first forward"
        table = self.req_to_token_pool.req_to_token
        if forward_batch.forward_mode.is_decode_or_idle():
            self.plan_decode_step(table, forward_batch)
            return
        num_keys: list[int] = forward_batch.seq_lens.tolist()
        assert forward_batch.extend_seq_lens is not None, "a prefill has its lengths"
        num_queries: list[int] = forward_batch.extend_seq_lens.tolist()
        self._buckets = plan_buckets(table, forward_batch.req_pool_indices, num_queries, num_keys)

    def plan_decode_step(self, table, forward_batch) -> None:
        """Plan the calls of a step in which every request decodes one token."""
        self._decodes = _plan_decodes(table, forward_batch.req_pool_indices, forward_batch.seq_lens)

    def attend_bucket(self, bucket: Bucket, query, keys, values, output, layer, sinks) -> None:
        """Write the bucket's rows of `output` [tokens, heads*dim]; `keys`, `values` [slots, kv heads*dim]; `sinks` as
        in `_attend_decode`.
        """
        _attend(bucket, query, keys, values, output, layer, sinks)

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None):
        if not _is_plain(layer, forward_batch):
            _refuse_sinks(sinks)
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, sinks)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None):
        if not _is_plain(layer, forward_batch):
            _refuse_sinks(sinks)
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, sinks)

    def attend_plain(self, q, k, v, layer, forward_batch):
        """Store `k` and `v` [tokens, kv heads, dim] and attend, for a layer known to be plain."""
        return self._forward(q, k, v, layer, forward_batch, True)

    def _forward(self, q, k, v, layer, forward_batch, save_kv_cache, sinks=None):
        if save_kv_cache and k is not None and v is not None:
            # SGLang annotates this argument as a tensor and takes its own KVWriteLoc.
            location = cast("Any", KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc))
            self.token_to_kv_pool.set_kv_buffer(layer, location, k, v)
        query = q.reshape(-1, layer.tp_q_head_num * layer.qk_head_dim)
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        if len(self._decodes) == 1 and self._decodes[0].members is None:
            return _attend_decode(self._decodes[0], query, keys, values, layer, sinks)
        output = query.new_empty(query.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        for decode in self._decodes:
            output.index_copy_(0, decode.members, _attend_decode(decode, query, keys, values, layer, sinks))
        keys, values = keys.view(keys.shape[0], -1), values.view(values.shape[0], -1)
        for bucket in self._buckets:
            self.attend_bucket(bucket, query, keys, values, output, layer, sinks)
        return output


def _is_plain(layer, forward_batch) -> bool:
    return (
        not layer.is_cross_attention and layer.attn_type == AttentionType.DECODER and forward_batch.encoder_lens is None
    )


def _refuse_sinks(sinks: torch.Tensor | None) -> None:
    if sinks is not None:
        raise NotImplementedError("sinks in cross attention, or with an encoder")


def _window(layer) -> int:
    """Return how many tokens before its own a query attends to; below 0 for all."""
    return -1 if layer.sliding_window_size is None else layer.sliding_window_size


def _plan_decodes(table, requests, lengths) -> list[_Decode]:
    """Plan a decode step. `table` [requests, context] cache slots; `requests` [B], its rows; `lengths` [B], the keys of
    each.
    """
    shortest, longest = int(lengths.min()), int(lengths.max())
    if longest < 2 * shortest and len(lengths) * longest <= _MAX_SCORES:
        return [_plan_decode(table, None, requests, lengths, longest)]
    counts = lengths.tolist()
    plans = []
    for group in group_by_length([1] * len(counts), counts):
        members = torch.tensor(group)
        own = lengths.index_select(0, members)
        plans.append(_plan_decode(table, members, requests.index_select(0, members), own, int(own.max())))
    return plans


def _plan_decode(table, members, requests, lengths, num_keys: int) -> _Decode:
    slots = table[:, :num_keys].index_select(0, requests).long()
    missing = torch.arange(num_keys) >= lengths[:, None]
    # Padding reads the request's own first key: always written, so no stale NaN meets a zero weight.
    slots = torch.where(missing, slots[:, :1], slots)
    return _Decode(members, slots, lengths)


def _attend_decode(decode: _Decode, query, keys, values, layer, sinks):
    """Return [B, heads * dim] for one token of each request. `keys`, `values` [slots, kv heads, dim]; `sinks` [heads]
    or None: the score of one more term of each head's softmax, which has no value.
    """
    kv_heads, dtype = layer.tp_k_head_num, query.dtype
    rows, bias = decode.per_heads(kv_heads, _window(layer))
    if decode.members is not None:
        query = query.index_select(0, decode.members)
    # A key-value head of a request is one matrix of a batch; the query heads that share it are its rows.
    q = query.view(len(bias), -1, layer.qk_head_dim)
    keys, values = keys.view(-1, layer.qk_head_dim), values.view(-1, layer.v_head_dim)
    if dtype == torch.float32:
        k, v = (read_cache(part, rows, dtype).view(len(bias), -1, part.shape[-1]) for part in (keys, values))
        return _weighted(q, k, v, bias, layer.scaling, sinks).reshape(query.shape[0], -1)
    # Some requests at a time, so that what is widened to float32 stays in the processor's cache. torch's fused
    # attention takes up to twice as long for one query.
    num_keys = rows.shape[0] // len(bias)
    step = max(1, _WIDENED // (num_keys * layer.qk_head_dim * kv_heads)) * kv_heads
    parts = []
    for few, few_rows, few_bias in zip(q.split(step), rows.split(step * num_keys), bias.split(step), strict=True):
        k, v = (read_cache(p, few_rows, dtype).float().view(len(few), num_keys, p.shape[-1]) for p in (keys, values))
        parts.append(_weighted(few.float(), k, v, few_bias, layer.scaling, sinks).to(dtype))
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out.reshape(query.shape[0], -1)


def _weighted(q, k, v, bias, scaling, sinks):
    """Return the weighted values [N, heads of one key, dim]. `q` as these, `k` and `v` [N, K, dim], `bias` [N, 1, K],
    all float32; N are requests x key-value heads, `sinks` as in `_attend_decode`.
    """
    scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=scaling)
    if sinks is None:
        return torch.bmm(scores.softmax(dim=-1), v)
    per_key = q.shape[1]
    sink = sinks.float().view(-1, per_key, 1).repeat(len(q) * per_key // len(sinks), 1, 1)
    return torch.bmm(torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1], v)


def plan_buckets(table, requests, num_queries: list[int], num_keys: list[int]) -> list[Bucket]:
    """Plan a prefill. `table` [requests, context] cache slots; `requests` [B], its rows; `num_queries` and `num_keys`:
    the new tokens and the keys of each.
    """
    first_rows = [0]
    for count in num_queries:
        first_rows.append(first_rows[-1] + count)
    return [
        _plan_bucket(
            table[requests[members]],
            torch.tensor([num_queries[i] for i in members]),
            torch.tensor([num_keys[i] for i in members]),
            torch.tensor([first_rows[i] for i in members]),
        )
        for members in group_by_length(num_queries, num_keys)
    ]


def _plan_bucket(table, num_queries, num_keys, first_rows) -> Bucket:
    """Plan one call. `table` [B, context] cache slots of each request; the counts and `first_rows` [B]."""
    batch, queries, keys = len(num_keys), int(num_queries.max()), int(num_keys.max())
    query_position = torch.arange(queries)
    key_position = torch.arange(keys)
    # Padding reads the request's own first key and query: always written, so no stale NaN meets a zero weight.
    key_valid = key_position < num_keys[:, None]
    slots = torch.where(key_valid, table[:, :keys], table[:, :1])
    query_valid = query_position < num_queries[:, None]
    query_rows = first_rows[:, None] + torch.where(query_valid, query_position, 0)
    last_key = (num_keys - num_queries)[:, None] + torch.where(query_valid, query_position, 0)
    whole = bool(query_valid.all())
    return Bucket(
        num_requests=batch,
        num_queries=queries,
        num_keys=keys,
        query_rows=query_rows.reshape(-1),
        valid_rows=None if whole else query_valid.reshape(-1).nonzero().squeeze(1),
        slots=slots.reshape(-1),
        last_key=last_key,
    )


def _attend(bucket: Bucket, query, keys, values, output, layer, sinks) -> None:
    """Implement `BatchedCpuAttention.attend_bucket`."""
    batch, num_queries, num_keys = bucket.num_requests, bucket.num_queries, bucket.num_keys
    kv_heads = layer.tp_k_head_num
    per_kv_head = layer.tp_q_head_num // kv_heads
    q = query.index_select(0, bucket.query_rows)
    k = read_cache(keys, bucket.slots, q.dtype).view(batch, num_keys, kv_heads, layer.qk_head_dim).transpose(1, 2)
    v = read_cache(values, bucket.slots, q.dtype).view(batch, num_keys, kv_heads, layer.v_head_dim).transpose(1, 2)
    # The query heads of one key-value head become extra query rows, so keys and values are not repeated.
    q = q.view(batch, num_queries, kv_heads, per_kv_head, layer.qk_head_dim)
    q = q.permute(0, 2, 3, 1, 4).reshape(batch, kv_heads, per_kv_head * num_queries, layer.qk_head_dim)
    mask = bucket.mask(_window(layer))
    mask = mask.repeat(1, 1, per_kv_head, 1) if num_queries > 1 else mask
    if sinks is not None:
        q, k, v, mask = _with_sinks(q, k, v, mask, sinks.to(q.dtype) / layer.scaling)
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=layer.scaling)
    out = out[..., : layer.v_head_dim].reshape(batch, kv_heads, per_kv_head, num_queries, layer.v_head_dim)
    write_rows(bucket, output, out.permute(0, 3, 1, 2, 4).reshape(batch * num_queries, -1))


def write_rows(bucket: Bucket, output: torch.Tensor, rows: torch.Tensor) -> None:
    """Copy the `rows` [B*Q, n] that are not padding to their places in `output` [tokens, n]."""
    if bucket.valid_rows is None:
        output.index_copy_(0, bucket.query_rows, rows)
    else:
        valid = bucket.valid_rows
        output.index_copy_(0, bucket.query_rows.index_select(0, valid), rows.index_select(0, valid))


def _with_sinks(q, k, v, mask, products):
    """Append one more key, whose product with a query of head h is `products[h]`, and whose value is zero. For that,
    queries and keys get one more element for each of the query heads that share a key. `q` [B, kv heads, heads of one
    key * Q, dim], `k` and `v` [B, kv heads, K, dim]; `v` becomes as wide as `k`.
    """
    batch, kv_heads, rows, dim = q.shape
    shared = len(products) // kv_heads
    places = torch.eye(shared, dtype=q.dtype).repeat_interleave(rows // shared, dim=0)
    q = torch.cat([q, places.expand(batch, kv_heads, rows, shared)], dim=-1)
    sink = pad(products.view(1, kv_heads, 1, shared), (dim, 0)).expand(batch, -1, -1, -1)
    k = torch.cat([pad(k, (0, shared)), sink], dim=2)
    return q, k, pad(v, (0, dim + shared - v.shape[-1], 0, 1)), pad(mask, (0, 1), value=True)


def read_cache(cache: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return rows `slots` of a cache [slots, n] as `dtype`. An FP8 cache has no scale."""
    if cache.dtype == torch.float8_e4m3fn:
        return from_fp8(cache.view(torch.uint8).index_select(0, slots).view(cache.dtype)).to(dtype)
    return cache.index_select(0, slots).to(dtype)


class InvariantCpuAttention(BatchedCpuAttention):
    """Attention that adds over the keys in a fixed order; a decode step is a prefill of one token."""

    def plan_decode_step(self, table, forward_batch) -> None:
        num_keys: list[int] = forward_batch.seq_lens.tolist()
        self._buckets = plan_buckets(table, forward_batch.req_pool_indices, [1] * len(num_keys), num_keys)

    def attend_bucket(self, bucket, query, keys, values, output, layer, sinks) -> None:
        shape, kv_heads = (bucket.num_requests, bucket.num_keys), layer.tp_k_head_num
        q = query.index_select(0, bucket.query_rows)
        k, v = (
            read_cache(cache, bucket.slots, q.dtype).view(*shape, kv_heads, dim)
            for cache, dim in ((keys, layer.qk_head_dim), (values, layer.v_head_dim))
        )
        q = q.view(bucket.num_requests, bucket.num_queries, layer.tp_q_head_num, layer.qk_head_dim)
        rows = attend_in_fixed_order(q, k, v, bucket.last_key, layer.scaling)
        write_rows(bucket, output, rows.flatten(2).flatten(0, 1))

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None):
        raise NotImplementedError("engine.batch_invariant: this model's layers are not those that are computed so")

    forward_extend = forward_decode

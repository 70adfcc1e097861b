"""Batched attention for SGLang on CPU: one scaled-dot-product call for many requests.

SGLang's own CPU fallback (`torch_native`) loops over requests; with 128 concurrent requests that loop is most of the
scheduler's time. Here requests of similar length share a call: padded to the longest, masked, and read from the
flattened cache by `index_select` (advanced indexing costs about ten times as much). Owns full causal self-attention of
decode and prefill; the stock backend it derives from does everything else (cross attention, sliding windows, encoders).
Beside it the attention of `engine.batch_invariant`, whose order of additions does not depend on the batch.
Imported inside a server process only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch.nn.functional import scaled_dot_product_attention

from gspo_mega.batch_invariant.fixed_order_attention import attend as attend_in_fixed_order
from gspo_mega.quantization.fp8 import from_fp8

_MAX_SCORES = 1 << 22
"""Most query x key positions of all requests of one call. It bounds the padded copies and the mask."""


@dataclass
class _Decode:
    """Requests of similar length that decode one token each. B requests, K padded keys.

    `members` [B], their rows of the query, None where they are all of them in order; `slots` [B, K] int64, cache slots;
    `bias` [B, 1, K] float32, -inf where there is no key.
    """

    members: torch.Tensor | None
    slots: torch.Tensor
    bias: torch.Tensor
    _per_heads: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def per_heads(self, kv_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows [B * heads * K] of a cache seen as [slots * heads, dim], and the bias [B * heads, 1, K]."""
        found = self._per_heads.get(kv_heads)
        if found is None:
            rows = self.slots[:, None] * kv_heads + torch.arange(kv_heads)[:, None]
            found = self._per_heads[kv_heads] = (rows.reshape(-1), self.bias.repeat_interleave(kv_heads, dim=0))
        return found


@dataclass
class Bucket:
    """Requests of similar length that share one call. B requests, Q padded queries, K padded keys.

    `query_rows` [B*Q] int64, rows of the flat query; `valid_rows` [n] int64, which of the B*Q are no padding,
    None where all are; `slots` [B*K], cache slots; `mask` [B, 1, Q, K] bool, True where attention is allowed.
    """

    num_requests: int
    num_queries: int
    num_keys: int
    query_rows: torch.Tensor
    valid_rows: torch.Tensor | None
    slots: torch.Tensor
    mask: torch.Tensor


def group_by_length(num_queries: list[int], num_keys: list[int], max_scores: int = _MAX_SCORES) -> list[list[int]]:
    """Indices of requests in groups whose padded work is at most about four times the real work.

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
        """The length of a request that is there to fill a batch, with data-parallel attention."""
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

    def attend_bucket(self, bucket: Bucket, query, keys, values, output, layer) -> None:
        """Write the bucket's rows of `output` [tokens, heads*dim]; `keys`, `values` [slots, kv heads*dim]."""
        _attend(bucket, query, keys, values, output, layer)

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True):
        if not _is_plain(layer, forward_batch):
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True):
        if not _is_plain(layer, forward_batch):
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache)

    def attend_plain(self, q, k, v, layer, forward_batch):
        """Store `k` and `v` [tokens, kv heads, dim] and attend, for a layer known to be plain."""
        return self._forward(q, k, v, layer, forward_batch, True)

    def _forward(self, q, k, v, layer, forward_batch, save_kv_cache):
        if save_kv_cache and k is not None and v is not None:
            # SGLang annotates this argument as a tensor and takes its own KVWriteLoc.
            location = cast("Any", KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc))
            self.token_to_kv_pool.set_kv_buffer(layer, location, k, v)
        query = q.reshape(-1, layer.tp_q_head_num * layer.qk_head_dim)
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        if len(self._decodes) == 1 and self._decodes[0].members is None:
            return _attend_decode(self._decodes[0], query, keys, values, layer)
        output = query.new_empty(query.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        for decode in self._decodes:
            output.index_copy_(0, decode.members, _attend_decode(decode, query, keys, values, layer))
        keys, values = keys.view(keys.shape[0], -1), values.view(values.shape[0], -1)
        for bucket in self._buckets:
            self.attend_bucket(bucket, query, keys, values, output, layer)
        return output


class InvariantCpuAttention(BatchedCpuAttention):
    """Attention that adds over the keys in a fixed order; a decode step is a prefill of one token."""

    def plan_decode_step(self, table, forward_batch) -> None:
        num_keys: list[int] = forward_batch.seq_lens.tolist()
        self._buckets = plan_buckets(table, forward_batch.req_pool_indices, [1] * len(num_keys), num_keys)

    def attend_bucket(self, bucket, query, keys, values, output, layer) -> None:
        shape, kv_heads = (bucket.num_requests, bucket.num_keys), layer.tp_k_head_num
        q = query.index_select(0, bucket.query_rows)
        k, v = (
            read_cache(cache, bucket.slots, q.dtype).view(*shape, kv_heads, dim)
            for cache, dim in ((keys, layer.qk_head_dim), (values, layer.v_head_dim))
        )
        q = q.view(bucket.num_requests, bucket.num_queries, layer.tp_q_head_num, layer.qk_head_dim)
        last_keys = bucket.mask[:, 0].sum(dim=-1) - 1
        rows = attend_in_fixed_order(q, k, v, last_keys, layer.scaling)
        write_rows(bucket, output, rows.flatten(2).flatten(0, 1))

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True):
        raise NotImplementedError("engine.batch_invariant: this model's layers are not those that are computed so")

    forward_extend = forward_decode


def _is_plain(layer, forward_batch) -> bool:
    window = layer.sliding_window_size
    return (
        not layer.is_cross_attention
        and layer.attn_type == AttentionType.DECODER
        and forward_batch.encoder_lens is None
        and (window is None or window < 0)
    )


def _plan_decodes(table, requests, lengths) -> list[_Decode]:
    """`table` [requests, context] cache slots; `requests` [B], its rows; `lengths` [B], the keys of each."""
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
    bias = torch.zeros(missing.shape).masked_fill_(missing, -torch.inf)
    return _Decode(members, slots, bias[:, None])


def _attend_decode(decode: _Decode, query, keys, values, layer):
    """[B, heads * dim] of one token of each request; `keys`, `values` [slots, kv heads, dim]."""
    kv_heads, dtype = layer.tp_k_head_num, query.dtype
    rows, bias = decode.per_heads(kv_heads)
    if decode.members is not None:
        query = query.index_select(0, decode.members)
    # A key-value head of a request is one matrix of a batch; the query heads that share it are its rows.
    q = query.view(len(bias), -1, layer.qk_head_dim)
    k = read_cache(keys.view(-1, layer.qk_head_dim), rows, dtype).view(len(bias), -1, layer.qk_head_dim)
    v = read_cache(values.view(-1, layer.v_head_dim), rows, dtype).view(len(bias), -1, layer.v_head_dim)
    if dtype == torch.float32:
        scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=layer.scaling)
        out = torch.bmm(scores.softmax(dim=-1), v)
    else:  # this keeps its sums in float32
        out = scaled_dot_product_attention(
            q[:, None], k[:, None], v[:, None], attn_mask=bias[:, None].to(dtype), scale=layer.scaling
        )
    return out.reshape(query.shape[0], -1)


def plan_buckets(table, requests, num_queries: list[int], num_keys: list[int]) -> list[Bucket]:
    """`table` [requests, context] cache slots; `requests` [B], its rows; the new tokens and the keys of each."""
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
    """`table` [B, context] cache slots of each request; the counts and `first_rows` [B]."""
    batch, queries, keys = len(num_keys), int(num_queries.max()), int(num_keys.max())
    query_position = torch.arange(queries)
    key_position = torch.arange(keys)
    # Padding reads the request's own first key and query: always written, so no stale NaN meets a zero weight.
    key_valid = key_position < num_keys[:, None]
    slots = torch.where(key_valid, table[:, :keys], table[:, :1])
    query_valid = query_position < num_queries[:, None]
    query_rows = first_rows[:, None] + torch.where(query_valid, query_position, 0)
    last_key = (num_keys - num_queries)[:, None] + torch.where(query_valid, query_position, 0)
    mask = key_position <= last_key[:, :, None]
    whole = bool(query_valid.all())
    return Bucket(
        num_requests=batch,
        num_queries=queries,
        num_keys=keys,
        query_rows=query_rows.reshape(-1),
        valid_rows=None if whole else query_valid.reshape(-1).nonzero().squeeze(1),
        slots=slots.reshape(-1),
        mask=mask[:, None],
    )


def _attend(bucket: Bucket, query, keys, values, output, layer) -> None:
    """`BatchedCpuAttention.attend_bucket`."""
    batch, num_queries, num_keys = bucket.num_requests, bucket.num_queries, bucket.num_keys
    kv_heads = layer.tp_k_head_num
    per_kv_head = layer.tp_q_head_num // kv_heads
    q = query.index_select(0, bucket.query_rows)
    k = read_cache(keys, bucket.slots, q.dtype).view(batch, num_keys, kv_heads, layer.qk_head_dim).transpose(1, 2)
    v = read_cache(values, bucket.slots, q.dtype).view(batch, num_keys, kv_heads, layer.v_head_dim).transpose(1, 2)
    # The query heads of one key-value head become extra query rows, so keys and values are not repeated.
    q = q.view(batch, num_queries, kv_heads, per_kv_head, layer.qk_head_dim)
    q = q.permute(0, 2, 3, 1, 4).reshape(batch, kv_heads, per_kv_head * num_queries, layer.qk_head_dim)
    mask = bucket.mask.repeat(1, 1, per_kv_head, 1) if num_queries > 1 else bucket.mask
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=layer.scaling)
    out = out.view(batch, kv_heads, per_kv_head, num_queries, layer.v_head_dim).permute(0, 3, 1, 2, 4)
    write_rows(bucket, output, out.reshape(batch * num_queries, -1))


def write_rows(bucket: Bucket, output: torch.Tensor, rows: torch.Tensor) -> None:
    """Put the `rows` [B*Q, n] that are no padding into their places in `output` [tokens, n]."""
    if bucket.valid_rows is None:
        output.index_copy_(0, bucket.query_rows, rows)
    else:
        valid = bucket.valid_rows
        output.index_copy_(0, bucket.query_rows.index_select(0, valid), rows.index_select(0, valid))


def read_cache(cache: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows `slots` of a cache [slots, n] as `dtype`; an FP8 cache has values without a scale."""
    if cache.dtype == torch.float8_e4m3fn:
        return from_fp8(cache.view(torch.uint8).index_select(0, slots).view(cache.dtype)).to(dtype)
    return cache.index_select(0, slots).to(dtype)

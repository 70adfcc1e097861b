"""Attention of `engine.batch_invariant` for SGLang on a CPU: its order of additions does not depend on the batch.

Owns what such a server computes from the plan and the caches of `sglang_cpu_attention.py`. Imported inside a server
process only.
"""

from __future__ import annotations

from gspo_mega.cpu.fixed_order_attention import attend as attend_in_fixed_order
from gspo_mega.cpu.sglang_cpu_attention import BatchedCpuAttention, plan_buckets, read_cache, write_rows


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

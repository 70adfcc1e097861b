"""Causal attention that adds over the keys in an order fixed by their positions, whatever the batch, on a CPU.

Keys are taken in blocks of `BLOCK` positions from a sequence's first on: the weighted values of each block are one
product, and blocks are added one after another. A block beyond a query's last key has weights 0 and adds nothing, so
that a query has the same result alone, among padding, in a prefill, in a decode step, and in a pack. All of it is
computed in fp32.
"""

from __future__ import annotations

import torch

from gspo_mega.cpu.row_operations import LEAST_ROWS

BLOCK = 64
"""Positions of keys that are added by one product."""
_MAX_SCORES = 1 << 24
"""Most scores in memory at once, in numbers, unless one head of one sequence alone has more."""


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    last_keys: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Grouped-query attention of B sequences, each row as if it were alone.

    query [B, Q, heads, d]; key [B, K, kv_heads, d]; value [B, K, kv_heads, v]: key k at position k of its sequence,
    finite in padding, too. last_keys [B, Q] int64: the position of the last key that a query sees, at least 0.
    Returns [B, Q, heads, v] of the query's dtype.
    """
    batch, num_queries, heads, dim = query.shape
    num_keys, kv_heads = key.shape[1:3]
    # A key-value head of a sequence is one matrix; the query heads that share it are its rows.
    rows = query.float().unflatten(2, (kv_heads, -1)).permute(0, 2, 1, 3, 4).reshape(batch * kv_heads, -1, dim)
    limits = last_keys[:, None, :, None].expand(batch, kv_heads, num_queries, heads // kv_heads)
    limits = limits.reshape(batch * kv_heads, -1)
    keys, values = (_in_blocks(part, num_keys) for part in (key, value))
    output = rows.new_empty(batch * kv_heads, rows.size(1), value.size(-1))
    at_once = max(LEAST_ROWS, min(rows.size(1), _MAX_SCORES // keys.size(1)))
    matrices = max(1, _MAX_SCORES // (keys.size(1) * at_once))
    for start in range(0, batch * kv_heads, matrices):
        part = slice(start, start + matrices)
        for first in range(0, rows.size(1), at_once):
            some = slice(first, first + at_once)
            output[part, some] = _attend_rows(rows[part, some], keys[part], values[part], limits[part, some], scale)
    output = output.view(batch, kv_heads, num_queries, heads // kv_heads, -1).permute(0, 2, 1, 3, 4)
    return output.reshape(batch, num_queries, heads, -1).to(query.dtype)


def _in_blocks(part: torch.Tensor, num_keys: int) -> torch.Tensor:
    """[B, K, kv_heads, n] as [B * kv_heads, K up to whole blocks, n] float32, zeros in what is added."""
    whole = -(-num_keys // BLOCK) * BLOCK
    padded = part.new_zeros(part.size(0), part.size(2), whole, part.size(3), dtype=torch.float32)
    padded[:, :, :num_keys] = part.transpose(1, 2)
    return padded.flatten(0, 1)


def _attend_rows(
    rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, limits: torch.Tensor, scale: float
) -> torch.Tensor:
    """[M, R, v] of rows [M, R, d], keys [M, K, d], values [M, K, v], limits [M, R]; K is a multiple of `BLOCK`."""
    num_rows, num_keys = rows.size(1), keys.size(1)
    if num_rows < LEAST_ROWS:
        rows = torch.nn.functional.pad(rows, (0, 0, 0, LEAST_ROWS - num_rows))
        limits = torch.nn.functional.pad(limits, (0, LEAST_ROWS - num_rows))
    scores = torch.bmm(rows.contiguous(), keys.transpose(1, 2)).mul_(scale)
    scores.masked_fill_(torch.arange(num_keys) > limits[:, :, None], -torch.inf)
    weights = scores.sub_(scores.amax(dim=-1, keepdim=True)).exp_()
    totals = weights.unflatten(-1, (-1, BLOCK)).sum(dim=-1)
    output, total = rows.new_zeros(*rows.shape[:2], values.size(2)), rows.new_zeros(rows.shape[:2])
    for block, start in enumerate(range(0, num_keys, BLOCK)):
        keys_of_block = slice(start, start + BLOCK)
        output += torch.bmm(weights[:, :, keys_of_block].contiguous(), values[:, keys_of_block].contiguous())
        total = total + totals[:, :, block]
    return (output / total[:, :, None])[:, :num_rows]

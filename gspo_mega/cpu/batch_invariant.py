"""Operations on a CPU whose result for a row does not depend on the batch. The trainer and the servers both call them.

First come linear layers, SwiGLU's activation, rotary positions, the LM head and log-softmax. They take fp32 or bf16.
The first two have gradients, by the usual formulas. Norms need nothing here, because torch's `rms_norm` adds each row
in the same order.

Then comes causal attention, which adds over the keys in an order that only their positions decide. It takes keys in
blocks of `BLOCK` positions from the first one of a sequence on. The weighted values of each block are one product, and
blocks are added one after another. A block after a query's last key has weights 0 and adds nothing, so a query has the
same result by itself, among padding, in a prefill, in a decode step, and in a pack. All of it is computed in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import log_softmax

LEAST_ROWS = 16
"""Products get at least this many rows. With fewer, BLAS adds in another order. On one thread this was seen below 4
rows, on two threads below 8.
"""
BLOCK = 64
"""The positions of keys that are added by one product."""
_MAX_SCORES = 1 << 24
"""The most scores in memory at once, as a count of numbers, unless `LEAST_ROWS` rows have more."""


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x W^T of rows x [rows, k] and weight [n, k], of one dtype: [rows, n] of that dtype."""
    rows = x.size(0)
    if rows < LEAST_ROWS:
        x = torch.cat([x, x.new_zeros(LEAST_ROWS - rows, x.size(1))])
    return torch.nn.functional.linear(x.contiguous(), weight)[:rows]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return product(x.reshape(-1, x.size(-1)), weight).view(*x.shape[:-1], weight.size(0))

    @staticmethod
    @once_differentiable
    # `once_differentiable` makes `ctx` positional; autograd passes it so.
    def backward(ctx: Any, grad: torch.Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        grad_x = grad @ weight if ctx.needs_input_grad[0] else None
        rows = grad.reshape(-1, grad.size(-1))
        grad_weight = rows.t() @ x.reshape(-1, x.size(-1)) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Apply a linear layer: x [..., k], weight [n, k], bias [n], of one dtype; returns [..., n] of that dtype."""
    output = _Linear.apply(x, weight)
    return output if bias is None else output + bias


class _Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        # torch's own uses another exponential function for the last few numbers of a tensor than for the rest.
        wide = x.float().contiguous()
        return (wide / wide.neg().exp_().add_(1.0)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad, x)


def silu(x: torch.Tensor) -> torch.Tensor:
    """Return x / (1 + exp(-x)), in fp32 and rounded once to x's dtype; of x's shape."""
    return _Silu.apply(x)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply rotary positions to x [tokens, heads, dim], adding and rounding as Megatron does: halves rotated against
    each other.

    cos, sin: [tokens, 1, dim] of x's dtype, each half twice.
    """
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def logits(hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """Return h W^T in fp32, of hidden [rows, k] and head [vocabulary, k] in any float dtype: [rows, vocabulary]."""
    return product(hidden.float(), head.float())


def divide(scores: torch.Tensor, temperature: float) -> torch.Tensor:
    """Divide `scores` [rows, n] float32 by the temperature, in place, rounded as by SGLang's sampler."""
    return scores if temperature == 1.0 else scores.div_(torch.full((1, 1), temperature, dtype=scores.dtype))


def label_log_probs(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return log softmax(scores)[label]: scores [rows, n] float32, labels [rows, 1] int64; [rows] float32 nats."""
    return log_softmax(scores, dim=-1).gather(1, labels)[:, 0]


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    last_keys: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Compute grouped-query attention of B sequences, each row as if it were the only one.

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
    """Return [B, K, kv_heads, n] as [B * kv_heads, K up to whole blocks, n] float32, padded with zeros."""
    whole = -(-num_keys // BLOCK) * BLOCK
    padded = part.new_zeros(part.size(0), part.size(2), whole, part.size(3), dtype=torch.float32)
    padded[:, :, :num_keys] = part.transpose(1, 2)
    return padded.flatten(0, 1)


def _attend_rows(
    rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, limits: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return [M, R, v] for rows [M, R, d], keys [M, K, d], values [M, K, v] and limits [M, R]; `BLOCK` divides K."""
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

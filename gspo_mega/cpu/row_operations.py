"""Linear layers, SwiGLU's activation, rotary positions, LM head and log-softmax, the same for a row in any batch.

Norms need nothing: torch's `rms_norm` adds each row in the same order. Every function here is for a CPU, takes fp32 or
bf16, and is what both the trainer and the servers call. The first two are differentiable, by the usual formulas.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import log_softmax

LEAST_ROWS = 16
"""Products get at least so many rows. With fewer, BLAS takes another way through the sum: on one thread it was seen
below 4 rows, on two below 8."""


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x W^T of rows x [rows, k] and weight [n, k], of one dtype: [rows, n] of that dtype."""
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
    """A linear layer: x [..., k], weight [n, k], bias [n], of one dtype; [..., n] of that dtype."""
    output = _Linear.apply(x, weight)
    return output if bias is None else output + bias


class _Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        # torch's own takes another exponential function for the last few numbers of a tensor than for the others.
        wide = x.float().contiguous()
        return (wide / wide.neg().exp_().add_(1.0)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad, x)


def silu(x: torch.Tensor) -> torch.Tensor:
    """x / (1 + exp(-x)), in fp32 and rounded once to x's dtype; of x's shape."""
    return _Silu.apply(x)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions of x [tokens, heads, dim], as Megatron adds and rounds them: halves rotated against each other.

    cos, sin: [tokens, 1, dim] of x's dtype, each half twice.
    """
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def logits(hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """h W^T in fp32, of hidden [rows, k] and head [vocabulary, k] in any float dtype: [rows, vocabulary]."""
    return product(hidden.float(), head.float())


def divide(scores: torch.Tensor, temperature: float) -> torch.Tensor:
    """`scores` [rows, n] float32 over the temperature, in place, rounded as by SGLang's sampler."""
    return scores if temperature == 1.0 else scores.div_(torch.full((1, 1), temperature, dtype=scores.dtype))


def label_log_probs(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """log softmax(scores)[label]: scores [rows, n] float32, labels [rows, 1] int64; [rows] float32 nats."""
    return log_softmax(scores, dim=-1).gather(1, labels)[:, 0]

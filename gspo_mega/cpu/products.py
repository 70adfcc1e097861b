"""Matrix products on processors for which torch's libraries have no kernels of their own.

torch's CPU builds compute fp32 products with MKL. On a processor that is not Intel's, MKL takes kernels for AVX2, even
where the processor has AVX-512: on an AMD EPYC of family 26 they reach 110 GFLOP/s of one core's 260. oneDNN, which is
part of the same build and computes torch's bf16 products, makes its kernels for the instructions that are there. torch
has no switch that sends fp32 products to it, but one operation does: the one to which `torch.compile` lowers linear
layers. `uses_onednn` says when it is called.

oneDNN has no bf16 kernels for a processor without AVX-512, and torch's own loops are nine times slower than its fp32
products (9 and 82 GFLOP/s on an AMD EPYC of family 25). `widens_bf16` says when bf16 operands are
widened to fp32, which is exact, and the result is rounded to bf16. Elsewhere, for other dtypes and on GPUs, these
functions are torch's own.

All of them add a contraction up in fp32, in different orders, so results differ by rounding. One process always takes
the same one, and none depends on where a tensor lies in memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.autograd.function import once_differentiable

_WIDENED_NUMBERS = 2**20  # of a weight at once: 4 MiB


@functools.cache
def uses_onednn() -> bool:
    """Return whether fp32 products on this machine's CPU are oneDNN's: it has AVX-512 and is not Intel's."""
    return (
        torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and _vendor() not in ("GenuineIntel", "")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


@functools.cache
def widens_bf16() -> bool:
    """Return whether bf16 products on this machine's CPU are made by fp32 ones: oneDNN has no kernels for them."""
    return not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _vendor() -> str:
    """Return the maker's name that the processor gives, "" if it is not known."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")


def _is_onednns(*tensors: torch.Tensor) -> bool:
    return uses_onednn() and all(t.dtype == torch.float32 and t.is_cpu for t in tensors)


def _is_widened(*tensors: torch.Tensor) -> bool:
    """Return whether operations on these tensors are made in fp32: they are bf16, where `widens_bf16` holds."""
    return all(t.dtype == torch.bfloat16 and t.is_cpu for t in tensors) and widens_bf16()


@functools.cache
def _operation() -> Callable[..., torch.Tensor]:
    """Return the operation itself. `torch.ops` would look its overload up anew for each product."""
    return torch.ops.mkldnn._linear_pointwise.default


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x W^T. oneDNN copies `x` where it is not contiguous; of `weight` [n, k] it knows rows and columns side by
    side, but neither other strides nor an empty contraction, as that over the tokens of an expert that has none.
    """
    if x.size(-1) == 0:
        return x.new_zeros((*x.shape[:-1], weight.size(0)))
    of_row, of_column = weight.stride()
    by_rows, by_columns = of_column == 1 and of_row >= weight.size(1), of_row == 1 and of_column >= weight.size(0)
    if not by_rows and not by_columns:
        weight = weight.clone(memory_format=torch.contiguous_format)
    return _operation()(x, weight, None, "none", [], "")


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x W^T + bias [..., n]. x [..., k], weight [n, k], bias [n], of one float dtype. It has no gradient where
    oneDNN computes it, or where bf16 is widened.
    """
    if _is_widened(x, weight):
        return _widened_linear(x, weight, bias)
    if bias is not None or not _is_onednns(x, weight):
        return torch.nn.functional.linear(x, weight, bias)
    return _product(x, weight)


def _widened_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`linear` of bf16 by fp32 products. Some rows of the weight are widened at a time, so that they stay in the
    processor's cache.
    """
    wide = x.float()
    out = x.new_empty((*x.shape[:-1], weight.size(0)))
    step = max(1, _WIDENED_NUMBERS // max(weight.size(1), 1))
    for start in range(0, len(weight), step):
        part = slice(start, start + step)
        out[..., part] = linear(wide, weight[part].float(), None if bias is None else bias[part].float())
    return out


def transposed_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a^T b [n, k], of any strides. a [m, n] and b [m, k], of one float dtype."""
    if _is_widened(a, b):
        return transposed_product(a.float(), b.float()).to(a.dtype)
    if not _is_onednns(a, b):
        return a.t().matmul(b)
    # oneDNN's first operand is copied to be contiguous: take the smaller.
    return _product(a.t(), b.t()) if a.size(1) <= b.size(1) else _product(b.t(), a.t()).t()


def add_product(
    out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, alpha: float = 1.0, beta: float = 0.0, most_numbers: int
) -> None:
    """out = beta * out + alpha * (a @ b) in place; beta is 0 or 1. a [m, k], b [k, n], out [m, n], of one float dtype.

    With beta = 0 the previous content of `out` does not matter, NaN included. oneDNN's product is made some rows at a
    time: beside `out` there are at most two tensors of about `most_numbers`, those rows and a copy of theirs of `a`.
    """
    if not _is_onednns(out, a, b):
        torch.addmm(out, a, b, beta=beta, alpha=alpha, out=out)
        return
    weight, step = b.t(), max(1, most_numbers // max(out.size(1), a.size(1), 1))
    for rows, part in zip(out.split(step), a.split(step), strict=True):
        if beta == 0.0:
            torch.mul(_product(part, weight), alpha, out=rows)
        else:
            rows.add_(_product(part, weight), alpha=alpha)


class _Linear(torch.autograd.Function):
    """x W^T + bias with this module's products in both passes. x [..., k], weight [n, k], bias [n] or None."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        if bias is None or _is_widened(x, weight):
            return linear(x, weight, bias)
        return linear(x, weight).add_(bias)

    @staticmethod
    @once_differentiable
    # `once_differentiable` makes `ctx` positional; autograd passes it so.
    def backward(ctx, *grads: torch.Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        grad = grads[0].reshape(-1, weight.size(0))
        return (
            linear(grad, weight.t()).view(x.shape) if ctx.needs_input_grad[0] else None,
            transposed_product(grad, x.reshape(-1, weight.size(1))) if ctx.needs_input_grad[1] else None,
            grad.sum(dim=0) if ctx.needs_input_grad[2] else None,
        )


def trained_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`linear` with gradients, for adapters: bf16 is widened as there, and fp32 products are torch's own."""
    return _Linear.apply(x, weight, None) if _is_widened(x, weight) else torch.nn.functional.linear(x, weight)


def replace_linear(layers: ModuleType) -> None:
    """Have Megatron's linear layers of one tensor rank compute with this module's products. `layers`: its module of
    tensor-parallel layers. Does nothing where they are torch's own.
    """
    if not (uses_onednn() or widens_bf16()):
        return
    for name in ("linear_with_grad_accumulation_and_async_allreduce", "linear_with_frozen_weight"):
        setattr(layers, name, _plain_or(getattr(layers, name)))


def _plain_or(stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap one of Megatron's functions of a linear layer, which keeps what communicates or adds to another tensor."""

    @functools.wraps(stock)  # and its attributes, one of which it reads by its name
    def compute(
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        gradient_accumulation_fusion: bool,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        *others: Any,
        **options: Any,
    ) -> torch.Tensor:
        fused = gradient_accumulation_fusion or allreduce_dgrad or sequence_parallel
        is_own = _is_onednns(input, weight) or _is_widened(input, weight)
        if not fused and not others and options.get("grad_output_buffer") is None and is_own:
            return _Linear.apply(input, weight, bias)
        return stock(
            input,
            weight,
            bias,
            gradient_accumulation_fusion,
            allreduce_dgrad,
            sequence_parallel,
            *others,
            **options,
        )

    return compute

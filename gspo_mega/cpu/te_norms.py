"""Transformer Engine's RMSNorm and LayerNorm on a CPU: statistics and gradients in fp32, each result rounded once.

Where the result is to be quantised, the norm rounds to its output's dtype first and quantises that. Per-tensor delayed
scaling alone quantises the fp32 value, as Transformer Engine's fused kernel does.
"""

from __future__ import annotations

from typing import Any

import torch

from gspo_mega.cpu.te_extension import kernel, torch_dtype
from gspo_mega.cpu.te_fp8 import quantize_as


def _gain(weight: torch.Tensor, zero_centered: bool) -> torch.Tensor:
    return weight.float() + 1.0 if zero_centered else weight.float()


def _result(value: torch.Tensor, out: Any, quantizer: Any, dtype: int) -> Any:
    """`value` float32 in `out`, or in a new tensor, of the output's dtype or quantised."""
    rounded = value.to(torch_dtype(dtype))
    if quantizer is None:
        return rounded if out is None else out.copy_(rounded)
    fused = type(quantizer).__name__ == "Float8Quantizer"
    return quantize_as(value if fused else rounded, rounded.dtype, quantizer, out)


@kernel
def rmsnorm_fwd(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    ln_out: Any,
    quantizer: Any,
    otype: int,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Any, None, torch.Tensor]:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension. input [..., H], weight [H]; returns (result
    [..., H], None, 1 / root [rows] float32).
    """
    x = input.float()
    inverse = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    value = x * inverse * _gain(weight, zero_centered_gamma)
    return _result(value, ln_out, quantizer, otype), None, inverse.flatten()


@kernel
def rmsnorm_bwd(
    dz: torch.Tensor,
    x: torch.Tensor,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `rmsnorm_fwd` by x and gamma, in their dtypes; dz [..., H] is the result's gradient."""
    return _rmsnorm_gradients(dz, x, None, rsigma, gamma, zero_centered_gamma)


@kernel
def rmsnorm_bwd_add(
    dz: torch.Tensor,
    x: torch.Tensor,
    add: torch.Tensor,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rmsnorm_bwd` with `add` [..., H] added to the gradient by x before it is rounded."""
    return _rmsnorm_gradients(dz, x, add, rsigma, gamma, zero_centered_gamma)


def _rmsnorm_gradients(
    dz: torch.Tensor,
    x: torch.Tensor,
    add: torch.Tensor | None,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    zero_centered: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    inverse = rsigma.reshape(*x.shape[:-1], 1)
    outer, normed = dz.reshape(x.shape).float(), x.float() * inverse
    inner = outer * _gain(gamma, zero_centered)
    by_x = inverse * (inner - normed * (inner * normed).mean(dim=-1, keepdim=True))
    if add is not None:
        by_x += add.reshape(x.shape).float()
    by_gamma = (outer * normed).reshape(-1, x.size(-1)).sum(dim=0)
    return by_x.to(x.dtype), by_gamma.to(gamma.dtype)


@kernel
def layernorm_fwd(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    ln_out: Any,
    quantizer: Any,
    otype: int,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension, with the population variance.

    input [..., H], weight and bias [H]; returns (result [..., H], mean [rows] float32, 1 / root [rows] float32).
    """
    x = input.float()
    mean = x.mean(dim=-1, keepdim=True)
    centred = x - mean
    inverse = torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + eps)
    value = centred * inverse * _gain(weight, zero_centered_gamma)
    if bias is not None:
        value += bias.float()
    return _result(value, ln_out, quantizer, otype), mean.flatten(), inverse.flatten()


@kernel
def layernorm_bwd(
    dz: torch.Tensor,
    x: torch.Tensor,
    mu: torch.Tensor,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `layernorm_fwd` by x, gamma and the bias, in x's and gamma's dtypes; dz [..., H]."""
    rows = (*x.shape[:-1], 1)
    inverse = rsigma.reshape(rows)
    outer, normed = dz.reshape(x.shape).float(), (x.float() - mu.reshape(rows)) * inverse
    inner = outer * _gain(gamma, zero_centered_gamma)
    mean = inner.mean(dim=-1, keepdim=True)
    by_x = inverse * (inner - mean - normed * (inner * normed).mean(dim=-1, keepdim=True))
    flat = (-1, x.size(-1))
    by_gamma, by_bias = (outer * normed).reshape(flat).sum(dim=0), outer.reshape(flat).sum(dim=0)
    return by_x.to(x.dtype), by_gamma.to(gamma.dtype), by_bias.to(gamma.dtype)

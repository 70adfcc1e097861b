"""Transformer Engine's SwiGLU on a CPU: fp32 inside, the result rounded once.

Megatron's own layers apply the activation themselves; these kernels are for layers that leave it to Transformer Engine
(`te.ops.SwiGLU`, `te.LayerNormMLP`). Per-tensor delayed scaling and MX scaling quantise the fp32 value, as the fused
kernels do; the other recipes round it to the input's dtype first and quantise that.
"""

from __future__ import annotations

from typing import Any

import torch

from gspo_mega.cpu.te_extension import kernel
from gspo_mega.cpu.te_fp8 import quantize_as

_FUSED = ("Float8Quantizer", "MXFP8Quantizer")


def _result(value: torch.Tensor, dtype: torch.dtype, quantizer: Any) -> Any:
    """`value` float32 as a tensor of `dtype`, or quantised."""
    if quantizer is None:
        return value.to(dtype)
    return quantize_as(value if type(quantizer).__name__ in _FUSED else value.to(dtype), dtype, quantizer)


@kernel
def swiglu(input: torch.Tensor, quantizer: Any) -> Any:
    """silu(a) * b, for a and b the halves of `input` [..., 2 F]; [..., F] of its dtype, or quantised.

    Source: Shazeer, arXiv:2002.05202, equation 6, with the gate in the first half.
    """
    gate, linear = input.detach().float().chunk(2, dim=-1)
    return _result(torch.nn.functional.silu(gate) * linear, input.dtype, quantizer)


@kernel
def dswiglu(grad: torch.Tensor, fwd_input: torch.Tensor, quantizer: Any) -> Any:
    """The gradient of `swiglu` by `fwd_input` [..., 2 F], from that of its result [..., F]; or quantised."""
    gate, linear = fwd_input.detach().float().chunk(2, dim=-1)
    outer, sigmoid = grad.detach().float(), torch.sigmoid(gate)
    by_gate = outer * linear * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    return _result(torch.cat([by_gate, outer * gate * sigmoid], dim=-1), fwd_input.dtype, quantizer)

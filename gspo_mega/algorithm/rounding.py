"""How SGLang rounds weights while it loads them, and the inputs of a product. Also: INT8 rows and shorter mantissas.

With these functions a publisher foretells the tensors of a server, and a machine without a GPU can serve them. They
choose the scales as SGLang 0.5.23 does on an NVIDIA GPU, and keep its layout of a weight:

    fp8         weights of linear layers e4m3 with a scale per output channel, their inputs with one per token; weights
                of experts with a scale per expert, their inputs with one for all tokens of the call
    fp8_block   weights e4m3 with a scale per 128 x 128 values, inputs with one per 128 values of a token
    int8        weights with a scale per output channel, inputs with one per token

Source: SGLang's `per_token_group_quant_fp8` and `scaled_fp8_quant` (scale = amax / 448, a value is multiplied by
1 / scale), and `per_token_quant_int8`, as `Fp8LinearMethod`, `Fp8MoEMethod`, `W8A8Int8LinearMethod`,
`W8A8Int8MoEMethod` and the fused experts' kernel call them. SGLang's classes are in `cpu/sglang_quantization.py`.
`tests/kernels` compares the rules with SGLang's Triton kernels, to the bit. On an NVIDIA GPU the FP8 kernels are CUDA:
the one for 128 values has amax (1 / 448) and multiplies by 448 / amax, and it and, on Hopper, the one for rows are
compiled with approximate division. Scales may then differ in their last bits, and a few values in 10,000 by one step.

`round_mantissa` is a dose of imprecision with one knob: fewer mantissa bits at an unchanged exponent range.
"""

from __future__ import annotations

from typing import Literal

import torch

from gspo_mega.algorithm.fp8 import (
    E4M3_MAX,
    amax_of,
    dequantize_blocks,
    in_blocks,
    out_of_blocks,
    quantize_blocks,
    to_fp8,
)

OnLoad = Literal["fp8", "int8"]
Served = Literal["fp8", "fp8_block", "int8"]
GROUP = 128  # values of a token that share a scale in `fp8_block`
INT8_MAX = 127.0  # -128 is not used, so that the range is symmetric
MANTISSA_BITS = 23  # explicit mantissa bits of a float32


def served_linear(weight: torch.Tensor, quantization: OnLoad) -> tuple[torch.Tensor, torch.Tensor]:
    """`weight` and `weight_scale` of a linear layer, as SGLang has quantized them while loading.

    Args:
        weight: [n, k] in the server's dtype: the rows of a fused layer (q, k, v; gate, up) below one another.

    Returns:
        fp8: e4m3 [k, n] (a view of [n, k]) and float32 [1, n]. int8: int8 [k, n] (a view) and float32 [n, 1].
    """
    if quantization == "int8":
        data, scale = quantize_int8_rows(weight)
        return data.t(), scale
    data, scale = quantize_fp8_groups(weight, weight.shape[1])
    return data.t(), scale.t().contiguous()


def served_experts(weight: torch.Tensor, quantization: OnLoad) -> tuple[torch.Tensor, torch.Tensor]:
    """`w13_weight` and its scale, or `w2_weight` and its scale, as SGLang has quantized them while loading.

    Args:
        weight: [experts, n, k] in the server's dtype; in w13 gate's rows above up's.

    Returns:
        fp8: e4m3 [experts, n, k] and float32 [experts]. int8: int8 [experts, n, k] and float32 [experts, n, 1].
    """
    experts, rows, columns = weight.shape
    if quantization == "int8":
        data, scale = quantize_int8_rows(weight.reshape(experts * rows, columns))
        return data.view(weight.shape), scale.view(experts, rows, 1)
    data, scale = quantize_fp8_groups(weight.reshape(experts, rows * columns), rows * columns)
    return data.view(weight.shape), scale.view(experts)


def rounded_linear_inputs(x: torch.Tensor, quantization: Served, *, power_of_two: bool = False) -> torch.Tensor:
    """The inputs that a linear layer multiplies in place of `x`: each token, or each 128 values of it, is rounded by
    its own scale.

    Args:
        x: [tokens, k]; with `fp8_block` k is a multiple of 128.
        power_of_two: with `fp8_block`, scales are powers of two. SGLang does so, in linear layers, for a checkpoint
            whose `quantization_config` has `scale_fmt: ue8m0`.

    Returns:
        [tokens, k] float32: the rounded values, scales applied.

    Raises:
        ValueError: with `fp8_block`, k is not a multiple of 128.
    """
    if quantization == "int8":
        return dequantize_int8_rows(*quantize_int8_rows(x))
    if quantization == "fp8":
        return _rounded(x, x.shape[1])
    if x.shape[1] % GROUP:
        raise ValueError(
            f"fp8_block rounds {GROUP} values of a token at a time, and {x.shape[1]} is not a multiple of {GROUP}"
        )
    if power_of_two and x.numel():
        return dequantize_blocks(*quantize_blocks(x, (1, GROUP), power_of_two=True), (1, GROUP))
    return _rounded(x, GROUP)


def rounded_expert_inputs(x: torch.Tensor, quantization: Served) -> torch.Tensor:
    """The inputs that the experts multiply in place of `x`: as `rounded_linear_inputs`, but with `fp8` one scale for
    the whole call. A token's values then depend on the other tokens of the batch, as they do in SGLang.
    """
    if quantization != "fp8":
        return rounded_linear_inputs(x, quantization)
    return _rounded(x.reshape(1, -1), x.numel()).view(x.shape)


def _rounded(x: torch.Tensor, group: int) -> torch.Tensor:
    if x.numel() == 0:
        return x.float()
    return dequantize_blocks(*quantize_fp8_groups(x, group), (1, group))


def quantize_fp8_groups(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 (E4M3) with one scale per `group` values of a row: scale = amax / 448 and q = fp8(x * (1 / scale)), both
    quotients divided once in float32. In bf16 the product often ends on the other side of the middle of two FP8 values
    than x / scale would: 6 of 10,000 codes differ. A group of zeros has the scale 1.

    Args:
        x: [n, m] float32, bfloat16 or float16.

    Returns:
        data [n, m] float8_e4m3fn, and scale [n, ceil(m / group)] float32: x is about data * scale.
    """
    blocks = in_blocks(x, (1, group))
    amax = amax_of(blocks, (1, 3), keepdim=True)
    scale = torch.div(amax, amax.new_tensor(E4M3_MAX))
    scale = torch.where((scale == 0) | ~torch.isfinite(amax), 1.0, scale)
    inverse = torch.reciprocal(scale).clamp(max=torch.finfo(torch.float32).max)
    return out_of_blocks(to_fp8(blocks.float() * inverse), x.shape), scale[:, 0, :, 0]


def quantize_int8_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """INT8 with one scale per row: amax = max(largest |x| of the row, 1e-10), scale = amax / 127,
    q = round(x * (127 / amax)).

    Halves are rounded away from zero. This is the rule of SGLang's `per_token_quant_int8`, by which `w8a8_int8`
    quantises activations: both quotients are divided once in float32, and the product is rounded by C's `round`.

    Args:
        x: [n, m] float32, bfloat16 or float16, finite.

    Returns:
        data [n, m] int8, and scale [n, 1] float32: x is about data * scale.
    """
    amax = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-10)
    # A tensor on the left: `number / tensor` would multiply by a rounded reciprocal and round twice.
    scaled = x.float() * torch.div(amax.new_tensor(INT8_MAX), amax)
    whole = scaled.trunc()
    rounded = whole + torch.where((scaled - whole).abs() >= 0.5, scaled.sign(), 0.0)
    return rounded.to(torch.int8), torch.div(amax, amax.new_tensor(INT8_MAX))


def dequantize_int8_rows(data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """data * scale: [n, m] int8 and [n, 1] float32 to [n, m] float32."""
    return data.float() * scale


def round_mantissa(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Round to the nearest value with `bits` explicit mantissa bits, ties to even: 7 bits are bfloat16's mantissa.

    A carry goes into the exponent, so a value close to float32's largest becomes infinite, as in a conversion to
    bfloat16. Infinities, NaN and zeros stay. Subnormals keep their grid's lowest `23 - bits` bits at zero.

    Args:
        x: [...] float32, bfloat16 or float16.
        bits: 0 to 23 explicit mantissa bits.

    Returns:
        [...] of x's dtype.

    Raises:
        ValueError: `bits` is not 0 to 23.
    """
    if not 0 <= bits <= MANTISSA_BITS:
        raise ValueError(f"{bits} explicit mantissa bits: a float32 has 0 to {MANTISSA_BITS}")
    dropped = MANTISSA_BITS - bits
    if dropped == 0:
        return x.clone()
    code = x.float().view(torch.int32)
    last_kept = (code >> dropped) & 1
    rounded = (code + ((1 << (dropped - 1)) - 1) + last_kept) & -(1 << dropped)
    return torch.where(torch.isfinite(x), rounded.view(torch.float32), x.float()).to(x.dtype)

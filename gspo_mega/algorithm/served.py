"""How SGLang quantizes: the weights that it rounds while it loads them, and what enters a product.

Owns the choice of scales (per channel, per expert, per token, per 128 values of a token) and the layout in which
SGLang 0.5.23 keeps a weight on an NVIDIA GPU, so that a publisher can foretell a server's tensors and a machine without
a GPU can serve them. Does not own the rounding (`fp8.py`, `int8.py`) or SGLang's classes
(`cpu/sglang_cpu_quantization.py`).

fp8: weights of linear layers e4m3 with a scale for each output channel, their inputs with one for each token; weights
of experts with a scale for each expert, their inputs with one for all tokens of the call. fp8_block: weights e4m3 with
a scale for 128 x 128 values, inputs with one for each 128 values of a token. int8: weights with a scale for each output
channel, inputs with one for each token.

Source: `per_token_group_quant_fp8` and `scaled_fp8_quant` (scale = amax / 448, a value is divided by its scale), and
`per_token_quant_int8`, as `Fp8LinearMethod`, `Fp8MoEMethod`, `W8A8Int8LinearMethod`, `W8A8Int8MoEMethod` and the fused
experts' kernel call them.
"""

from __future__ import annotations

from typing import Literal

import torch

from gspo_mega.algorithm.fp8 import dequantize_blocks, quantize_blocks, quantize_published_blocks
from gspo_mega.algorithm.int8 import dequantize_int8_rows, quantize_int8_rows

OnLoad = Literal["fp8", "int8"]
Served = Literal["fp8", "fp8_block", "int8"]
GROUP = 128
"""Values of a token that share a scale in `fp8_block`."""


def served_linear(weight: torch.Tensor, quantization: OnLoad) -> tuple[torch.Tensor, torch.Tensor]:
    """`weight` and `weight_scale` of a linear layer that SGLang has quantized while loading.

    Args:
        weight: [n, k] in the server's dtype: the rows of a fused layer (q, k, v; gate, up) below one another.

    Returns:
        fp8: e4m3 [k, n] (a view of [n, k]) and float32 [1, n]. int8: int8 [k, n] (a view) and float32 [n, 1].
    """
    if quantization == "int8":
        data, scale = quantize_int8_rows(weight)
        return data.t(), scale
    data, scale = quantize_published_blocks(weight, (1, weight.shape[1]))
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
    data, scale = quantize_published_blocks(weight.reshape(experts, rows * columns), (1, rows * columns))
    return data.view(weight.shape), scale.view(experts)


def rounded_tokens(x: torch.Tensor, quantization: Served, *, power_of_two: bool = False) -> torch.Tensor:
    """What a linear layer multiplies in place of `x`: each token, or each 128 values of it, rounded by its own scale.

    Args:
        x: [tokens, k]; with `fp8_block` k is a multiple of 128.
        power_of_two: with `fp8_block`, scales are powers of two. SGLang does so, in linear layers, for a checkpoint
            whose `quantization_config` has `scale_fmt: ue8m0`.

    Returns:
        [tokens, k] float32: the rounded values, scales applied.

    Raises:
        ValueError: `fp8_block` and another k.
    """
    if quantization == "int8":
        return dequantize_int8_rows(*quantize_int8_rows(x))
    if quantization == "fp8":
        return _rounded(x, x.shape[1])
    if x.shape[1] % GROUP:
        raise ValueError(f"fp8_block rounds {GROUP} values of a token at a time; {x.shape[1]} are no multiple of that")
    if power_of_two and x.numel():
        return dequantize_blocks(*quantize_blocks(x, (1, GROUP), power_of_two=True), (1, GROUP))
    return _rounded(x, GROUP)


def rounded_call(x: torch.Tensor, quantization: Served) -> torch.Tensor:
    """What the experts multiply in place of `x`: as `rounded_tokens`, but with `fp8` one scale for the whole call.

    A token's values then depend on what else is in the batch, as they do in SGLang.
    """
    if quantization != "fp8":
        return rounded_tokens(x, quantization)
    return _rounded(x.reshape(1, -1), x.numel()).view(x.shape)


def _rounded(x: torch.Tensor, group: int) -> torch.Tensor:
    if x.numel() == 0:
        return x.float()
    return dequantize_blocks(*quantize_published_blocks(x, (1, group)), (1, group))

"""INT8 with one scale per row: per output channel of a weight, per token of an activation.

Owns the rounding and the scale. It does not own which products run in INT8.
"""

from __future__ import annotations

import torch

INT8_MAX = 127.0  # -128 is not used, so that the range is symmetric


def quantize_int8_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """amax = max(largest |x| of the row, 1e-10), scale = amax / 127, q = round(x * (127 / amax)).

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

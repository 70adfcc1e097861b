"""MXFP8: FP8 values in runs of 32 that share a power-of-two scale of one byte (OCP Microscaling Formats, E8M0). Of
MXFP4 (elements of 4 bits, e2m1) only the reading.

Owns the rule from an amax to the byte, as Transformer Engine and Blackwell's conversion instruction have it: rounded
up, so that nothing saturates (OCP's own example rounds down). It does not own Transformer Engine's padded scale layouts
(`engine/cpu`), nor the FP8 formats (`fp8.py`).

A byte e stands for 2^(e - 127); 0xFF is NaN.
"""

from __future__ import annotations

import torch

from gspo_mega.algorithm.fp8 import amax_and_whether_finite, from_fp8, in_blocks, largest_value, out_of_blocks, to_fp8

RUN = 32  # values that share a scale
# The values of e2m1, by code; the upper 8 codes are the same with the other sign.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MANTISSA = 0x7FFFFF
_HALF_OF_LEAST_NORMAL = 0x400000  # 2^-127 as the bits of a float32, which is subnormal there
_INFINITY, _NAN = 0xFE, 0xFF


def e8m0_from_amax(amax: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    """The byte e with the least 2^(e - 127) of at least amax / largest: [...] float32 to [...] uint8.

    The quotient is amax * (1 / largest), each in float32. An amax of 0 gives 0, infinity 0xFE.
    """
    reciprocal = torch.reciprocal(amax.new_tensor(largest_value(dtype)))
    bits = (amax * reciprocal).view(torch.int32)
    exponent, mantissa = bits >> 23, bits & _MANTISSA
    up = (mantissa > 0) & (exponent < _INFINITY) & ~((exponent == 0) & (mantissa <= _HALF_OF_LEAST_NORMAL))
    codes = torch.where(up, exponent + 1, exponent)
    codes = torch.where(torch.isinf(amax), _INFINITY, codes)
    return torch.where(torch.isnan(amax), _NAN, codes).to(torch.uint8)


def e8m0_values(codes: torch.Tensor) -> torch.Tensor:
    """2^(e - 127) of each byte, NaN of 0xFF: [...] uint8 to [...] float32."""
    wide = codes.int()
    bits = torch.where(wide == 0, _HALF_OF_LEAST_NORMAL, wide << 23)
    return torch.where(wide == _NAN, torch.nan, bits.view(torch.float32))


def e8m0_multipliers(codes: torch.Tensor) -> torch.Tensor:
    """2^(127 - e) of each byte, by which values are multiplied: [...] uint8 to [...] float32; NaN of 0xFF."""
    # The value of the byte 254 - e; that of 254 is the subnormal 2^-127, as the instruction has it.
    inverse = (254 - codes.int()).clamp(min=0).to(torch.uint8)
    return torch.where(codes == _NAN, torch.nan, e8m0_values(inverse))


def quantize_mx(
    x: torch.Tensor, run: tuple[int, int] = (1, RUN), dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[torch.Tensor, torch.Tensor]:
    """q = fp8(x * 2^(127 - e)), with one byte e per run.

    Args:
        x: [n, m] float32, bfloat16 or float16.
        run: rows and columns that share a scale: (1, 32) along rows, (32, 1) along columns, (32, 32) for a scale that
            both readings share.
        dtype: float8_e4m3fn or float8_e5m2.

    Returns:
        data [n, m] of `dtype`, and e [ceil(n / run[0]), ceil(m / run[1])] uint8.
    """
    blocks = in_blocks(x, run).float()
    amax, is_finite = amax_and_whether_finite(blocks, (1, 3), keepdim=True)
    codes = e8m0_from_amax(amax, dtype)
    data = to_fp8(blocks * e8m0_multipliers(codes), dtype, is_bounded=is_finite)
    return out_of_blocks(data, x.shape), codes[:, 0, :, 0]


def dequantize_mx(data: torch.Tensor, codes: torch.Tensor, run: tuple[int, int] = (1, RUN)) -> torch.Tensor:
    """data * 2^(e - 127) of its run: [n, m] FP8 and [ceil(n / run[0]), ceil(m / run[1])] uint8 to [n, m] float32."""
    return out_of_blocks(in_blocks(from_fp8(data), run) * e8m0_values(codes)[:, None, :, None], data.shape)


def dequantize_fp4(blocks: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Values of MXFP4, exactly: blocks [n, runs, 16] uint8, two elements of a run in a byte, the first in its lower 4
    bits, and a byte e of each run, codes [n, runs] uint8, to [n, runs * 32] float32.

    Raises ValueError for a scale that is no number (0xFF).
    """
    if bool((codes == _NAN).any()):
        raise ValueError("has a scale that is no number")
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=blocks.device)
    elements = torch.stack([blocks & 0xF, blocks >> 4], dim=-1).flatten(-2)
    return (table[elements.int()] * e8m0_values(codes)[..., None]).flatten(-2)

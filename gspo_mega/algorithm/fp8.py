"""FP8 and MXFP8 rounding: which byte a value becomes, and which scale undoes it. Of MXFP4 only the reading.

A value x is stored as the byte q = fp8(x * scale) and read as q * scale_inv. First come scales of whole tensors and of
blocks, by the rule of Transformer Engine (`compute_scale_from_amax`): scale = largest / amax and scale_inv = 1 / scale,
each divided once in float32. An amax ignores NaN, and an amax that is zero or infinite gives a scale of 1.
`quantize_published_blocks` has the rule by which DeepSeek-V3's FP8 checkpoints were written: scale_inv = amax / largest
and q = fp8(x / scale_inv). The two differ in the last bit of a scale, so a publisher and a reader have to name the same
one.

Then comes MXFP8, in which a run of 32 values shares a power-of-two scale of one byte (OCP Microscaling Formats, E8M0).
A byte e stands for 2^(e - 127); 0xFF is NaN. The rule from an amax to the byte is that of Transformer Engine and of
Blackwell's conversion instruction: rounded up, so that nothing saturates (OCP's own example rounds down).

Transformer Engine's tensor classes, paddings and padded scale layouts are in `cpu/`.
"""

from __future__ import annotations

import functools

import torch

E4M3_MAX = 448.0  # S.1111.110: exponent 8, mantissa 1.75; the next code is NaN, and there is no infinity
E5M2_MAX = 57344.0  # S.11110.11: exponent 15, mantissa 1.75; the next code is infinity
_LARGEST = {torch.float8_e4m3fn: E4M3_MAX, torch.float8_e5m2: E5M2_MAX}
_LARGEST_FLOAT32 = torch.finfo(torch.float32).max
_EXPONENT_BITS = -(1 << 23)  # 0xFF800000 as an int32: sign and exponent of a float32
_NAN_BYTE = 0x7F  # the one NaN that the conversion instruction writes, for either sign of the input


def largest_value(dtype: torch.dtype) -> float:
    """The largest finite value of an FP8 type. Raises ValueError for another type."""
    if dtype not in _LARGEST:
        raise ValueError(f"{dtype} is not an FP8 type; valid: {', '.join(map(str, _LARGEST))}")
    return _LARGEST[dtype]


def scale_from_amax(
    amax: torch.Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    *,
    power_of_two: bool = False,
    epsilon: float = 0.0,
    when_infinite: float = _LARGEST_FLOAT32,
) -> torch.Tensor:
    """The scale by which values are multiplied before they are rounded to FP8.

    scale = largest / max(amax, epsilon), rounded once to float32; 1 where amax is 0, infinite or NaN; `when_infinite`
    where the quotient overflows. With `power_of_two` the mantissa is then cut off (towards zero, so that nothing
    saturates).

    Args:
        amax: [...] float32, at least 0: largest absolute values.
        dtype: the FP8 type that the values become.
        power_of_two: cut the scale down to a power of two.
        epsilon: the least amax.
        when_infinite: the scale if amax is so small that the quotient overflows. Transformer Engine takes float32's
            largest for whole tensors, and the largest value of the input's type for blocks.

    Returns:
        [...] float32.
    """
    amax = torch.where(amax < epsilon, epsilon, amax) if epsilon > 0 else amax
    # A tensor on the left: `number / tensor` would multiply by a rounded reciprocal and round twice.
    scale = torch.div(amax.new_tensor(largest_value(dtype)), amax)
    scale = torch.where(torch.isinf(scale), when_infinite, scale)
    if power_of_two:
        scale = (scale.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)
    return torch.where((amax == 0) | ~torch.isfinite(amax), 1.0, scale)


def to_fp8(scaled: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn, *, is_bounded: bool = False) -> torch.Tensor:
    """Round to the nearest FP8 value, ties to even; beyond the largest and at infinity to the largest; NaN to NaN.

    Args:
        scaled: [...] float32: values that were multiplied by their scale.
        is_bounded: the caller knows that there is no NaN, and that nothing exceeds the largest value by more than the
            rounding of the scale, which rounds back to it. This saves the passes that look for both.

    Returns:
        [...] of `dtype`.
    """
    largest = largest_value(dtype)
    if is_bounded:
        return scaled.to(dtype)
    # For values beyond the largest, torch's conversion gives an infinity or a NaN, or not, by type and version.
    data = scaled.clamp(-largest, largest).to(dtype)
    if scaled.numel() and torch.isnan(torch.aminmax(scaled).max):
        data = torch.where(torch.isnan(scaled), _NAN_BYTE, data.view(torch.uint8)).view(dtype)
    return data


@functools.cache
def _values(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8, device=device).view(dtype).float()


def from_fp8(data: torch.Tensor) -> torch.Tensor:
    """The exact float32 values of FP8 codes, without a scale: [...] FP8 to [...] float32.

    A table look-up: torch's own conversion takes six times as long on a CPU.
    """
    largest_value(data.dtype)
    codes = data.contiguous().view(torch.uint8).reshape(-1).int()
    return _values(data.dtype, data.device).index_select(0, codes).reshape(data.shape)


def amax_of(x: torch.Tensor, dims: int | tuple[int, ...] | None = None, *, keepdim: bool = False) -> torch.Tensor:
    """Largest absolute values in float32; a NaN counts as 0, an empty tensor has the amax 0.

    Args:
        x: [...] floating point.
        dims: the dimensions that are reduced; None reduces all of them, to a tensor of no dimension.
    """
    return amax_and_whether_finite(x, dims, keepdim=keepdim)[0]


def amax_and_whether_finite(
    x: torch.Tensor, dims: int | tuple[int, ...] | None = None, *, keepdim: bool = False
) -> tuple[torch.Tensor, bool]:
    """`amax_of`, and whether all values of `x` are finite, which the same pass over `x` finds."""
    if x.numel() == 0 and dims is None:
        return torch.zeros((), dtype=torch.float32, device=x.device), True
    dims = tuple(range(x.dim())) if dims is None else dims
    amax = x.abs().amax(dims, keepdim=keepdim)
    is_finite = bool(torch.isfinite(amax).all())
    if not is_finite:
        amax = torch.where(torch.isnan(x), 0, x).abs().amax(dims, keepdim=keepdim)
    return amax.float(), is_finite


def quantize_tensorwise(
    x: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn, *, power_of_two: bool = False, epsilon: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """One scale for the whole tensor, from its own amax (Transformer Engine's current scaling).

    Args:
        x: [...] float32, bfloat16 or float16.
        dtype: float8_e4m3fn or float8_e5m2.

    Returns:
        data [...] of `dtype`, and scale_inv [1] float32: x is about data * scale_inv.
    """
    amax, is_finite = amax_and_whether_finite(x)
    scale = scale_from_amax(amax.reshape(1), dtype, power_of_two=power_of_two, epsilon=epsilon)
    return to_fp8(x.float() * scale, dtype, is_bounded=is_finite), torch.reciprocal(scale)


def quantize_blocks(
    x: torch.Tensor,
    block: tuple[int, int] = (128, 128),
    power_of_two: bool = False,
    dtype: torch.dtype = torch.float8_e4m3fn,
    *,
    epsilon: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One scale per block by Transformer Engine's rule; blocks at the right and lower edge may be smaller.

    Args:
        x: [n, m] float32, bfloat16 or float16.
        block: rows and columns of a block: (128, 128) for weights, (1, 128) for activations and gradients.
        power_of_two: scales are powers of two (what Transformer Engine does unless told otherwise) or any float32.
        dtype: float8_e4m3fn or float8_e5m2.
        epsilon: least amax of a block.

    Returns:
        data [n, m] of `dtype`, and scale_inv [ceil(n / b0), ceil(m / b1)] float32.
    """
    blocks = in_blocks(x, block).float()
    amax, is_finite = amax_and_whether_finite(blocks, (1, 3), keepdim=True)
    scale = scale_from_amax(
        amax, dtype, power_of_two=power_of_two, epsilon=epsilon, when_infinite=torch.finfo(x.dtype).max
    )
    data = to_fp8(blocks * scale, dtype, is_bounded=is_finite)
    return out_of_blocks(data, x.shape), torch.reciprocal(scale)[:, 0, :, 0]


def quantize_published_blocks(
    x: torch.Tensor, block: tuple[int, int] = (128, 128), dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[torch.Tensor, torch.Tensor]:
    """One scale per block as in DeepSeek-V3's published checkpoints: what their `weight` and `weight_scale_inv` hold.

    scale_inv = amax / largest and q = fp8(x / scale_inv), each divided once in float32. A block of zeros has the
    scale_inv 1, so that no reader divides by zero.

    Args:
        x: [n, m] float32, bfloat16 or float16.
        block: rows and columns of a block.

    Returns:
        data [n, m] of `dtype`, and scale_inv [ceil(n / b0), ceil(m / b1)] float32.
    """
    blocks = in_blocks(x, block)
    amax = amax_of(blocks, (1, 3), keepdim=True)
    scale_inv = torch.div(amax, amax.new_tensor(largest_value(dtype)))
    scale_inv = torch.where((scale_inv == 0) | ~torch.isfinite(amax), 1.0, scale_inv)
    return out_of_blocks(to_fp8(torch.div(blocks.float(), scale_inv), dtype), x.shape), scale_inv[:, 0, :, 0]


def dequantize_blocks(data: torch.Tensor, scale_inv: torch.Tensor, block: tuple[int, int] = (128, 128)) -> torch.Tensor:
    """data * scale_inv of its block, in float32.

    Args:
        data: [n, m] FP8.
        scale_inv: [ceil(n / b0), ceil(m / b1)] float32.
        block: rows and columns of a block.

    Returns:
        [n, m] float32.

    Raises:
        ValueError: the shape of `scale_inv` does not match the number of blocks.
    """
    rows, columns = (-(-size // side) for size, side in zip(data.shape, block, strict=True))
    if tuple(scale_inv.shape) != (rows, columns):
        raise ValueError(
            f"data of shape {tuple(data.shape)} in blocks of {block} has scales of shape {(rows, columns)}, "
            f"not {tuple(scale_inv.shape)}"
        )
    return out_of_blocks(in_blocks(from_fp8(data), block) * scale_inv[:, None, :, None], data.shape)


def in_blocks(x: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """[n, m] as [rows of blocks, b0, columns of blocks, b1], with zeros beyond the edges."""
    (n, m), (b0, b1) = x.shape, block
    rows, columns = -(-n // b0), -(-m // b1)
    if (n, m) != (rows * b0, columns * b1):
        padded = x.new_zeros(rows * b0, columns * b1)
        padded[:n, :m] = x
        x = padded
    return x.reshape(rows, b0, columns, b1)


def out_of_blocks(blocks: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The inverse of `in_blocks`: [n, m] = `shape`, without the zeros beyond the edges."""
    rows, b0, columns, b1 = blocks.shape
    return blocks.reshape(rows * b0, columns * b1)[: shape[0], : shape[1]].contiguous()


# --- MXFP8 and MXFP4 -------------------------------------------------------------------------------------------

RUN = 32  # values that share a scale
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # MXFP4's values by code; the upper 8 codes have the other sign
_MANTISSA_BITS = 0x7FFFFF  # of a float32
_HALF_OF_LEAST_NORMAL = 0x400000  # 2^-127 as the bits of a float32, which is subnormal there
_E8M0_INFINITY, _E8M0_NAN = 0xFE, 0xFF


def e8m0_from_amax(amax: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    """The least byte e with 2^(e - 127) of at least amax / largest: [...] float32 to [...] uint8.

    The quotient is amax * (1 / largest), each in float32. An amax of 0 gives 0, and infinity gives 0xFE.
    """
    reciprocal = torch.reciprocal(amax.new_tensor(largest_value(dtype)))
    bits = (amax * reciprocal).view(torch.int32)
    exponent, mantissa = bits >> 23, bits & _MANTISSA_BITS
    up = (mantissa > 0) & (exponent < _E8M0_INFINITY) & ~((exponent == 0) & (mantissa <= _HALF_OF_LEAST_NORMAL))
    codes = torch.where(up, exponent + 1, exponent)
    codes = torch.where(torch.isinf(amax), _E8M0_INFINITY, codes)
    return torch.where(torch.isnan(amax), _E8M0_NAN, codes).to(torch.uint8)


def e8m0_values(codes: torch.Tensor) -> torch.Tensor:
    """2^(e - 127) of each byte, NaN of 0xFF: [...] uint8 to [...] float32."""
    wide = codes.int()
    bits = torch.where(wide == 0, _HALF_OF_LEAST_NORMAL, wide << 23)
    return torch.where(wide == _E8M0_NAN, torch.nan, bits.view(torch.float32))


def e8m0_multipliers(codes: torch.Tensor) -> torch.Tensor:
    """2^(127 - e) of each byte, by which values are multiplied: [...] uint8 to [...] float32; NaN of 0xFF."""
    # The value of the byte 254 - e. For e = 254 it is the subnormal 2^-127, as in Blackwell's instruction.
    inverse = (254 - codes.int()).clamp(min=0).to(torch.uint8)
    return torch.where(codes == _E8M0_NAN, torch.nan, e8m0_values(inverse))


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
    """The exact values of MXFP4: [n, runs * 32] float32.

    `blocks`: [n, runs, 16] uint8, two elements of a run in each byte, the first in its lower 4 bits. `codes`: [n, runs]
    uint8, the byte e of each run. Raises ValueError for a scale that is not a number (0xFF).
    """
    if bool((codes == _E8M0_NAN).any()):
        raise ValueError("has a scale that is no number")
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=blocks.device)
    elements = torch.stack([blocks & 0xF, blocks >> 4], dim=-1).flatten(-2)
    return (table[elements.int()] * e8m0_values(codes)[..., None]).flatten(-2)

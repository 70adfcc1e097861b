"""Transformer Engine's quantisation kernels in plain torch: quantise, dequantise, transpose, and the scales' update.

Transformer Engine's Python calls these functions, so they have its semantics of in-place output and no-op flags.
`te_quantized.py` knows what they put into a tensor's buffers, and `gspo_mega/algorithm` does the rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gspo_mega.algorithm import fp8
from gspo_mega.cpu.te_extension import kernel, torch_dtype
from gspo_mega.cpu.te_quantized import build, dequantized, empty_buffers, fill, quantized_buffers, transposed

# For a sharp certificate. An amax that ranks fail to share is off by a few percent or more; one that follows an earlier
# rounding of FP8, by a tenth of a percent.
GRID_STEPS_PER_OCTAVE = 16
_is_delayed_on_grid = False


def put_delayed_scales_on_grid(on: bool) -> None:
    """Round the scales of recipe `delayed` down to 2^(k / `GRID_STEPS_PER_OCTAVE`) from now on, or not (False)."""
    global _is_delayed_on_grid
    _is_delayed_on_grid = on


@kernel
def quantize(tensor: torch.Tensor, quantizer: Any, output: Any = None, noop: torch.Tensor | None = None) -> Any:
    """Return `tensor` as the quantiser's tensor, new or in `output`, which stays untouched if the no-op flag is 1."""
    return quantize_as(tensor, tensor.dtype, quantizer, output, noop)


def quantize_as(
    tensor: torch.Tensor, dtype: torch.dtype, quantizer: Any, output: Any = None, noop: torch.Tensor | None = None
) -> Any:
    """Run `quantize`, but label the result as `dtype`: for fused kernels that quantise float32 results directly.

    Args:
        tensor: [..., m] float32, bfloat16 or float16: the values that are rounded.
        dtype: the nominal dtype of the result.
    """
    tensor = tensor.detach().contiguous()
    if noop is not None and noop.numel() and float(noop.reshape(-1)[0]) == 1.0:
        return (
            build(quantizer, tensor.shape, dtype, empty_buffers(quantizer, tensor.shape)) if output is None else output
        )
    buffers = quantized_buffers(tensor, quantizer)
    if output is None:
        return build(quantizer, tensor.shape, dtype, buffers)
    return fill(quantizer, output, buffers)


@kernel
def dequantize(input: Any, otype: int) -> torch.Tensor:
    """Return the values in a plain tensor of type `otype`; of a tensor with both readings, the row-wise one."""
    has_rows = getattr(input, "_rowwise_data", None) is not None or hasattr(input, "_data")
    return dequantized(input, columnwise=not has_rows).to(torch_dtype(otype))


@kernel
def create_empty_quantized_tensor(
    quantizer: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device, pin_memory: bool
) -> Any:
    """Return a quantised tensor with zeroed buffers, on the CPU."""
    return build(quantizer, list(shape), dtype, empty_buffers(quantizer, list(shape)))


@kernel
def split_quantize(
    tensor: torch.Tensor,
    split_sections: Sequence[int],
    quantizer_list: Sequence[Any],
    disable_bulk_allocation: bool = False,
) -> list[Any]:
    """Quantise the parts of `tensor` along its first dimension, each with its own quantiser."""
    parts = tensor.detach().split(list(split_sections))
    return [quantize(part, quantizer) for part, quantizer in zip(parts, quantizer_list, strict=True)]


@kernel
def multi_tensor_quantize(tensor_list: Sequence[torch.Tensor], quantizer_list: Sequence[Any]) -> list[Any]:
    return [quantize(tensor, quantizer) for tensor, quantizer in zip(tensor_list, quantizer_list, strict=True)]


@kernel
def bgrad_quantize(input: torch.Tensor, quantizer: Any) -> tuple[torch.Tensor, Any]:
    """Return the bias gradient (the sum over all but the last dimension, added in float32) and the quantised
    gradient.
    """
    input = input.detach()
    bias = input.reshape(-1, input.shape[-1]).float().sum(0).to(input.dtype)
    return bias, input if quantizer is None else quantize(input, quantizer)


@kernel
def fp8_transpose(input: torch.Tensor, dtype: int, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return [*leading, last] codes as [last, *leading]."""
    result = transposed(input)
    return result if out is None else out.copy_(result.reshape(out.shape))


@kernel
def swap_first_dims(tensor: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return [a, b, ...] as [b, a, ...]."""
    result = tensor.transpose(0, 1).contiguous()
    return result if out is None else out.copy_(result.reshape(out.shape))


@kernel
def compute_amax(input: torch.Tensor, amax: torch.Tensor) -> None:
    """Write the largest absolute value of `input` into `amax` (one float32)."""
    amax.copy_(fp8.amax_of(input.detach()).reshape(amax.shape))


@kernel
def multi_tensor_compute_scale_and_scale_inv(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Sequence[Sequence[torch.Tensor]],
    max_fp8: float,
    force_pow_2_scales: bool,
    epsilon: float,
) -> None:
    """Write the scales that belong to the amaxes, and their reciprocals, in lists (amaxes, scales, scale_invs)."""
    dtype = torch.float8_e4m3fn if max_fp8 == fp8.E4M3_MAX else torch.float8_e5m2
    if max_fp8 != fp8.largest_value(dtype):
        raise ValueError(f"no FP8 type has the largest value {max_fp8}")
    for amax, scale, scale_inv in zip(*tensor_lists, strict=True):
        new = fp8.scale_from_amax(amax, dtype, power_of_two=force_pow_2_scales, epsilon=epsilon)
        scale.copy_(new.reshape(scale.shape))
        scale_inv.copy_(torch.reciprocal(new).reshape(scale_inv.shape))


@kernel
def multi_tensor_compute_scale_inv_e8m0(
    chunk_size: int, dummy: torch.Tensor | None, tensor_lists: Sequence[Sequence[torch.Tensor]]
) -> None:
    """Write the E8M0 bytes that belong to the amaxes, in lists (amaxes bfloat16, scale bytes)."""
    for amax, scale_inv in zip(*tensor_lists, strict=True):
        scale_inv.copy_(fp8.e8m0_from_amax(amax.float()).reshape(scale_inv.shape))


@kernel
def fused_amax_and_scale_update_after_reduction(
    amax_reduction_buffer: torch.Tensor,
    amax_histories: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    amax_compute_algo: str,
    fp8_dtype: int,
    margin: float,
) -> None:
    """End a pass of delayed scaling: roll the histories, and set the scales from them.

    Per tensor: the newest amax is the reduced one, or the history's row 0 if that is 0. Unless it is 0, the history
    moves up by one row, the newest amax becomes the last row and row 0 is cleared for the next pass. The scale becomes
    largest / 2^margin / amax, with the largest amax of the history (`max`) or the newest (`most_recent`). An amax of 0,
    infinity or NaN leaves the scale as it was, and a quotient beyond float32 becomes float32's largest.

    Args:
        amax_reduction_buffer: [sum of tensors] float32: the amaxes of the pass, after their reduction over ranks.
        amax_histories: each [length, tensors] float32.
        scales: each [tensors] float32.

    Raises:
        ValueError: another `amax_compute_algo`.
    """
    if amax_compute_algo not in ("max", "most_recent"):
        raise ValueError(f"amax_compute_algo {amax_compute_algo!r}: valid are max and most_recent")
    dtype = torch_dtype(fp8_dtype)
    assert dtype is not None
    largest = torch.tensor(fp8.largest_value(dtype)) * 2.0**-margin
    start = 0
    for history, scale in zip(amax_histories, scales, strict=True):
        reduced = amax_reduction_buffer.reshape(-1)[start : start + history.shape[1]]
        start += history.shape[1]
        newest = torch.where(reduced != 0, reduced, history[0])
        rolled = torch.cat([history[1:], newest[None]])
        # Not torch's maximum: as on a GPU, a NaN in the history is ignored.
        highest = torch.where(torch.isnan(rolled), 0.0, rolled).amax(0)
        amax = newest if amax_compute_algo == "most_recent" else torch.where(newest != 0, highest, 0.0)
        new = torch.div(largest, amax)
        if _is_delayed_on_grid:
            new = torch.exp2(torch.floor(torch.log2(new) * GRID_STEPS_PER_OCTAVE) / GRID_STEPS_PER_OCTAVE)
        new = torch.where(torch.isinf(new), torch.finfo(torch.float32).max, new)
        scale.copy_(torch.where(torch.isfinite(amax) & (amax > 0), new, scale))
        rolled[0] = 0.0
        history.copy_(torch.where(newest != 0, rolled, history))


@kernel
def fp8_block_scaling_compute_partial_amax(
    tensor: torch.Tensor, amax: torch.Tensor, h: int, w: int, start_offset: int, block_len: int
) -> None:
    """Write the amax of each 128 x 128 block of an [h, w] weight, from the run of elements that this rank has.

    Args:
        tensor: [len] the elements start_offset to start_offset + len of the flattened weight; the others count as 0.
        amax: [>= ceil(h / 128), >= ceil(w / 128)] float32, written; columns beyond the blocks stay.
    """
    found = fp8.amax_of(fp8.in_blocks(_whole(tensor, h, w, start_offset), (block_len, block_len)), (1, 3))
    amax[: found.shape[0], : found.shape[1]] = found


@kernel
def fp8_block_scaling_partial_cast(
    inp: torch.Tensor,
    out: torch.Tensor,
    scale: torch.Tensor,
    h: int,
    w: int,
    start_offset: int,
    block_len: int,
    out_dtype: int,
) -> None:
    """Quantise a run of elements of an [h, w] weight with its blocks' scales.

    Args:
        inp: [len] the elements start_offset to start_offset + len of the flattened weight.
        out: [len] uint8, written.
        scale: [>= ceil(h / 128), >= ceil(w / 128)] float32.
    """
    dtype = torch_dtype(out_dtype)
    assert dtype is not None
    positions = torch.arange(start_offset, start_offset + inp.numel())
    mine = scale[positions // w // block_len, positions % w // block_len]
    codes = fp8.to_fp8(inp.detach().reshape(-1).float() * mine, dtype).view(torch.uint8)
    out.copy_(codes.reshape(out.shape))


def _whole(part: torch.Tensor, h: int, w: int, start: int) -> torch.Tensor:
    whole = part.new_zeros(h * w)
    whole[start : start + part.numel()] = part.detach().reshape(-1)
    return whole.reshape(h, w)


@kernel
def mxfp8_scaling_compute_partial_amax(
    input: torch.Tensor,
    amax_rowwise: torch.Tensor,
    amax_colwise: torch.Tensor,
    rows: int,
    cols: int,
    start_offset: int,
) -> None:
    """Write the amax of each run of 32, along rows and along columns, from the run of elements that this rank has.

    Args:
        input: [len] the elements start_offset to start_offset + len of the flattened [rows, cols] weight.
        amax_rowwise: [>= rows, >= cols / 32], written in its own dtype; padding stays.
        amax_colwise: [>= rows / 32, >= cols], likewise.
    """
    whole = _whole(input, rows, cols, start_offset)
    for amax, run in ((amax_rowwise, (1, fp8.RUN)), (amax_colwise, (fp8.RUN, 1))):
        found = fp8.amax_of(fp8.in_blocks(whole, run), (1, 3))
        amax[: found.shape[0], : found.shape[1]] = found.to(amax.dtype)


@kernel
def mxfp8_scaling_partial_cast(
    input: torch.Tensor,
    output_rowwise: torch.Tensor,
    output_colwise: torch.Tensor,
    scale_inv_rowwise: torch.Tensor,
    scale_inv_colwise: torch.Tensor,
    rows: int,
    cols: int,
    start_offset: int,
) -> None:
    """Quantise a run of elements of a [rows, cols] weight to E4M3 with its runs' scale bytes, for both readings."""
    positions = torch.arange(start_offset, start_offset + input.numel())
    row, column = positions // cols, positions % cols
    values = input.detach().reshape(-1).float()
    for output, codes in (
        (output_rowwise, scale_inv_rowwise[row, column // fp8.RUN]),
        (output_colwise, scale_inv_colwise[row // fp8.RUN, column]),
    ):
        output.copy_(fp8.to_fp8(values * fp8.e8m0_multipliers(codes)).view(torch.uint8).reshape(output.shape))

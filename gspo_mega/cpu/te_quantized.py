"""Transformer Engine's quantised tensors on a CPU: which buffers they have, how they are filled, and how they are read.

This file converts between a plain tensor and the buffers of Float8Tensor, Float8BlockwiseQTensor and MXFP8Tensor, in
the layouts that Transformer Engine's Python slices, gathers and transposes: data as uint8, column-wise data of FP8 and
of block FP8 transposed, block scales padded to multiples of 4 and (1x128) transposed, MX scales padded to 128 x 4.
`gspo_mega/algorithm` does the rounding. The kernels that Transformer Engine calls are in `te_fp8.py`.

Padding that a GPU leaves uninitialised is zero here. Scales always stay in the compact layout, because the shuffled one
that some GPU products read has no meaning for the products here.
"""

from __future__ import annotations

import functools
import importlib
import types
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from gspo_mega.algorithm import fp8
from gspo_mega.cpu.te_extension import torch_dtype

BLOCK = 128


class QuantizedFormat(NamedTuple):
    """One of Transformer Engine's quantised formats: its classes, and the constructor's name of each buffer."""

    tensor: type
    storage: type
    buffers: dict[str, str]
    attributes: tuple[str, ...]  # the quantiser's, which the constructor takes


@functools.cache
def transformer_engine_classes() -> types.SimpleNamespace:
    """Return Transformer Engine's quantisers and the format that each makes, imported at the first use."""
    blockwise, per_tensor, mx = (
        importlib.import_module(f"transformer_engine.pytorch.tensor.{name}")
        for name in ("float8_blockwise_tensor", "float8_tensor", "mxfp8_tensor")
    )
    utilities = importlib.import_module("transformer_engine.pytorch.utils")
    by_rows_and_columns = dict(
        _rowwise_data="rowwise_data",
        _rowwise_scale_inv="rowwise_scale_inv",
        _columnwise_data="columnwise_data",
        _columnwise_scale_inv="columnwise_scale_inv",
    )
    float8 = QuantizedFormat(
        per_tensor.Float8Tensor,
        per_tensor.Float8TensorStorage,
        dict(_data="data", _transpose="data_transpose", _scale_inv="fp8_scale_inv"),
        (),
    )
    return types.SimpleNamespace(
        Float8Quantizer=per_tensor.Float8Quantizer,
        Float8CurrentScalingQuantizer=per_tensor.Float8CurrentScalingQuantizer,
        Float8BlockQuantizer=blockwise.Float8BlockQuantizer,
        MXFP8Quantizer=mx.MXFP8Quantizer,
        Float8TensorStorage=per_tensor.Float8TensorStorage,
        Float8BlockwiseQTensorStorage=blockwise.Float8BlockwiseQTensorStorage,
        MXFP8TensorStorage=mx.MXFP8TensorStorage,
        needs_no_transpose=utilities.is_non_tn_fp8_gemm_supported,
        kinds={
            per_tensor.Float8Quantizer: float8,
            per_tensor.Float8CurrentScalingQuantizer: float8,
            blockwise.Float8BlockQuantizer: QuantizedFormat(
                blockwise.Float8BlockwiseQTensor,
                blockwise.Float8BlockwiseQTensorStorage,
                by_rows_and_columns,
                ("is_2D_scaled",),
            ),
            mx.MXFP8Quantizer: QuantizedFormat(
                mx.MXFP8Tensor, mx.MXFP8TensorStorage, by_rows_and_columns, ("with_gemm_swizzled_scales",)
            ),
        },
    )


def kind_of(quantizer: Any) -> QuantizedFormat:
    """Return the format that a quantiser makes.

    Raises:
        NotImplementedError: a quantiser without a CPU kernel (NVFP4, hybrid ones).
    """
    for owner, kind in transformer_engine_classes().kinds.items():
        if isinstance(quantizer, owner):
            return kind
    raise NotImplementedError(
        f"{type(quantizer).__name__} has no CPU kernel; delayed, tensorwise, blockwise and mxfp8 scaling have"
    )


def build(quantizer: Any, shape: torch.Size | list[int], dtype: torch.dtype, buffers: dict) -> Any:
    """Return Transformer Engine's tensor with these buffers; its bare storage class if the quantiser is internal.

    Args:
        shape: of the values.
        dtype: what the tensor says it is.
        buffers: by attribute name; a missing one is None.
    """
    kind = kind_of(quantizer)
    options: dict[str, Any] = {name: buffers.get(attribute) for attribute, name in kind.buffers.items()}
    options |= dict(fp8_dtype=quantizer.dtype, quantizer=quantizer)
    if "is_2D_scaled" in kind.attributes:
        options["is_2D_scaled"] = quantizer.block_scaling_dim == 2
    if "with_gemm_swizzled_scales" in kind.attributes:
        options["with_gemm_swizzled_scales"] = False
    if quantizer.internal:
        return kind.storage(fake_dtype=dtype, **options)
    return kind.tensor(shape=torch.Size(shape), dtype=dtype, device=torch.device("cpu"), **options)


def fill(quantizer: Any, output: Any, buffers: dict) -> Any:
    """Write the buffers into an existing tensor, in place where it has them: views of a parameter stay views."""
    kind = kind_of(quantizer)
    if not isinstance(output, kind.storage):
        raise TypeError(f"{type(quantizer).__name__} cannot write into {type(output).__name__}")
    for attribute in kind.buffers:
        new, old = buffers.get(attribute), getattr(output, attribute)
        if new is None or old is None:
            setattr(output, attribute, new)
        else:
            old.copy_(new.reshape(old.shape))
    if "_transpose" in kind.buffers:
        output._transpose_invalid = "_transpose" not in buffers
    output._fp8_dtype = quantizer.dtype
    return output


def empty_buffers(quantizer: Any, shape: torch.Size | list[int]) -> dict[str, torch.Tensor]:
    """Return zeroed buffers of a tensor of this shape, as the quantiser's usages ask for."""
    kind_of(quantizer)  # refuses others
    classes, shape = transformer_engine_classes(), torch.Size(shape)
    buffers: dict[str, torch.Tensor] = {}
    if isinstance(quantizer, (classes.Float8Quantizer, classes.Float8CurrentScalingQuantizer)):
        if quantizer.rowwise_usage or classes.needs_no_transpose():
            buffers["_data"] = torch.zeros(shape, dtype=torch.uint8)
        if quantizer.columnwise_usage and not classes.needs_no_transpose():
            buffers["_transpose"] = torch.zeros((shape[-1], *shape[:-1]), dtype=torch.uint8)
        return buffers | dict(_scale_inv=torch.ones(1))
    scale_dtype = torch.uint8 if isinstance(quantizer, classes.MXFP8Quantizer) else torch.float32
    if quantizer.rowwise_usage:
        buffers["_rowwise_data"] = torch.zeros(shape, dtype=torch.uint8)
        buffers["_rowwise_scale_inv"] = torch.zeros(quantizer.get_scale_shape(shape, False), dtype=scale_dtype)
    if quantizer.columnwise_usage:
        buffers["_columnwise_data"] = torch.zeros(tuple(quantizer.get_columnwise_shape(shape)), dtype=torch.uint8)
        buffers["_columnwise_scale_inv"] = torch.zeros(quantizer.get_scale_shape(shape, True), dtype=scale_dtype)
    return buffers


def quantized_buffers(x: torch.Tensor, quantizer: Any) -> dict[str, torch.Tensor]:
    """Return the buffers of `x` that the quantiser asks for. A quantiser of delayed scaling also updates its amax.

    Args:
        x: [..., m] float32, bfloat16 or float16.

    Collective over the quantiser's amax group, where it has one and `x` is not empty.

    Raises:
        NotImplementedError: a quantiser without a CPU kernel, or per-tensor FP8 without row-wise data.
        ValueError: MXFP8 of sides that 32 does not divide.
    """
    kind_of(quantizer)
    classes = transformer_engine_classes()
    if x.numel() == 0:
        return empty_buffers(quantizer, x.shape)
    if isinstance(quantizer, (classes.Float8Quantizer, classes.Float8CurrentScalingQuantizer)):
        return _with_one_scale(x, quantizer, classes.needs_no_transpose())
    by_axes = _in_blocks_of_128 if isinstance(quantizer, classes.Float8BlockQuantizer) else _in_runs_of_32
    return by_axes(x, quantizer)


def scale_of_tensor(x: torch.Tensor, quantizer: Any) -> tuple[torch.Tensor, bool]:
    """Return (the scale [1] float32 by which a per-tensor quantiser multiplies, whether no value of `x` exceeds what
    the scale was made for). The scale is the recipe's (delayed, which also notes the largest value of `x` in its
    history), or that of the present values, over the quantiser's group if it has one.
    """
    amax, is_finite = fp8.amax_and_whether_finite(x)
    if isinstance(quantizer, transformer_engine_classes().Float8Quantizer):
        if quantizer.amax.numel():
            quantizer.amax.copy_(torch.maximum(quantizer.amax, amax.reshape(quantizer.amax.shape)))
        return quantizer.scale.reshape(1), False
    amax = amax.reshape(1)
    if quantizer.with_amax_reduction:
        dist.all_reduce(amax, dist.ReduceOp.MAX, group=quantizer._canonicalized_amax_reduction_group())
        is_finite = is_finite and bool(torch.isfinite(amax))
    options = dict(power_of_two=quantizer.force_pow_2_scales, epsilon=quantizer.amax_epsilon)
    return fp8.scale_from_amax(amax, fp8_type(quantizer), **options), is_finite


def fp8_type(quantizer: Any) -> torch.dtype:
    dtype = torch_dtype(quantizer.dtype)
    assert dtype is not None
    return dtype


def _with_one_scale(x: torch.Tensor, quantizer: Any, needs_no_transpose: bool) -> dict[str, torch.Tensor]:
    if not (quantizer.rowwise_usage or needs_no_transpose):
        raise NotImplementedError("per-tensor FP8 with column-wise data only: Transformer Engine has no kernel for it")
    scale, is_bounded = scale_of_tensor(x, quantizer)
    data = fp8.to_fp8(x.float() * scale, fp8_type(quantizer), is_bounded=is_bounded).view(torch.uint8)
    buffers = dict(_data=data, _scale_inv=torch.reciprocal(scale))
    if quantizer.columnwise_usage and not needs_no_transpose:
        buffers["_transpose"] = transposed(data)
    return buffers


def _in_blocks_of_128(x: torch.Tensor, quantizer: Any) -> dict[str, torch.Tensor]:
    def rounded(block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        data, scale_inv = fp8.quantize_blocks(
            matrix,
            block,
            quantizer.force_pow_2_scales,
            fp8_type(quantizer),
            epsilon=quantizer.amax_epsilon,
        )
        return data.view(torch.uint8), scale_inv

    matrix, buffers = x.reshape(-1, x.shape[-1]), {}
    if quantizer.block_scaling_dim == 2:
        data, scale_inv = rounded((BLOCK, BLOCK))
        if quantizer.rowwise_usage:
            buffers |= dict(_rowwise_data=data.reshape(x.shape), _rowwise_scale_inv=_padded(scale_inv, 1, 4))
        if quantizer.columnwise_usage:
            buffers |= dict(
                _columnwise_data=transposed(data.reshape(x.shape)),
                _columnwise_scale_inv=_padded(scale_inv.t(), 1, 4),
            )
        return buffers
    if quantizer.rowwise_usage:
        data, scale_inv = rounded((1, BLOCK))
        buffers |= dict(_rowwise_data=data.reshape(x.shape), _rowwise_scale_inv=_padded(scale_inv.t(), 1, 4))
    if quantizer.columnwise_usage:
        data, scale_inv = rounded((BLOCK, 1))
        buffers |= dict(
            _columnwise_data=transposed(data.reshape(x.shape)), _columnwise_scale_inv=_padded(scale_inv, 1, 4)
        )
    return buffers


def _in_runs_of_32(x: torch.Tensor, quantizer: Any) -> dict[str, torch.Tensor]:
    matrix, dtype, run = x.reshape(-1, x.shape[-1]), fp8_type(quantizer), fp8.RUN
    if matrix.shape[0] % run or matrix.shape[1] % run:
        raise ValueError(f"MXFP8 needs sides that are multiples of {run}, and the tensor is {tuple(x.shape)}")
    buffers = {}
    if quantizer.with_2d_quantization:
        data, codes = fp8.quantize_mx(matrix, (run, run), dtype)
        by_rows = (data, codes.repeat_interleave(run, 0))
        by_columns = (data, codes.repeat_interleave(run, 1))
    else:
        by_rows = fp8.quantize_mx(matrix, (1, run), dtype) if quantizer.rowwise_usage else None
        by_columns = fp8.quantize_mx(matrix, (run, 1), dtype) if quantizer.columnwise_usage else None
    if quantizer.rowwise_usage and by_rows is not None:
        buffers["_rowwise_data"] = by_rows[0].view(torch.uint8).reshape(x.shape)
        buffers["_rowwise_scale_inv"] = _padded(_padded(by_rows[1], 0, BLOCK), 1, 4)
    if quantizer.columnwise_usage and by_columns is not None:
        buffers["_columnwise_data"] = by_columns[0].view(torch.uint8).reshape(x.shape)
        buffers["_columnwise_scale_inv"] = _padded(_padded(by_columns[1], 0, 4), 1, BLOCK)
    return buffers


def transposed(data: torch.Tensor) -> torch.Tensor:
    """Return [*leading, last] as [last, *leading], contiguous."""
    return data.reshape(-1, data.shape[-1]).t().contiguous().reshape(data.shape[-1], *data.shape[:-1])


def _padded(scales: torch.Tensor, dim: int, multiple: int) -> torch.Tensor:
    """Append zeros to scales up to a multiple; contiguous."""
    missing = -scales.shape[dim] % multiple
    return F.pad(scales, (0, missing) if dim == 1 else (0, 0, 0, missing)).contiguous()


def dequantized(tensor: Any, columnwise: bool) -> torch.Tensor:
    """Return the values that a product reads, exact up to one rounding of data * scale_inv (none for powers of two).

    Args:
        tensor: a quantised tensor of Transformer Engine, or a plain one.
        columnwise: read the column-wise buffers (an operand whose rows are summed over) where the format has its own;
            per-tensor FP8 has one set of values for both readings.

    Returns:
        [...] float32 in the tensor's own shape and order.

    Raises:
        RuntimeError: the tensor lacks the buffers of that reading, as a GPU's product would find.
    """
    classes = transformer_engine_classes() if not _is_plain(tensor) else None
    if classes is None:
        return tensor.detach().float()
    dtype = torch_dtype(tensor._fp8_dtype)
    assert dtype is not None
    if isinstance(tensor, classes.Float8TensorStorage):
        return _read_one_scale(tensor, dtype)
    side = "column" if columnwise else "row"
    data, scales = getattr(tensor, f"_{side}wise_data"), getattr(tensor, f"_{side}wise_scale_inv")
    if data is None:
        raise RuntimeError(f"a product reads {side}-wise data, and this {type(tensor).__name__} has none")
    if isinstance(tensor, classes.MXFP8TensorStorage):
        run = (fp8.RUN, 1) if columnwise else (1, fp8.RUN)
        matrix = data.view(dtype).reshape(-1, data.shape[-1])
        codes = scales[: -(-matrix.shape[0] // run[0]), : -(-matrix.shape[1] // run[1])]
        return fp8.dequantize_mx(matrix, codes, run).reshape(data.shape)
    return _read_blocks(tensor, data, scales, dtype, columnwise)


def _read_one_scale(tensor: Any, dtype: torch.dtype) -> torch.Tensor:
    if tensor._data is not None:
        return fp8.from_fp8(tensor._data.view(dtype)) * tensor._scale_inv
    if tensor._transpose is None or tensor._transpose_invalid:
        raise RuntimeError(f"a product reads this {type(tensor).__name__}, and it has no data")
    return (fp8.from_fp8(tensor._transpose.view(dtype)) * tensor._scale_inv).movedim(0, -1)


def _read_blocks(tensor: Any, data: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, columnwise: bool) -> Any:
    # Column-wise data is the transposed matrix; as such its blocks lie along its rows, as row-wise ones do.
    matrix = data.view(dtype).reshape(data.shape[0], -1) if columnwise else data.view(dtype).reshape(-1, data.shape[-1])
    rows, columns = matrix.shape
    if tensor._is_2D_scaled:
        values = fp8.dequantize_blocks(matrix, scales[: -(-rows // BLOCK), : -(-columns // BLOCK)], (BLOCK, BLOCK))
    else:
        values = fp8.dequantize_blocks(matrix, scales[:, :rows].t(), (1, BLOCK))
    return values.reshape(data.shape).movedim(0, -1) if columnwise else values.reshape(data.shape)


def _is_plain(tensor: Any) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter)

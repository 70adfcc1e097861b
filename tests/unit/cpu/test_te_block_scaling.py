"""Blockwise scaling of Transformer Engine's tensors on a CPU against a loop over blocks in numpy, in its scale layout.

The oracle is written from the formats' definition and Transformer Engine's documentation (`fp8_by_numpy.py`); the
layout is held against what Transformer Engine's own Python reads: `get_scale_shape` and `dequantize`.
"""

import numpy as np
import pytest
import torch
from fp8_by_numpy import BFLOAT16_MAX, FLOAT32_MAX, quantize_by_loops
from te_process import in_te_process

SHAPES = [(128, 128), (256, 384), (1, 128), (130, 200), (3, 100, 257)]


def quantizer(dim, **options):
    from transformer_engine.pytorch.constants import DType
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

    options = dict(rowwise=True, columnwise=True) | options
    return Float8BlockQuantizer(DType[options.pop("dtype", "kFloat8E4M3")], block_scaling_dim=dim, **options)


def values(data):
    from gspo_mega.algorithm.fp8 import from_fp8

    return from_fp8(data.view(torch.float8_e4m3fn)).numpy()


def padded(scales, multiple=4):
    return np.pad(scales, ((0, 0), (0, -scales.shape[1] % multiple)))


def spread(shape, seed=0):
    """Values over many powers of two, so that blocks differ; a row and a block of zeros; subnormals."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.exp(torch.randn(shape, generator=generator) * 3)
    flat = x.reshape(-1, shape[-1])
    flat[-1] = 0
    flat[:, -1] = 1e-40
    return x


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
@in_te_process
def test_rows_of_128_by_loops(shape, power_of_two, source):
    x = spread(shape).to(source)
    matrix = x.reshape(-1, shape[-1]).float().numpy()
    q = quantizer(1, force_pow_2_scales=power_of_two)
    ours = q(x)
    options = dict(power_of_two=power_of_two, highest=FLOAT32_MAX if source == torch.float32 else BFLOAT16_MAX)
    by_rows, row_scales = quantize_by_loops(matrix, (1, 128), **options)
    by_columns, column_scales = quantize_by_loops(matrix, (128, 1), **options)
    np.testing.assert_array_equal(values(ours._rowwise_data), by_rows.reshape(shape))
    np.testing.assert_array_equal(ours._rowwise_scale_inv.numpy(), padded(row_scales.T))
    np.testing.assert_array_equal(values(ours._columnwise_data), by_columns.T.reshape(shape[-1], *shape[:-1]))
    np.testing.assert_array_equal(ours._columnwise_scale_inv.numpy(), padded(column_scales))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("power_of_two", [False, True])
@in_te_process
def test_squares_of_128_by_loops(shape, power_of_two):
    x = spread(shape)
    ours = quantizer(2, force_pow_2_scales=power_of_two)(x)
    expected, scales = quantize_by_loops(x.reshape(-1, shape[-1]).numpy(), (128, 128), power_of_two=power_of_two)
    np.testing.assert_array_equal(values(ours._rowwise_data), expected.reshape(shape))
    np.testing.assert_array_equal(ours._rowwise_scale_inv.numpy(), padded(scales))
    np.testing.assert_array_equal(values(ours._columnwise_data), expected.T.reshape(shape[-1], *shape[:-1]))
    np.testing.assert_array_equal(ours._columnwise_scale_inv.numpy(), padded(scales.T))


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
@in_te_process
def test_the_layout_is_the_one_transformer_engine_reads(shape, dim):
    from gspo_mega.cpu.te_quantized import dequantized

    q = quantizer(dim)
    x = spread(shape, seed=1)
    ours = q(x)
    for columnwise, scale in ((False, ours._rowwise_scale_inv), (True, ours._columnwise_scale_inv)):
        assert tuple(scale.shape) == tuple(q.get_scale_shape(shape, columnwise)) and scale.is_contiguous()
    assert tuple(ours._columnwise_data.shape) == tuple(q.get_columnwise_shape(shape))
    assert torch.equal(ours.dequantize(), dequantized(ours, columnwise=False))
    columns_only = quantizer(dim, rowwise=False)(x)
    assert columns_only._rowwise_data is None
    assert torch.equal(columns_only.dequantize(), dequantized(ours, columnwise=True))
    with pytest.raises(RuntimeError, match="row-wise data"):
        dequantized(columns_only, columnwise=False)


@in_te_process
def test_column_wise_data_made_from_squares_later_is_what_the_kernel_would_have_made():
    x = spread((256, 384), seed=2)
    rows = quantizer(2, columnwise=False)(x)
    rows.update_usage(rowwise_usage=True, columnwise_usage=True)
    both = quantizer(2)(x)
    assert torch.equal(rows._columnwise_data, both._columnwise_data)
    assert torch.equal(rows._columnwise_scale_inv[:, :2], both._columnwise_scale_inv[:, :2])


@in_te_process
def test_worked_by_hand():
    """One row of 256: block 0 holds 7 and -3.5, block 1 is zero.

    Powers of two: 448 / 7 = 64 exactly, so 7 becomes 448 = 0x7E and -3.5 becomes -224 = 0xF6; zeros have scale 1.
    With 6 instead of 7: 448 / 6 = 74.667 is cut to 64, 6 becomes 384 = 0x7C; in float32 scale_inv is 1 / 74.666664 and
    6 becomes 448.
    """
    x = torch.zeros(1, 256)
    x[0, 0], x[0, 1] = 7.0, -3.5
    ours = quantizer(1, force_pow_2_scales=True)(x)
    assert ours._rowwise_data[0, :3].tolist() == [0x7E, 0xF6, 0x00]
    assert ours._rowwise_scale_inv[:, 0].tolist() == [1 / 64, 1.0]
    x[0, 0] = 6.0
    ours = quantizer(1, force_pow_2_scales=True)(x)
    assert (ours._rowwise_data[0, 0].item(), ours._rowwise_scale_inv[0, 0].item()) == (0x7C, 1 / 64)
    ours = quantizer(1, force_pow_2_scales=False)(x)
    assert ours._rowwise_data[0, 0].item() == 0x7E
    assert ours._rowwise_scale_inv[0, 0].item() == np.float32(1) / (np.float32(448) / np.float32(6))
    # A NaN and an infinity: NaN is 0x7F and counts for nothing; an infinite amax has the scale 1 and saturates.
    x[0, 2], x[0, 200] = torch.nan, -torch.inf
    ours = quantizer(1, force_pow_2_scales=True)(x)
    assert ours._rowwise_data[0, [0, 2, 200]].tolist() == [0x7C, 0x7F, 0xFE]
    assert ours._rowwise_scale_inv[:, 0].tolist() == [1 / 64, 1.0]


@in_te_process
def test_existing_buffers_are_written_in_place_and_epsilon_is_a_floor():
    x = spread((128, 256), seed=3)
    ours = quantizer(2)(x)
    data, scale = ours._rowwise_data, ours._rowwise_scale_inv
    quantizer(2, amax_epsilon=1e6).update_quantized(x, ours)
    assert ours._rowwise_data is data and ours._rowwise_scale_inv is scale
    expected, scales = quantize_by_loops(x.numpy(), (128, 128), power_of_two=True, epsilon=1e6)
    np.testing.assert_array_equal(values(data), expected)
    np.testing.assert_array_equal(scale.numpy(), padded(scales))


@pytest.mark.parametrize("cut", [0, 1, 777, 128 * 256 - 5])
@in_te_process
def test_a_weight_that_two_ranks_quantise_in_parts_is_the_weight_quantised_at_once(cut):
    """Transformer Engine's cast of the optimizer's flat shards into FP8 parameters: amax, maximum over ranks, cast."""
    import transformer_engine_torch as extension

    weight = spread((200, 256), seed=4)
    whole = quantizer(2, columnwise=False)(weight)
    flat, shape = weight.reshape(-1), tuple(whole._rowwise_scale_inv.shape)
    amaxes = []
    for start, part in ((0, flat[:cut]), (cut, flat[cut:])):
        amaxes.append(torch.zeros(shape))
        if part.numel():
            extension.fp8_block_scaling_compute_partial_amax(part, amaxes[-1], 200, 256, start, 128)
    amax, scale, scale_inv = torch.maximum(*amaxes), torch.empty(shape), torch.empty(shape)
    extension.multi_tensor_compute_scale_and_scale_inv(
        65536, torch.zeros(1, dtype=torch.int), [[amax], [scale], [scale_inv]], 448.0, True, 0.0
    )
    assert torch.equal(scale_inv[:, :2], whole._rowwise_scale_inv[:, :2])
    out = torch.full((200 * 256,), 255, dtype=torch.uint8)
    for start, part in ((0, flat[:cut]), (cut, flat[cut:])):
        extension.fp8_block_scaling_partial_cast(
            part, out[start : start + part.numel()], scale, 200, 256, start, 128, whole._fp8_dtype
        )
    assert torch.equal(out.reshape(200, 256), whole._rowwise_data)

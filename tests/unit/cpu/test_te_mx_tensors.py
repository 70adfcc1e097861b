"""MXFP8 of Transformer Engine's tensors on a CPU: the rounding of `algorithm/fp8.py` in its padded scale layout.

The rounding has its own oracles in tests/unit/algorithm/test_microscaling.py.
"""

import pytest
import torch
from te_process import in_te_process

from gspo_mega.algorithm.fp8 import quantize_mx

SHAPES = [(32, 32), (160, 96), (2, 64, 128)]


def quantizer(**options):
    from transformer_engine.pytorch.constants import DType
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer

    return MXFP8Quantizer(DType.kFloat8E4M3, **options)


def spread(shape):
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(shape, generator=generator) * torch.exp(torch.randn(shape, generator=generator) * 3)


@pytest.mark.parametrize("shape", SHAPES)
@in_te_process
def test_values_bytes_and_padding(shape):
    x, q = spread(shape).bfloat16(), quantizer()
    ours, matrix = q(x), x.reshape(-1, shape[-1])
    for run, name in (((1, 32), "rowwise"), ((32, 1), "columnwise")):
        data, codes = quantize_mx(matrix, run)
        assert torch.equal(getattr(ours, f"_{name}_data"), data.view(torch.uint8).reshape(shape))
        stored = getattr(ours, f"_{name}_scale_inv")
        assert tuple(stored.shape) == tuple(q.get_scale_shape(shape, name == "columnwise")) and stored.is_contiguous()
        assert torch.equal(stored[: codes.shape[0], : codes.shape[1]], codes)
        assert stored.int().sum() == codes.int().sum()


@in_te_process
def test_reading_by_transformer_engine_and_by_products():
    from gspo_mega.cpu.te_quantized import dequantized

    x = spread((64, 96))
    ours = quantizer()(x)
    assert torch.equal(ours.dequantize(), dequantized(ours, columnwise=False))
    assert ours.dequantize(dtype=torch.bfloat16).dtype == torch.bfloat16
    columns = quantizer(rowwise=False)(x)
    assert torch.equal(columns.dequantize(), dequantized(ours, columnwise=True))
    # Half a step, or half of the least subnormal: 2^-10 of a scale of at most 2 amax / 448.
    assert ((dequantized(ours, True) - x).abs() <= x.abs() * 2**-4 + x.abs().max() * 2**-17).all()


@in_te_process
def test_scales_stay_compact_where_a_gpu_would_shuffle_them():
    q = quantizer()
    q.optimize_for_gemm = True
    assert not q(spread((64, 96)))._with_gemm_swizzled_scales


@in_te_process
def test_sides_that_32_does_not_divide_are_refused():
    with pytest.raises(ValueError, match="multiples of 32"):
        quantizer()(torch.zeros(33, 32))


@in_te_process
def test_a_weight_that_two_ranks_quantise_in_parts_is_the_weight_quantised_at_once():
    import transformer_engine_torch as extension

    weight, cut = spread((64, 96)), 64 * 96 // 2 + 13
    whole = quantizer()(weight)
    rows, columns = whole._rowwise_scale_inv, whole._columnwise_scale_inv
    amaxes = [[torch.zeros(s.shape, dtype=torch.bfloat16) for s in (rows, columns)] for _ in range(2)]
    exact = weight.bfloat16()  # the amaxes travel in bfloat16: a weight in it loses nothing
    whole = quantizer()(exact)
    flat = exact.reshape(-1)
    parts = ((0, flat[:cut]), (cut, flat[cut:]))
    for (start, part), mine in zip(parts, amaxes, strict=True):
        extension.mxfp8_scaling_compute_partial_amax(part, *mine, 64, 96, start)
    together = [torch.maximum(a, b) for a, b in zip(*amaxes, strict=True)]
    codes = [torch.zeros_like(rows), torch.zeros_like(columns)]
    extension.multi_tensor_compute_scale_inv_e8m0(65536, None, [together, codes])
    assert torch.equal(codes[0], whole._rowwise_scale_inv) and torch.equal(codes[1], whole._columnwise_scale_inv)
    outputs = [torch.zeros(64 * 96, dtype=torch.uint8) for _ in range(2)]
    for start, part in parts:
        mine = [output[start : start + part.numel()] for output in outputs]
        extension.mxfp8_scaling_partial_cast(part, *mine, *codes, 64, 96, start)
    assert torch.equal(outputs[0].reshape(64, 96), whole._rowwise_data)
    assert torch.equal(outputs[1].reshape(64, 96), whole._columnwise_data)

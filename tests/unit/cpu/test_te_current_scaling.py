"""Tensorwise (current) scaling of Transformer Engine's tensors on a CPU against Transformer Engine's own reference."""

import pytest
import torch
from te_process import in_te_process

SHAPES = [(1, 1), (3, 5), (16, 128), (2, 7, 33)]


def quantizer(dtype="kFloat8E4M3", **options):
    from transformer_engine.pytorch.constants import DType
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer

    return Float8CurrentScalingQuantizer(DType[dtype], torch.device("cpu"), **options)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", ["kFloat8E4M3", "kFloat8E5M2"])
@in_te_process
def test_values_and_scales_are_the_references(shape, power_of_two, dtype):
    from transformer_engine.pytorch.custom_recipes.reference_current_scaling import CurrentScalingQuantizerRef

    fp8 = torch.float8_e4m3fn if dtype == "kFloat8E4M3" else torch.float8_e5m2
    generator = torch.Generator().manual_seed(len(shape))
    for source in (torch.float32, torch.bfloat16):
        for size in (1e-30, 1e-3, 1.0, 300.0, 1e30):
            for epsilon in (0.0, 0.5):
                x = (torch.randn(shape, generator=generator) * size).to(source)
                ours = quantizer(dtype, force_pow_2_scales=power_of_two, amax_epsilon=epsilon)(x)
                reference = CurrentScalingQuantizerRef(fp8, pow_2_scales=power_of_two, eps=epsilon)
                theirs = reference.quantize(x.reshape(-1, shape[-1]))
                assert torch.equal(ours._scale_inv, theirs.scale), (source, size, epsilon)
                data = theirs.data.view(torch.uint8)
                assert torch.equal(ours._data, data.reshape(shape)), (source, size, epsilon)
                assert torch.equal(ours._transpose, data.t().reshape(shape[-1], *shape[:-1])), (source, size, epsilon)
                assert ours.dtype == source and ours.shape == torch.Size(shape)


@in_te_process
def test_zeros_infinities_and_nan_follow_the_kernel_where_the_reference_does_not():
    """The reference lets a NaN or an infinity into the scale; the kernel takes 1 for an infinite amax and passes NaN by
    (`compute_scale_from_amax`, `fmaxf`)."""
    ours = quantizer()(torch.tensor([[0.0, -0.0]]))
    assert (ours._data.tolist(), ours._scale_inv.tolist()) == ([[0x00, 0x80]], [1.0])
    ours = quantizer()(torch.tensor([[torch.inf, 2.0]]))
    assert (ours._data.tolist(), ours._scale_inv.tolist()) == ([[0x7E, 0x40]], [1.0])
    ours = quantizer()(torch.tensor([[torch.nan, 3.5]]))
    assert (ours._data.tolist(), ours._scale_inv.tolist()) == ([[0x7F, 0x7E]], [1 / 128])
    # 1e-40: 448e40 is no float32, and the scale is float32's largest.
    ours = quantizer()(torch.tensor([[1e-40]]))
    assert ours._scale_inv.item() == (1 / torch.tensor(torch.finfo(torch.float32).max)).item()


@in_te_process
def test_usages_decide_the_buffers_and_existing_ones_are_written_in_place():
    from gspo_mega.cpu.te_quantized import dequantized

    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    both = quantizer()(x)
    rows = quantizer(columnwise=False)(x)
    assert rows._transpose is None and rows._transpose_invalid
    with pytest.raises(NotImplementedError, match="column-wise data only"):
        quantizer(rowwise=False)(x)
    # Per tensor there is one set of values: both readings are equal, also from the transpose alone.
    assert torch.equal(dequantized(both, True), dequantized(rows, True))
    data, both._data = both._data, None
    assert torch.equal(dequantized(both, False), dequantized(rows, False))
    both._data = data
    # In place: whoever holds a view of the buffers (a flat buffer of parameters) sees the new values.
    view = both._data.view(-1)
    quantizer().update_quantized(2 * x, both)
    assert torch.equal(view.reshape(4, 8), rows._data) and both._scale_inv.item() == 2 * rows._scale_inv.item()
    quantizer(columnwise=False).update_quantized(x, both)
    assert both._transpose is None and both._transpose_invalid


@in_te_process
def test_a_no_op_flag_keeps_the_output():
    import transformer_engine_torch as extension

    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    old = quantizer()(x)
    kept = old._data.clone(), old._scale_inv.clone()
    extension.quantize(3 * x + 1, quantizer(), old, torch.ones(1))
    assert torch.equal(old._data, kept[0]) and torch.equal(old._scale_inv, kept[1])
    extension.quantize(3 * x + 1, quantizer(), old, torch.zeros(1))
    assert not torch.equal(old._data, kept[0])


@in_te_process
def test_a_tensor_without_values_and_a_new_one():
    empty = quantizer()(torch.empty(0, 16))
    assert empty.shape == (0, 16) and empty._transpose.shape == (16, 0)
    made = quantizer().make_empty((2, 3, 16), dtype=torch.bfloat16, device="cpu")
    assert made._data.shape == (2, 3, 16) and made._transpose.shape == (16, 2, 3) and made.dtype == torch.bfloat16


@in_te_process
def test_a_split_and_a_bias_gradient():
    import transformer_engine_torch as extension

    x = torch.randn(6, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    parts = extension.split_quantize(x, [4, 2], [quantizer(), quantizer()])
    for part, plain in zip(parts, (x[:4], x[4:]), strict=True):
        assert torch.equal(part._data, quantizer()(plain)._data)
    bias, gradient = extension.bgrad_quantize(x, quantizer())
    assert torch.equal(bias, x.float().sum(0).bfloat16())
    assert torch.equal(gradient._data, quantizer()(x)._data)
    assert extension.bgrad_quantize(x, None)[1] is not None


@in_te_process
def test_a_quantizer_without_a_kernel_is_named():
    import transformer_engine_torch as extension
    from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

    fp4 = NVFP4Quantizer.__new__(NVFP4Quantizer)
    with pytest.raises(NotImplementedError, match="NVFP4Quantizer has no CPU kernel"):
        extension.create_empty_quantized_tensor(fp4, [16, 16], torch.bfloat16, torch.device("cpu"), False)
    with pytest.raises(NotImplementedError, match="NVFP4Quantizer has no CPU kernel"):
        extension.quantize(torch.zeros(32, 32), fp4)

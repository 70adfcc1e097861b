"""SwiGLU of the CPU kernels against autograd in fp64, alone and quantised, and through Transformer Engine's operation."""

import pytest
import torch
import torch.nn.functional as F
from te_process import in_te_process

from gspo_mega.cpu import te_layers

# One rounding to bf16 has half of 2^-7 of a value; fp32 has a few of 6e-8, more where terms cancel.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2**-8 * 1.01}


def numbers(*shape, seed, spread=1.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * spread


def wanted(x, outer):
    whole = x.detach().double().requires_grad_()
    gate, linear = whole.chunk(2, dim=-1)
    result = F.silu(gate) * linear
    return result.detach(), torch.autograd.grad(result, whole, outer.double())[0]


def close(got, want):
    error = (got.double() - want).abs() / want.abs().clamp(min=want.abs().mean())
    assert error.max() <= TOLERANCES[got.dtype]


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_swiglu_and_its_gradient(dtype):
    x, outer = numbers(5, 3, 96, seed=0, spread=4.0).to(dtype), numbers(5, 3, 48, seed=1).to(dtype)
    got, by_x = te_layers.swiglu(x, None), te_layers.dswiglu(outer, x, None)
    assert got.shape == (5, 3, 48) and by_x.shape == x.shape and got.dtype == by_x.dtype == dtype
    for mine, theirs in zip((got, by_x), wanted(x, outer), strict=True):
        close(mine, theirs)


def test_extreme_gates_give_no_nan():
    x = torch.tensor([[100.0, -100.0, 3.0, 3.0], [3e38, -3e38, 0.0, 1.0]])
    assert te_layers.swiglu(x, None).tolist() == [[300.0, 0.0], [0.0, 0.0]]
    assert te_layers.dswiglu(torch.ones(2, 2), x, None)[0].tolist() == [3.0, 0.0, 100.0, 0.0]


@pytest.mark.parametrize("name", ["delayed", "tensorwise", "blockwise", "mxfp8"])
@in_te_process
def test_quantised_results_are_those_of_the_rounded_or_the_fp32_value(name):
    from test_te_fp8_layers import fp8
    from transformer_engine.pytorch.constants import DType
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer

    from gspo_mega.cpu import te_fp8

    tag = DType.kFloat8E4M3

    def quantizer():
        if name == "delayed":
            return Float8Quantizer(torch.tensor([16.0]), torch.zeros(1), tag)
        if name == "tensorwise":
            return Float8CurrentScalingQuantizer(tag, torch.device("cpu"))
        if name == "mxfp8":
            return MXFP8Quantizer(tag)
        return Float8BlockQuantizer(tag, rowwise=True, columnwise=True, block_scaling_dim=1)

    x, outer = numbers(128, 512, seed=2, spread=3.0).bfloat16(), numbers(128, 256, seed=3).bfloat16()
    with fp8(name):
        for got, value in (
            (te_layers.swiglu(x, quantizer()), te_layers.swiglu(x.float(), None)),
            (te_layers.dswiglu(outer, x, quantizer()), te_layers.dswiglu(outer.float(), x.float(), None)),
        ):
            by_fp32, by_rounded = (te_fp8.quantize(v, quantizer()).dequantize() for v in (value, value.bfloat16()))
            fused = name in ("delayed", "mxfp8")
            want, other = (by_fp32, by_rounded) if fused else (by_rounded, by_fp32)
            assert got.dtype == torch.bfloat16 and not torch.equal(want.float(), other.float())
            assert torch.equal(got.dequantize().float(), want.bfloat16().float())


@in_te_process
def test_transformer_engines_operation_reaches_it():
    import transformer_engine.pytorch as te

    x, outer = numbers(6, 32, seed=4).requires_grad_(), numbers(6, 16, seed=5)
    y = te.ops.SwiGLU()(x)
    y.backward(outer)
    for mine, theirs in zip((y.detach(), x.grad), wanted(x, outer), strict=True):
        close(mine, theirs)

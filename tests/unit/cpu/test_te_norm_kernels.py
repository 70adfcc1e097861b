"""RMSNorm and LayerNorm of the CPU kernels against autograd in fp64."""

import pytest
import torch
import torch.nn.functional as F

from gspo_mega.cpu import te_layers
from gspo_mega.cpu.te_extension import DType

TAGS = {torch.float32: DType.kFloat32, torch.bfloat16: DType.kBFloat16}
# fp32 sums of 48 terms: some roundings of 6e-8 each; one rounding to bf16 has half of 2^-7.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2**-8 * 1.01}


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    error = (got.double() - want).abs() / want.abs().clamp(min=want.abs().mean())
    assert error.max() <= TOLERANCES[got.dtype]


def inputs(dtype):
    x, outer = (numbers(5, 3, 48, seed=s).to(dtype).double().requires_grad_(s == 0) for s in (0, 1))
    weight = (1 + 0.1 * numbers(48, seed=2)).to(dtype).double().requires_grad_()
    bias = numbers(48, seed=3).to(dtype).double().requires_grad_()
    return x, outer.detach(), weight, bias


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(dtype, zero_centered):
    x, outer, weight, _ = inputs(dtype)
    want = F.rms_norm(x, (48,), weight + 1 if zero_centered else weight, eps=1e-3)
    given = x.detach().to(dtype), weight.detach().to(dtype)
    result, mean, inverse = te_layers.rmsnorm_fwd(given[0], given[1], 1e-3, None, None, TAGS[dtype], 0, zero_centered)
    assert mean is None and inverse.shape == (15,) and result.dtype == dtype
    close(result, want.detach())
    by_x, by_weight = torch.autograd.grad(want, (x, weight), outer)
    got = te_layers.rmsnorm_bwd(outer.to(dtype), given[0], inverse, given[1], 0, zero_centered)
    close(got[0], by_x)
    close(got[1], by_weight)
    added = te_layers.rmsnorm_bwd_add(outer.to(dtype), given[0], given[0], inverse, given[1], 0, zero_centered)
    close(added[0], by_x + x.detach())
    assert torch.equal(added[1], got[1])


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_norm(dtype, zero_centered):
    x, outer, weight, bias = inputs(dtype)
    want = F.layer_norm(x, (48,), weight + 1 if zero_centered else weight, bias, eps=1e-3)
    given = x.detach().to(dtype), weight.detach().to(dtype), bias.detach().to(dtype)
    result, mean, inverse = te_layers.layernorm_fwd(*given, 1e-3, None, None, TAGS[dtype], 0, zero_centered)
    assert mean.shape == inverse.shape == (15,) and result.dtype == dtype
    close(result, want.detach())
    wanted = torch.autograd.grad(want, (x, weight, bias), outer)
    got = te_layers.layernorm_bwd(outer.to(dtype), given[0], mean, inverse, given[1], 0, zero_centered)
    for mine, theirs in zip(got, wanted, strict=True):
        close(mine, theirs)


def test_a_given_output_is_written_in_place():
    x, weight, out = torch.ones(2, 4), torch.ones(4), torch.zeros(2, 4)
    result, _, _ = te_layers.rmsnorm_fwd(x, weight, 0.0, out, None, DType.kFloat32, 0, False)
    assert result is out and torch.equal(out, x)

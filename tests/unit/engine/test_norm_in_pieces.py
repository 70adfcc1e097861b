"""The norm of bf16 on a CPU, some rows at a time, against torch's and against fp64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import rms_norm, silu

import gspo_mega.engine  # noqa: F401  the CPU backend comes before Megatron
from gspo_mega.cpu import batch_invariant
from gspo_mega.engine import attention
from gspo_mega.engine.attention import NormInPieces, TorchNorm

EPS = 1e-5


def case(*shape: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor, NormInPieces]:
    """Input, upstream gradient and norm."""
    generator = torch.Generator().manual_seed(0)
    x, grad = (3 * torch.randn(2, *shape, generator=generator)).to(dtype)
    norm = NormInPieces(shape[-1], eps=EPS, dtype=dtype)
    with torch.no_grad():
        norm.weight.copy_(1 + 0.3 * torch.randn(shape[-1], generator=generator))
    return x.requires_grad_(), grad, norm


@pytest.mark.parametrize("shape", [(1, 1, 576), (700, 1, 576), (333, 1, 100), (129, 1, 9, 64), (0, 1, 64)])
@pytest.mark.parametrize("cached", [2**16, 1000])
def test_output_and_gradients(shape, cached, monkeypatch):
    monkeypatch.setattr(attention, "_CACHED_NUMBERS", cached)
    x, grad, norm = case(*shape)
    found = norm(x)
    plain = rms_norm(x, shape[-1:], norm.weight, EPS)
    assert torch.equal(found, plain) and found.shape == x.shape
    exact_x, exact_weight = (part.detach().double().requires_grad_() for part in (x, norm.weight))
    exact = torch.autograd.grad(
        rms_norm(exact_x, shape[-1:], exact_weight, EPS), (exact_x, exact_weight), grad.double()
    )
    ours, torchs = (torch.autograd.grad(out, (x, norm.weight), grad) for out in (found, plain))
    for our, torch_one, wanted in zip(ours, torchs, exact, strict=True):
        assert our.dtype == torch.bfloat16
        error, bound = (float((one.double() - wanted).norm()) for one in (our, torch_one))
        assert error <= 1.1 * bound


def test_rows_that_are_not_side_by_side():
    x, grad, norm = case(40, 2, 32)
    part = x.transpose(0, 1)[:, 1:]
    assert torch.equal(norm(part), rms_norm(part, (32,), norm.weight, EPS))
    (found,) = torch.autograd.grad(norm(part), x, grad.transpose(0, 1)[:, 1:])
    (plain,) = torch.autograd.grad(rms_norm(part, (32,), norm.weight, EPS), x, grad.transpose(0, 1)[:, 1:])
    assert (found - plain).abs().max() <= 2**-6 * plain.abs().max()


def test_other_dtypes_and_batch_invariant_layers_have_torchs_own(monkeypatch):
    monkeypatch.setattr(attention, "_NormInPieces", None)
    for dtype in (torch.float32, torch.float64):
        x, _, norm = case(5, 8, dtype=dtype)
        assert torch.equal(norm(x), rms_norm(x, (8,), norm.weight, EPS))
    config: Any = SimpleNamespace(
        normalization="RMSNorm",
        layernorm_zero_centered_gamma=False,
        params_dtype=torch.bfloat16,
        sequence_parallel=True,
    )
    for function, kind in ((silu, NormInPieces), (batch_invariant.silu, torch.nn.RMSNorm)):
        config.activation_func = function
        norm = TorchNorm(config, 8, EPS)
        assert type(norm) is kind and norm.weight.sequence_parallel

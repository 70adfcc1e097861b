"""bf16 products on a processor that has no kernels for them: made by fp32 ones, rounded once, and used by both engines.

Every test runs on every processor: `widens` makes this one such a processor. A product of bf16 numbers is exact in fp32,
so what is rounded once is at most half a spacing (2^-8 of its size) and fp32's error of the sum away from the exact one.
"""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from gspo_mega.cpu import products, sglang_hooks, sglang_layers
from gspo_mega.engine import precision

HALF_SPACING = 2**-8 * 1.01


@pytest.fixture
def widens(monkeypatch):
    monkeypatch.setattr(products, "widens_bf16", lambda: True)
    monkeypatch.setattr(sglang_layers, "widens_bf16", lambda: True)
    monkeypatch.setattr(precision, "widens_bf16", lambda: True)
    monkeypatch.setattr(products, "_WIDENED_NUMBERS", 700 * 5)  # so that a weight has several pieces


def is_rounded_once(given: torch.Tensor, exact: torch.Tensor, terms: torch.Tensor) -> bool:
    """`terms`: the sums of the terms' sizes, which fp32's error of a sum grows with."""
    assert given.dtype == torch.bfloat16
    return bool(((given.double() - exact).abs() <= exact.abs() * HALF_SPACING + 1e-6 * terms).all())


@pytest.mark.parametrize(
    ("is_supported", "is_there", "expected"), [(True, True, False), (False, True, True), (True, False, True)]
)
def test_torch_says_which_processors_have_kernels(monkeypatch, is_supported, is_there, expected):
    fake = types.SimpleNamespace(_is_mkldnn_bf16_supported=lambda: is_supported)
    monkeypatch.setattr(torch.ops, "mkldnn", fake)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: is_there)
    assert products.widens_bf16.__wrapped__() is expected


@pytest.mark.parametrize("num_rows", [0, 1, 3, 64])
@pytest.mark.parametrize("strided", [False, True])
def test_a_product_is_rounded_once(widens, num_rows, strided):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(num_rows, 2, 700), torch.randn(96, 700), torch.randn(96)
    if strided:
        x, weight = torch.randn(2, num_rows, 700).transpose(0, 1), torch.randn(700, 96).t()
    x, weight, bias = x.bfloat16(), weight.bfloat16(), bias.bfloat16()
    exact, terms = x.double() @ weight.double().t(), x.double().abs() @ weight.double().abs().t()
    assert is_rounded_once(products.linear(x, weight), exact, terms)
    assert is_rounded_once(products.linear(x, weight, bias), exact + bias.double(), terms)
    a, b = x[:, 0], x[:, 1]
    exact, terms = a.double().t() @ b.double(), a.double().abs().t() @ b.double().abs()
    assert is_rounded_once(products.transposed_product(a, b), exact, terms)


def test_a_product_of_nothing_is_zero(widens):
    empty = torch.empty(3, 0, dtype=torch.bfloat16)
    assert torch.equal(products.linear(empty, torch.empty(2, 0, dtype=torch.bfloat16)), torch.zeros(3, 2).bfloat16())
    assert products.linear(torch.ones(3, 4).bfloat16(), torch.empty(0, 4, dtype=torch.bfloat16)).shape == (3, 0)


def stock(*_: object, **__: object) -> torch.Tensor:
    return torch.tensor(-1.0)


def layer(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, **changed: object) -> torch.Tensor:
    options = {"gradient_accumulation_fusion": False, "allreduce_dgrad": False, "sequence_parallel": False}
    return products._plain_or(stock)(
        input=x, weight=weight, bias=bias, tp_group=None, grad_output_buffer=None, **options | changed
    )


@pytest.mark.parametrize("trains_weight", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
def test_gradients_are_rounded_once(widens, trains_weight, has_bias):
    torch.manual_seed(0)
    x = torch.randn(33, 1, 24).bfloat16().requires_grad_()
    weight = torch.randn(40, 24).bfloat16().requires_grad_(trains_weight)
    bias = torch.randn(40).bfloat16().requires_grad_() if has_bias else None
    upstream = torch.randn(33, 1, 40).bfloat16()
    layer(x, weight, bias).backward(upstream)
    given = [t for t in (x, weight, bias) if t is not None]
    exact = [t.detach().double().requires_grad_(t.requires_grad) for t in given]
    torch.nn.functional.linear(exact[0], exact[1], exact[2] if has_bias else None).backward(upstream.double())
    for tensor, reference in zip(given, exact, strict=True):
        assert (tensor.grad is None) == (reference.grad is None)
        if tensor.grad is not None and reference.grad is not None:
            assert is_rounded_once(tensor.grad, reference.grad, reference.grad.abs().max())


def test_trained_products_have_gradients_and_other_dtypes_stay_torchs(widens):
    torch.manual_seed(0)
    x, weight = torch.randn(6, 8).bfloat16().requires_grad_(), torch.randn(5, 8).bfloat16().requires_grad_()
    products.trained_linear(x, weight).sum().backward()
    assert x.grad is not None and weight.grad is not None
    assert is_rounded_once(weight.grad, x.detach().double().sum(0).expand(5, 8), x.detach().double().abs().sum(0))
    half = torch.ones(2, 3, dtype=torch.float16)
    assert torch.equal(products.linear(half, half), torch.nn.functional.linear(half, half))
    assert layer(half, half, None).item() == -1.0
    assert layer(x, weight, None, allreduce_dgrad=True).item() == -1.0, "what communicates stays with Megatron"


def test_megatrons_layers_and_a_servers_layers_and_head_call_it(widens, monkeypatch):
    module: Any = types.SimpleNamespace(
        linear_with_grad_accumulation_and_async_allreduce=stock, linear_with_frozen_weight=stock
    )
    products.replace_linear(module)
    assert module.linear_with_frozen_weight.__wrapped__ is stock
    served: Any = types.SimpleNamespace(F=torch.nn.functional)
    sglang_hooks._products(served)
    assert served.F.linear is products.linear
    monkeypatch.setattr(sglang_layers, "is_on", lambda: False)
    compute = sglang_layers.head_of(stock)
    hidden, head = torch.randn(3, 8).bfloat16(), types.SimpleNamespace(weight=torch.randn(5, 8).bfloat16())
    assert torch.equal(compute(None, hidden, head, None, out=None), products.linear(hidden, head.weight))
    head.set_lora = None  # adapters: SGLang's own way
    assert compute(None, hidden, head).item() == -1.0


def test_a_run_says_so(widens):
    assert any("bf16 products by fp32 ones" in line for line in precision.describe_backends())

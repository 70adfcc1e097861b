"""fp32 products that oneDNN computes: what they are, where, and that gradients are those of float64.

Errors are compared with float64. A contraction of k products of numbers around 1 has a rounding error of about sqrt(k)
times fp32's 6e-8 of its size, which itself grows by sqrt(k).
"""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from gspo_mega.cpu import products, sglang_hooks, sglang_layers

needs_onednn = pytest.mark.skipif(
    not products.uses_onednn(), reason="torch's own fp32 kernels are taken on this processor"
)


def error(of: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest difference, in units of the largest exact number."""
    return ((of.double() - exact).abs().max() / exact.abs().max()).item()


@pytest.mark.parametrize(
    ("vendor", "capability", "expected"),
    [
        ("AuthenticAMD", "AVX512", True),
        ("GenuineIntel", "AVX512", False),
        ("AuthenticAMD", "AVX2", False),
        ("", "AVX512", False),
    ],
)
def test_processors_with_avx_512_that_are_not_intels_use_it(monkeypatch, vendor, capability, expected):
    monkeypatch.setattr(products, "_vendor", lambda: vendor)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert products.uses_onednn.__wrapped__() == expected


@pytest.mark.parametrize("num_rows", [1, 3, 130])
@pytest.mark.parametrize("strided", [False, True])
def test_products_are_those_of_float64(num_rows, strided):
    torch.manual_seed(0)
    x, weight = torch.randn(num_rows, 2, 700), torch.randn(96, 700)
    if strided:
        x, weight = torch.randn(2, num_rows, 700).transpose(0, 1), torch.randn(700, 96).t()
    assert error(products.linear(x, weight), x.double() @ weight.double().t()) < 1e-6
    bias = torch.randn(96)
    assert error(products.linear(x, weight, bias), x.double() @ weight.double().t() + bias.double()) < 1e-6
    a = x[:, 0]
    for columns in (40, 900):  # fewer and more than a has: the other operand is copied
        b = torch.randn(num_rows, columns)
        assert error(products.transposed_product(a, b), a.double().t() @ b.double()) < 1e-6


@pytest.mark.parametrize("strides", [(9, 1), (1, 9), (0, 1), (1, 0), (0, 0), (1, 1), (6, 2), (18, 3)])
@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_operands_may_have_any_strides(strides, num_rows):
    torch.manual_seed(0)
    numbers = torch.randn(200)
    for shape in ((5, 3), (1, 3), (5, 1), (1, 1), (5, 0), (0, 3)):
        weight = numbers.as_strided(shape, strides)
        x = torch.randn(num_rows, shape[1])
        exact = x.double() @ weight.double().t()
        torch.testing.assert_close(products.linear(x, weight).double(), exact, rtol=0, atol=1e-5)
        other = torch.randn(shape[0], 7)
        torch.testing.assert_close(
            products.transposed_product(weight, other).double(), weight.double().t() @ other.double(), rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_added_products_are_made_in_pieces(beta):
    torch.manual_seed(0)
    a, b, out = torch.randn(7, 50), torch.randn(50, 20), torch.randn(7, 20)
    exact = beta * out.double() + 0.5 * a.double() @ b.double()
    if beta == 0.0:
        out.fill_(float("nan"))
    products.add_product(out, a, b, alpha=0.5, beta=beta, most_numbers=150)  # 3 rows of 50 or 20
    assert error(out, exact) < 1e-6
    products.add_product(torch.empty(0, 20), torch.empty(0, 50), b, most_numbers=1)


def stock(*_: object, **__: object) -> torch.Tensor:
    return torch.tensor(-1.0)


def layer(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, **changed: object) -> torch.Tensor:
    options = {"gradient_accumulation_fusion": False, "allreduce_dgrad": False, "sequence_parallel": False}
    return products._plain_or(stock)(
        input=x, weight=weight, bias=bias, tp_group=None, grad_output_buffer=None, **options | changed
    )


@needs_onednn
@pytest.mark.parametrize("trains_weight", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
def test_gradients_are_those_of_float64(trains_weight, has_bias):
    torch.manual_seed(0)
    x, weight = torch.randn(33, 1, 24).requires_grad_(), torch.randn(40, 24).requires_grad_(trains_weight)
    bias = torch.randn(40).requires_grad_() if has_bias else None
    upstream = torch.randn(33, 1, 40)
    layer(x, weight, bias).backward(upstream)
    given = [t for t in (x, weight, bias) if t is not None]
    exact = [t.detach().double().requires_grad_(t.requires_grad) for t in given]
    torch.nn.functional.linear(exact[0], exact[1], exact[2] if has_bias else None).backward(upstream.double())
    for tensor, reference in zip(given, exact, strict=True):
        assert (tensor.grad is None) == (reference.grad is None)
        if tensor.grad is not None and reference.grad is not None:
            assert error(tensor.grad, reference.grad) < 1e-6


@needs_onednn
@pytest.mark.parametrize("changed", ["gradient_accumulation_fusion", "allreduce_dgrad", "sequence_parallel", "dtype"])
def test_what_communicates_or_is_not_fp32_stays_with_megatron(changed):
    dtype = torch.bfloat16 if changed == "dtype" else torch.float32
    x, weight = torch.ones(2, 3, dtype=dtype), torch.ones(4, 3, dtype=dtype)
    options = {} if changed == "dtype" else {changed: True}
    assert layer(x, weight, None, **options).item() == -1.0
    if changed == "dtype":
        assert torch.equal(products.linear(x, weight), torch.full((2, 4), 3.0, dtype=dtype))


@needs_onednn
def test_the_same_numbers_give_the_same_bits_wherever_they_lie():
    torch.manual_seed(0)
    x, weight = torch.randn(67, 131), torch.randn(77, 131)
    first = products.linear(x, weight)
    for offset in (0, 1, 3):
        moved = torch.empty(x.numel() + offset)[offset:].view_as(x).copy_(x)
        assert torch.equal(products.linear(moved, weight), first)
    assert torch.equal(products.transposed_product(x, x), products.transposed_product(x.clone(), x))


@needs_onednn
def test_a_run_says_so():
    from gspo_mega.engine.precision import describe_backends

    assert "fp32 products by oneDNN" in describe_backends()[1]


@needs_onednn
def test_megatrons_layers_call_it():
    from gspo_mega.cpu import backend

    backend.install()
    from megatron.core.tensor_parallel import layers

    assert hasattr(layers.linear_with_frozen_weight, "__wrapped__")
    module: Any = types.SimpleNamespace(
        linear_with_grad_accumulation_and_async_allreduce=stock, linear_with_frozen_weight=stock
    )
    products.replace_linear(module)
    assert module.linear_with_frozen_weight.__wrapped__ is stock


@needs_onednn
def test_a_servers_plain_layers_and_head_call_it(monkeypatch):
    module: Any = types.SimpleNamespace(F=torch.nn.functional)
    sglang_hooks._products(module)
    assert module.F.linear is products.linear and module.F.embedding is torch.nn.functional.embedding
    monkeypatch.setattr(sglang_layers, "is_on", lambda: False)
    compute = sglang_layers.head_of(lambda *_, **__: torch.tensor(-1.0))
    hidden, head = torch.randn(3, 8), types.SimpleNamespace(weight=torch.randn(5, 8))
    assert torch.equal(compute(None, hidden, head, None, out=None), products.linear(hidden, head.weight))
    head.set_lora = None  # adapters: SGLang's own way
    assert compute(None, hidden, head).item() == -1.0
    assert compute(None, hidden.bfloat16(), types.SimpleNamespace(weight=head.weight.bfloat16())).item() == -1.0

"""A row has the same bits in any batch, and the gradients are those of torch's own operations."""

from __future__ import annotations

import pytest
import torch

from gspo_mega.cpu import batch_invariant as rows

SIZES = (1, 2, 3, 5, 8, 15, 16, 17, 33, 100)
STARTS = (0, 7, 190)
DTYPES = (torch.float32, torch.bfloat16)


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def assert_same_in_any_batch(function, *tensors: torch.Tensor) -> None:
    """`function` of rows of the tensors, whose first dimension is theirs."""
    whole = function(*tensors)
    for size in SIZES:
        for start in STARTS:
            part = slice(start, start + size)
            alone = function(*(tensor[part].clone() for tensor in tensors))
            assert torch.equal(alone, whole[part]), (size, start)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 96), (256, 768), (1000, 52), (2048, 40)])
def test_a_product_of_a_row(shape, dtype):
    weight = drawn(*reversed(shape), dtype=dtype)
    assert_same_in_any_batch(lambda x: rows.product(x, weight), drawn(300, shape[0], dtype=dtype))


def test_torchs_own_product_of_one_row_differs():
    """Why `product` pads. Where this fails, BLAS is another than the one that was measured: then measure it again."""
    weight, x = drawn(768, 256), drawn(300, 256)
    assert not torch.equal(torch.nn.functional.linear(x[:1], weight), torch.nn.functional.linear(x, weight)[:1])


def test_the_order_of_a_weights_rows_changes_nothing():
    """Megatron's query, key and value rows are interleaved, SGLang's are not."""
    weight, x = drawn(96, 64), drawn(40, 64)
    order = torch.randperm(96, generator=torch.Generator().manual_seed(0))
    assert torch.equal(rows.product(x, weight[order]), rows.product(x, weight)[:, order])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [100, 128])
def test_silu(width, dtype):
    x = drawn(300, 2 * width, dtype=dtype)
    assert_same_in_any_batch(lambda x: rows.silu(x[:, :width]), x)
    assert_same_in_any_batch(rows.silu, x)
    expected = torch.nn.functional.silu(x.float()).to(dtype)
    torch.testing.assert_close(rows.silu(x), expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-7)


def test_silu_of_large_numbers_has_finite_values_and_gradients():
    x = torch.tensor([-200.0, -90.0, 0.0, 90.0, 200.0], requires_grad=True)
    value = rows.silu(x)
    value.sum().backward()
    assert torch.equal(value[[0, 4]].detach(), torch.tensor([-0.0, 200.0]))
    assert torch.equal(x.grad[[0, 2, 4]], torch.tensor([0.0, 0.5, 1.0]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_positions(dtype):
    x, angle = drawn(300, 4, 16, dtype=dtype), drawn(300, 1, 16)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    assert_same_in_any_batch(rows.rotate, x, cos, sin)
    first, second = x.float().chunk(2, dim=-1)
    exact = x.float() * cos.float() + torch.cat((-second, first), -1) * sin.float()
    torch.testing.assert_close(
        rows.rotate(x, cos, sin).float(), exact, rtol=0.02, atol=0.05 if dtype != DTYPES[0] else 1e-6
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_log_probs(dtype):
    head, labels = drawn(500, 64, dtype=dtype), torch.arange(300)[:, None]

    def log_probs(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return rows.label_log_probs(rows.divide(rows.logits(hidden, head), 0.7), labels)

    hidden = drawn(300, 64, dtype=dtype)
    assert_same_in_any_batch(log_probs, hidden, labels)
    expected = ((hidden.double() @ head.double().t()) / 0.7).log_softmax(-1).gather(1, labels)[:, 0]
    torch.testing.assert_close(log_probs(hidden, labels).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_need_nothing(dtype):
    weight = drawn(64, dtype=dtype)
    assert_same_in_any_batch(
        lambda x: torch.nn.functional.rms_norm(x, (64,), weight, 1e-6), drawn(300, 3, 64, dtype=dtype)
    )


def test_gradients_are_those_of_torchs_operations():
    x, weight, bias = drawn(5, 1, 32), drawn(24, 32), drawn(24)

    def gradients(linear, silu) -> list[torch.Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
        silu(linear(*leaves)).square().sum().backward()
        return [leaf.grad for leaf in leaves]

    own = gradients(rows.linear, rows.silu)
    expected = gradients(torch.nn.functional.linear, torch.nn.functional.silu)
    for mine, theirs in zip(own, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)

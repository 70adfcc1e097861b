"""The critic's head in chunks: its values and its gradients are those of one product. One rank."""

from __future__ import annotations

import warnings

import pytest

warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")

import torch  # noqa: E402

import gspo_mega.engine  # noqa: E402,F401  the CPU backend comes before Megatron
from gspo_mega.engine.critic import token_values  # noqa: E402
from gspo_mega.engine.process_groups import RankGroup  # noqa: E402

ALONE = RankGroup(group=None, rank=0, size=1, ranks=(0,))  # type: ignore[arg-type]


def values_of(hidden, weight, rows, chunk):
    return token_values(hidden[:, None], weight, rows, tensor_group=ALONE, sequence_parallel=False, chunk_rows=chunk)


def case(dtype):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 5, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(1, 5, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, weight, torch.tensor([5, 0, 3, 4])


@pytest.mark.parametrize("chunk", [1, 3, 4, 100])
def test_gradients_are_the_derivatives(chunk):
    hidden, weight, rows = case(torch.float64)
    assert torch.autograd.gradcheck(lambda h, w: values_of(h, w, rows, chunk), (hidden, weight))


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_a_bf16_model_has_values_and_sums_in_fp32(chunk):
    hidden, weight, rows = case(torch.bfloat16)
    values = values_of(hidden, weight, rows, chunk)
    assert values.dtype == torch.float32
    wide_hidden, wide_weight = (t.detach().float().requires_grad_() for t in (hidden, weight))
    whole = (wide_hidden @ wide_weight[0])[rows]
    torch.testing.assert_close(values, whole, rtol=1e-6, atol=1e-6)
    values.square().sum().backward()
    whole.square().sum().backward()
    assert wide_hidden.grad is not None and wide_weight.grad is not None
    torch.testing.assert_close(hidden.grad, wide_hidden.grad.bfloat16(), rtol=8e-3, atol=1e-6)
    torch.testing.assert_close(weight.grad, wide_weight.grad.bfloat16(), rtol=8e-3, atol=1e-6)


def test_no_rows_have_no_values():
    hidden, weight, _ = case(torch.float32)
    values = values_of(hidden, weight, torch.zeros(0, dtype=torch.int64), 4)
    values.sum().backward()
    assert weight.grad is not None
    assert values.shape == (0,) and not weight.grad.any()

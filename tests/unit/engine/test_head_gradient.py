"""The gradient that the LM head hands back, in fp32 against fp64, for responses and chunks of any number of tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gspo_mega.engine import log_probs as log_probs_module
from gspo_mega.engine.log_probs import token_log_probs

VOCABULARY, HIDDEN = 32_768, 64
ONE: Any = SimpleNamespace(rank=0, size=1, group=None)


def gradients(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, chunk_rows: int) -> torch.Tensor:
    hidden = hidden.clone().requires_grad_()
    log_probs, _ = token_log_probs(
        hidden[:, None],
        weight,
        torch.arange(len(labels)),
        labels,
        vocab_size=VOCABULARY,
        temperature=1.0,
        tensor_group=ONE,
        sequence_parallel=False,
        chunk_rows=chunk_rows,
        with_entropy=False,
    )
    log_probs.sum().backward()
    assert hidden.grad is not None
    return hidden.grad.double()


@pytest.mark.parametrize("chunk_rows", [1, 2, 3, 4, 21])
def test_chunks_of_few_tokens_have_a_gradient_as_exact_as_one_of_all(chunk_rows):
    """As in pretrained models, rows of the head have a part in common, which cancels: of the expected row and the
    label's only the rest remains.
    """
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(64, HIDDEN, generator=generator)
    weight = 1.0 + 0.05 * torch.randn(VOCABULARY, HIDDEN, generator=generator)
    labels = torch.randint(0, VOCABULARY, (64,), generator=generator)
    want = gradients(hidden.double(), weight.double(), labels, 64)
    error = (gradients(hidden, weight, labels, chunk_rows) - want).norm()
    assert error < 2 * (gradients(hidden, weight, labels, 64) - want).norm()


@pytest.mark.parametrize("num_rows", [4, 300])
def test_a_bf16_product_is_rounded_once(monkeypatch, num_rows):
    """Contractions over the vocabulary add up in fp32 and round to bf16 at the end, as if a fp32 product were rounded:
    nearly all elements are the exact sum's nearest, and none is further off than half a spacing and fp32's error.
    """
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        monkeypatch.setattr(log_probs_module, "_add_product", lambda *_, **__: pytest.fail("a widened product"))
    generator = torch.Generator().manual_seed(2)
    grad_logits = (1e-3 * torch.randn(num_rows, VOCABULARY, generator=generator)).bfloat16()
    weight = (0.05 * torch.randn(VOCABULARY, HIDDEN, generator=generator)).bfloat16()
    exact = grad_logits.double() @ weight.double()
    given = log_probs_module._hidden_gradient(grad_logits, weight)
    rounded = given.to(torch.bfloat16)
    assert (rounded != exact.to(torch.bfloat16)).float().mean() < 2e-3
    # Terms are around 5e-5: fp32 adds 32 768 of them with an error of some 1e-8.
    assert ((rounded.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-7).all()

"""The entropy of the next-token distribution from the chunked head: its value and gradient against autograd on whole
logits, in float64, and the bonus in the loss of the policy.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gspo_mega.algorithm.losses import token_average
from gspo_mega.algorithm.terms import ObjectiveSettings
from gspo_mega.engine.log_probs import token_log_probs

ROWS, WIDTH, VOCABULARY, PADDED = 13, 6, 29, 32
ONE: Any = SimpleNamespace(rank=0, size=1, group=None)


def case(scale: float = 1.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return dict(
        hidden=normal(ROWS, WIDTH) * scale,
        weight=normal(PADDED, WIDTH),
        labels=torch.randint(VOCABULARY, (ROWS,), generator=generator),
        g=normal(ROWS),
        e=normal(ROWS),
    )


def chunked(numbers, chunk_rows, use, temperature=0.7):
    hidden, weight = (numbers[name].clone().requires_grad_() for name in ("hidden", "weight"))
    log_probs, entropies = token_log_probs(
        hidden[:, None],
        weight,
        torch.arange(ROWS),
        numbers["labels"],
        vocab_size=VOCABULARY,
        temperature=temperature,
        tensor_group=ONE,
        sequence_parallel=False,
        chunk_rows=chunk_rows,
        with_entropy=True,
    )
    use(log_probs, entropies, numbers).backward()
    return entropies.detach(), hidden.grad, weight.grad


def whole(numbers, use, temperature=0.7):
    hidden, weight = (numbers[name].clone().requires_grad_() for name in ("hidden", "weight"))
    log_p = torch.log_softmax(hidden @ weight[:VOCABULARY].t() / temperature, dim=1)
    entropies = -(log_p.exp() * log_p).sum(1)
    use(log_p.gather(1, numbers["labels"][:, None])[:, 0], entropies, numbers).backward()
    return entropies.detach(), hidden.grad, weight.grad


USES = {
    "both": lambda log_probs, entropies, n: log_probs @ n["g"] + entropies @ n["e"],
    "entropy only": lambda log_probs, entropies, n: entropies @ n["e"],
    "log-prob only": lambda log_probs, entropies, n: log_probs @ n["g"],
}


@pytest.mark.parametrize("scale", [1.0, 30.0])  # nearly uniform, and nearly one token
@pytest.mark.parametrize("chunk_rows", [1, 5, 64])
@pytest.mark.parametrize("used", USES)
def test_value_and_gradient_are_those_of_whole_logits(used, chunk_rows, scale):
    numbers = case(scale)
    for got, want in zip(chunked(numbers, chunk_rows, USES[used]), whole(numbers, USES[used]), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


def test_by_hand():
    """Two tokens with logits log 3 and 0: p = 3/4, 1/4; dH/dx_1 = -p_1 (log p_1 + H) = -(3/16) log 3."""
    hidden = torch.ones(1, 1, dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([[3.0], [1.0]], dtype=torch.float64).log().requires_grad_()
    _, entropies = token_log_probs(
        hidden[:, None], weight, torch.arange(1), torch.zeros(1, dtype=torch.int64), vocab_size=2, temperature=1.0,
        tensor_group=ONE, sequence_parallel=False, chunk_rows=4, with_entropy=True,
    )  # fmt: skip
    assert entropies is not None
    entropies.sum().backward()
    log3 = float(torch.tensor(3.0, dtype=torch.float64).log())
    assert float(entropies.detach()) == pytest.approx(2 * 0.6931471805599453 - 0.75 * log3, rel=1e-12)
    assert weight.grad is not None
    assert weight.grad[:, 0].tolist() == pytest.approx([-3 / 16 * log3, 3 / 16 * log3], rel=1e-12)


def test_the_bonus_has_the_objectives_average():
    """Two sequences of 1 and 3 tokens, the second at weight 1/2, a third rejected: the mean of their means over three,
    and for a mean over tokens the sum over all five.
    """
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 9.0], dtype=torch.float64, requires_grad=True)
    shared = dict(
        segment_ids=torch.tensor([0, 1, 1, 1, 2]),
        num_sequences=3,
        lengths=torch.tensor([1, 3, 1]),
        keep=torch.tensor([True, True, False]),
        sequence_weights=torch.tensor([1.0, 0.5, 1.0]),
    )
    by_sequence = token_average(ObjectiveSettings(), values, denominator=3, **shared)
    assert float(by_sequence.detach()) == pytest.approx((1 + 0.5 * 3) / 3, rel=1e-12)
    by_sequence.backward()
    assert values.grad is not None and values.grad.tolist() == pytest.approx([1 / 3, *[1 / 18] * 3, 0.0], rel=1e-12)
    by_token = token_average(ObjectiveSettings(aggregation="token_mean"), values, denominator=5, **shared)
    assert float(by_token.detach()) == pytest.approx((1 + 0.5 * 9) / 5, rel=1e-12)

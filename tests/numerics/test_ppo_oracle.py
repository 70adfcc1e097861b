"""GAE, whitening, the value loss and its gradient against what OpenRLHF 0.11.2 and torchrl 0.14.1 computed
(`record_ppo.py`).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from gspo_mega.algorithm.advantages import generalised_advantages, whitened
from gspo_mega.algorithm.losses import value_loss
from gspo_mega.algorithm.objective import mini_batch_denominator, sequence_coefficients
from gspo_mega.algorithm.terms import ObjectiveSettings

RECORDED = json.loads((Path(__file__).parent / "data" / "ppo_recorded.json").read_text())["cases"]
NAMES = [f"{c['discount']}-{c['trace']}-{c['clip']}-{'tokens' if c['by_token'] else 'sequences'}" for c in RECORDED]


def of(case, name):
    return torch.tensor(case[name], dtype=torch.float64)


def ids_of(case):
    return torch.arange(len(case["lengths"])).repeat_interleave(torch.tensor(case["lengths"]))


def estimated(case, behind=None):
    arguments = (of(case, "rewards"), of(case, "old_values"), ids_of(case), len(case["lengths"]))
    return generalised_advantages(*arguments, discount=case["discount"], trace=case["trace"], values_after=behind)


@pytest.mark.parametrize("case", RECORDED, ids=NAMES)
def test_advantages_and_returns_are_openrlhfs(case):
    advantages, returns = estimated(case)
    assert torch.allclose(advantages, of(case, "advantages"), rtol=0, atol=1e-12)
    assert torch.allclose(returns, of(case, "returns"), rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", RECORDED, ids=NAMES)
def test_bootstrapped_advantages_are_torchrls(case):
    """Cut off, not ended: the value behind the last token follows it."""
    advantages, _ = estimated(case, of(case, "behind"))
    assert torch.allclose(advantages, of(case, "cut_off_advantages"), rtol=0, atol=1e-12)
    assert not torch.allclose(advantages, of(case, "advantages"), rtol=0, atol=1e-3)


@pytest.mark.parametrize("case", RECORDED, ids=NAMES)
def test_whitened_advantages_are_openrlhfs(case):
    """Its variance has 1e-8 added."""
    assert torch.allclose(whitened(of(case, "advantages")), of(case, "white"), rtol=0, atol=1e-6)


@pytest.mark.parametrize("case", RECORDED, ids=NAMES)
def test_the_value_loss_and_its_gradient_are_openrlhfs(case):
    lengths = torch.tensor(case["lengths"])
    aggregation = "token_mean" if case["by_token"] else "sequence_mean_token_mean"
    denominator = mini_batch_denominator(
        aggregation, lengths=case["lengths"], group_ids=list(range(len(case["lengths"])))
    )
    values = of(case, "values").requires_grad_()
    computed = value_loss(
        values,
        of(case, "old_values"),
        of(case, "returns"),
        sequence_ids=ids_of(case),
        lengths=lengths,
        coefficients=sequence_coefficients(ObjectiveSettings(aggregation=aggregation), lengths, denominator),
        clip_range=case["clip"],
    )
    computed.loss.backward()
    # OpenRLHF divides by the number of tokens and 1e-8.
    assert computed.loss.item() == pytest.approx(case["loss"], rel=1e-7)
    assert torch.allclose(values.grad, of(case, "gradient"), rtol=1e-7, atol=1e-12)


def test_what_was_recorded_tries_the_clip_from_both_sides():
    clipped = [case for case in RECORDED if case["clip"] is not None]
    assert all(any(g == 0 for g in case["gradient"]) and any(g != 0 for g in case["gradient"]) for case in clipped)
    assert {case["by_token"] for case in RECORDED} == {True, False}

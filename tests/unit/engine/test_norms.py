"""The norm of gradients as large as a real model's, against fp64."""

from __future__ import annotations

import math

import pytest
import torch

from gspo_mega.engine.optimizer import norms_of


@pytest.mark.parametrize("num", [0, 1, 4095, 4096, 4097, 3 * 4096 + 5, 9_000_000])
def test_norms_of_any_size_are_those_of_fp64(num):
    gradient = 1e-3 * torch.randn(num, generator=torch.Generator().manual_seed(3))
    (norm,) = norms_of([gradient])
    assert norm.item() == pytest.approx(gradient.double().norm().item(), rel=2e-7)


def test_torchs_own_norm_of_an_embedding_is_what_the_rows_are_for():
    """Where this fails, torch adds better, and the rows can go."""
    gradient = 1e-3 * torch.randn(28_000_000, generator=torch.Generator().manual_seed(3))
    wanted = gradient.double().norm().item()
    assert abs(torch._foreach_norm([gradient])[0].item() / wanted - 1) > 1e-5
    assert norms_of([gradient])[0].item() == pytest.approx(wanted, rel=2e-7)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 4095, 4096, 8194])
def test_a_number_that_is_not_finite_shows_in_its_norm(value, place):
    gradients = [torch.ones(8195), torch.ones(8195).view(5, 1639)]
    gradients[1].view(-1)[place] = value
    norms = norms_of(gradients)
    assert [bool(norm.isfinite()) for norm in norms] == [True, False]

"""The fused rotary kernel against Megatron's unfused function, for packs, context ranks and both pairings."""

import pytest
import torch

import gspo_mega.engine  # noqa: F401  the CPU backend comes before Megatron
from gspo_mega.algorithm.terms import local_positions
from gspo_mega.cpu import te_layers
from gspo_mega.cpu.te_extension import extension

THD, SBHD, BSHD = (extension.NVTE_QKV_Format[f"NVTE_{name}"] for name in ("THD", "SBHD", "BSHD"))
LENGTHS = (8, 4, 20)
CU_SEQLENS = torch.tensor([0, 8, 12, 32], dtype=torch.int32)


def table(rotated: int = 8, interleaved: bool = False) -> torch.Tensor:
    angles = torch.outer(torch.arange(64.0), 0.7 ** torch.arange(rotated // 2))
    whole = angles.repeat_interleave(2, dim=1) if interleaved else torch.cat((angles, angles), dim=1)
    return whole[:, None, None]


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def unfused(x: torch.Tensor, freqs: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """One sequence [s, b, heads, d]."""
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

    return _apply_rotary_pos_emb_bshd(x, freqs[: x.size(0)], rotary_interleaved=interleaved)


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_pack_is_rotated_as_its_sequences_one_by_one(interleaved):
    x, freqs = numbers(32, 3, 12), table(interleaved=interleaved)  # 8 of 12 are rotated
    got = te_layers.fused_rope_forward(x, freqs, None, THD, interleaved, CU_SEQLENS, 1, 0)
    want = torch.cat([unfused(part[:, None], freqs, interleaved)[:, 0] for part in x.split(LENGTHS)])
    assert torch.allclose(got, want, atol=1e-6) and not torch.allclose(got, x, atol=1e-2)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_context_rank_rotates_by_the_positions_that_it_holds(rank):
    x, freqs = numbers(32, 3, 12), table()
    whole = te_layers.fused_rope_forward(x, freqs, None, THD, False, CU_SEQLENS, 1, 0)
    rows = torch.cat([start + local_positions(n, 2, rank) for start, n in zip(CU_SEQLENS.tolist(), LENGTHS)])
    assert torch.equal(te_layers.fused_rope_forward(x[rows], freqs, None, THD, False, CU_SEQLENS, 2, rank), whole[rows])


def test_batches_and_start_positions():
    x, freqs = numbers(6, 2, 3, 8), table()
    want = unfused(x, freqs)
    assert torch.allclose(te_layers.fused_rope_forward(x, freqs, None, SBHD, False, None, 1, 0), want, atol=1e-6)
    turned = te_layers.fused_rope_forward(x.transpose(0, 1), freqs, None, BSHD, False, None, 1, 0)
    assert torch.allclose(turned.transpose(0, 1), want, atol=1e-6)
    later = te_layers.fused_rope_forward(x[2:], freqs, torch.tensor([2, 2]), SBHD, False, None, 1, 0)
    assert torch.allclose(later, want[2:], atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_gradient_is_autograds(interleaved):
    x, freqs, outer = numbers(32, 3, 12).requires_grad_(), table(interleaved=interleaved), numbers(32, 3, 12).flip(0)
    want = torch.cat([unfused(part[:, None], freqs, interleaved)[:, 0] for part in x.split(LENGTHS)])
    (by_x,) = torch.autograd.grad(want, x, outer)
    got = te_layers.fused_rope_backward(outer, freqs, None, THD, interleaved, CU_SEQLENS, 1, 0)
    assert torch.allclose(got, by_x, atol=1e-6)


def test_bf16_is_rounded_once():
    x, freqs = numbers(32, 3, 12).bfloat16(), table()
    got = te_layers.fused_rope_forward(x, freqs, None, THD, False, CU_SEQLENS, 1, 0)
    exact = te_layers.fused_rope_forward(x.float(), freqs, None, THD, False, CU_SEQLENS, 1, 0)
    assert got.dtype == torch.bfloat16 and torch.equal(got, exact.bfloat16())


def test_other_formats_are_refused():
    with pytest.raises(NotImplementedError, match="fused_rope"):
        te_layers.fused_rope_forward(
            numbers(2, 2, 2, 8), table(), None, extension.NVTE_QKV_Format.NVTE_BHSD, False, None, 1, 0
        )

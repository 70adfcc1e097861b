"""A query has the same bits alone, padded, decoded, prefilled and packed; and they are attention's."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from gspo_mega.cpu import batch_invariant
from gspo_mega.cpu.batch_invariant import attend

LENGTHS = (1, 7, 63, 64, 65, 150)
HEADS, KV_HEADS, DIM = 4, 2, 16
SCALE = DIM**-0.5


def sequences(dtype: torch.dtype, heads: int = HEADS) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Query, key and value [length, heads, d] of each length."""
    drawn = torch.Generator().manual_seed(1)

    def one(length: int, count: int, dim: int) -> torch.Tensor:
        return torch.randn(length, count, dim, generator=drawn).to(dtype)

    return [(one(n, heads, DIM), one(n, KV_HEADS, DIM), one(n, KV_HEADS, DIM)) for n in LENGTHS]


def alone(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, first: int = 0) -> torch.Tensor:
    """One sequence's attention of the queries from position `first` on."""
    last_keys = torch.arange(first, len(key))[None]
    return attend(query[None, first:], key[None], value[None], last_keys, SCALE)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [HEADS, KV_HEADS])
def test_a_query_has_the_same_bits_however_it_is_computed(dtype, heads):
    parts = sequences(dtype, heads)
    expected = [alone(*part) for part in parts]
    longest = max(LENGTHS)

    def padded(tensors: list[torch.Tensor]) -> torch.Tensor:
        """With other numbers in the padding."""
        return torch.stack([torch.cat([t, t.new_full((longest - len(t), *t.shape[1:]), 3.0)]) for t in tensors])

    query, key, value = (padded(list(tensors)) for tensors in zip(*parts, strict=True))
    packed = attend(query, key, value, torch.arange(longest).expand(len(parts), -1), SCALE)
    for length, own, of_pack in zip(LENGTHS, expected, packed, strict=True):
        assert torch.equal(of_pack[:length], own)

    # Decoded: the last token of each sequence, all together, and alone.
    last = torch.tensor(LENGTHS)[:, None] - 1
    decoded = attend(torch.stack([q[-1:] for q, _, _ in parts]), key, value, last, SCALE)
    for part, own, of_step in zip(parts, expected, decoded, strict=True):
        assert torch.equal(of_step, own[-1:])
        assert torch.equal(alone(*part, first=len(part[0]) - 1), own[-1:])

    # Prefilled behind a cached prefix.
    for part, own in zip(parts, expected, strict=True):
        for first in range(0, len(own), 20):
            assert torch.equal(alone(*part, first=first), own[first:])


def test_pieces_of_a_large_batch_change_nothing(monkeypatch):
    parts = sequences(torch.float32)
    expected = [alone(*part) for part in parts]
    monkeypatch.setattr(batch_invariant, "_MAX_SCORES", 64 * 20)
    for part, own in zip(parts, expected, strict=True):
        assert torch.equal(alone(*part), own)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_attention(dtype):
    for query, key, value in sequences(dtype):
        wide = (tensor.double().transpose(0, 1) for tensor in (query, key, value))
        exact = scaled_dot_product_attention(*wide, is_causal=True, scale=SCALE, enable_gqa=True).transpose(0, 1)
        found = alone(query, key, value)
        assert found.dtype == dtype
        tolerance = 1e-6 if dtype == torch.float32 else 2**-8
        torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=tolerance)

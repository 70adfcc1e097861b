"""Packed attention with sinks and windows equals the formula, with its gradients."""

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from gspo_mega.cpu.packed_sdpa import attend

LENGTHS = (5, 12, 1)
HEADS, KV_HEADS, DIM = 4, 2, 6


def by_formula(query, key, value, sinks, window):
    """Sequence by sequence and head by head: softmax of [scores, sink], without the sink's column."""
    outputs, start = [], 0
    for length in LENGTHS:
        rows = slice(start, start + length)
        distance = torch.arange(length)[:, None] - torch.arange(length)[None]
        allowed = (distance >= 0) & (distance < (window or length))
        heads = []
        for head in range(HEADS):
            shared = head // (HEADS // KV_HEADS)
            scores = query[rows, head] @ key[rows, shared].T / DIM**0.5
            scores = scores.masked_fill(~allowed, -torch.inf)
            if sinks is not None:
                scores = torch.cat([scores, sinks[head].expand(length, 1)], dim=1)
            heads.append(scores.softmax(dim=1)[:, :length] @ value[rows, shared])
        outputs.append(torch.stack(heads, dim=1).flatten(1))
        start += length
    return torch.cat(outputs)


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_values_and_gradients_are_those_of_the_formula(has_sinks, window):
    generator = torch.Generator().manual_seed(3)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    total = sum(LENGTHS)
    inputs = [draw(total, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    sinks = draw(HEADS) if has_sinks else None
    bounds = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
    weights = torch.randn(total, HEADS * DIM, generator=generator, dtype=torch.float64)
    leaves = [*inputs, *([sinks] if has_sinks else [])]

    results = []
    for output in (attend(*inputs, params, None, None, sinks, window), by_formula(*inputs, sinks, window)):
        gradients = torch.autograd.grad((output * weights).sum(), leaves)
        results.append([output.detach(), *gradients])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)

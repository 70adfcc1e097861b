"""Tokens moved to their experts' rows by masks: Megatron's fused path against its unfused one, and the order in which
a token's rows are added. `tests/kernels` compares the functions with Transformer Engine's own kernels.
"""

import pytest
import torch
from te_process import in_te_process

from gspo_mega.cpu import te_rows

TOKENS, EXPERTS, WIDTH = 11, 5, 16


def test_the_last_experts_row_comes_first_and_is_added_first():
    mask = torch.tensor([[True, False, True, True], [False, True, False, False]])
    row_map = te_rows.make_row_id_map(mask, 2, 4)
    assert row_map.tolist() == [[3, 2, 0, -1, 3, 2, 0, -1, 3], [1, -1, -1, -1, 1, -1, -1, -1, 1]]
    # In fp32, (-2^24 + 2^24) + 1 is 1, and (1 + 2^24) - 2^24 is 0.
    rows = torch.tensor([[1.0], [5.0], [2.0**24], [-(2.0**24)]])
    summed, _ = te_rows.unpermute_with_mask_map(rows, row_map, None, None, None, 2, 4, 1)
    assert summed.tolist() == [[1.0], [5.0]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@in_te_process
def test_megatrons_fused_permutation_is_its_plain_one(dtype):
    from megatron.core.transformer.moe.moe_utils import permute, unpermute

    generator = torch.Generator().manual_seed(1)
    kind = getattr(torch, dtype)
    chosen = torch.rand(TOKENS, EXPERTS, generator=generator).topk(2, dim=1).indices
    mask = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter_(1, chosen, True)
    weights = torch.rand(TOKENS, EXPERTS, generator=generator) * mask
    outer = torch.randn(TOKENS, WIDTH, generator=generator).to(kind)
    values = torch.randn(TOKENS, WIDTH, generator=generator).to(kind)
    results = []
    for fused in (False, True):
        x, probs = values.clone().requires_grad_(), weights.clone().requires_grad_()
        rows, row_weights, order, *_ = permute(x, mask, probs=probs, num_out_tokens=2 * TOKENS, fused=fused)
        back = unpermute(
            (rows * row_weights[:, None]).to(kind), order, restore_shape=x.shape, routing_map=mask, fused=fused
        )
        back.backward(outer)
        results.append((rows, row_weights, back, x.grad, probs.grad))
    for plain, fused in zip(*results, strict=True):
        assert plain.dtype == fused.dtype and plain.shape == fused.shape
        # Two rows are added per token, in bf16 or in fp32 rounded once.
        bound = (1e-6 if dtype == "float32" else 2**-7) * plain.detach().abs().max()
        assert (plain.detach().double() - fused.detach().double()).abs().max() <= bound
    assert torch.equal(results[0][0], results[1][0]), "the order of rows"

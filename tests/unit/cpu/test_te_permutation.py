"""Tokens permuted by the indices of their experts, through Transformer Engine's functions, against plain indexing."""

import pytest
import torch
from te_process import in_te_process

from gspo_mega.cpu import te_rows

TOKENS, TOP_K, EXPERTS, WIDTH = 13, 3, 5, 16


def numbers(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def chosen(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(TOKENS)]).int()


def by_loops(x, indices, num_rows):
    """The rows, and which (token, choice) each is: expert after expert, tokens in their order."""
    pairs = [(t, j) for e in range(EXPERTS) for t in range(TOKENS) for j in range(TOP_K) if indices[t, j] == e]
    pairs = pairs[:num_rows]
    return torch.stack([x[t] for t, _ in pairs]), pairs


def test_by_hand():
    x = torch.tensor([[1.0], [2.0], [4.0]])
    rows, row_map, _ = te_rows.moe_permute_fwd(x, 4, torch.tensor([[1, 0], [0, 2], [1, 2]]), 5, [], 6)
    # Expert 0: tokens 0, 1; expert 1: 0, 2; expert 2: 1, and 2, which is dropped.
    assert rows.flatten().tolist() == [1.0, 2.0, 1.0, 4.0, 2.0]
    assert row_map.tolist() == [2, 1, 3, 0, 4, -1]
    back = te_rows.moe_unpermute_fwd(rows, 4, row_map, torch.empty(0), 3, 2)
    assert back.flatten().tolist() == [2.0, 4.0, 4.0]


@pytest.mark.parametrize("dropped", [0, 7])
@in_te_process
def test_there_and_back_with_gradients(dropped):
    import transformer_engine.pytorch as te

    indices, num_rows = chosen(), TOKENS * TOP_K - dropped
    x, probs = numbers(TOKENS, WIDTH, seed=1), numbers(TOKENS, TOP_K, seed=2).abs()
    mixing, outer = numbers(WIDTH, WIDTH, seed=3), numbers(TOKENS, WIDTH, seed=4)
    mine = [v.float().requires_grad_() for v in (x, probs)]
    rows, row_map = te.moe_permute(mine[0], indices, num_out_tokens=num_rows if dropped else 0, map_type="index")
    result = te.moe_unpermute(rows @ mixing.float(), row_map, merging_probs=mine[1], map_type="index")
    result.backward(outer.float())

    theirs = [v.clone().requires_grad_() for v in (x, probs)]
    want_rows, pairs = by_loops(theirs[0], indices, num_rows)
    want = torch.zeros_like(x)
    for (token, choice), row in zip(pairs, want_rows @ mixing, strict=True):
        want = want.index_add(0, torch.tensor([token]), (row * theirs[1][token, choice])[None])
    want.backward(outer)
    assert rows.shape == (num_rows, WIDTH) and torch.equal(rows.detach(), want_rows.detach().float())
    # fp32 sums of 16 and of 3 terms.
    for got, wanted in ((result, want), (mine[0].grad, theirs[0].grad), (mine[1].grad, theirs[1].grad)):
        assert (got.detach().double() - wanted.detach()).abs().max() < 1e-5 * wanted.detach().abs().max()


@in_te_process
def test_without_weights_a_single_choice_comes_back_as_it_was():
    import transformer_engine.pytorch as te

    x = numbers(TOKENS, WIDTH, seed=5).bfloat16().requires_grad_()
    rows, row_map = te.moe_permute(x, chosen()[:, :1].contiguous(), num_out_tokens=0, map_type="index")
    result = te.moe_unpermute(rows, row_map, map_type="index")
    outer = numbers(TOKENS, WIDTH, seed=6).bfloat16()
    result.backward(outer)
    assert torch.equal(result, x) and torch.equal(x.grad, outer) and not torch.equal(rows, x)


def test_what_is_dropped_touches_nothing():
    """A row that is not the token's may be anything, infinity too."""
    rows = torch.tensor([[torch.inf], [3.0]])
    row_map = torch.tensor([1, -1], dtype=torch.int32)  # two tokens, one choice each
    got = te_rows.moe_unpermute_fwd(rows, 4, row_map, torch.ones(2, 1), 2, 1)
    assert got.tolist() == [[3.0], [0.0]]
    by_rows, by_prob = te_rows.moe_unpermute_bwd(torch.ones(2, 1), rows, 4, row_map, torch.full((2, 1), 0.5))
    assert by_rows.tolist() == [[0.0], [0.5]] and by_prob.tolist() == [[3.0], [0.0]]

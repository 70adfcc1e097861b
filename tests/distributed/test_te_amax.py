"""A tensor that ranks hold in parts is quantised as one: Transformer Engine's amax reduction, on CPU kernels."""

import math

import pytest
import torch

from gspo_mega.algorithm.fp8 import quantize_tensorwise


def parts(pool, whole, **options):
    return pool.run("te_amax_ranks:quantise_a_part", whole=whole, **options)


@pytest.fixture
def pool(rank_pools):
    return rank_pools(2, transformer_engine=True)


def test_the_parts_are_those_of_the_whole(pool):
    whole = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    whole[1, 2] = 40.0  # rank 0 has the largest value
    data, scale_inv = quantize_tensorwise(whole)
    got = parts(pool, whole.tolist(), reduced=True)
    assert [scale for _, scale in got] == [scale_inv.tolist()] * 2
    assert [row for codes, _ in got for row in codes] == data.view(torch.uint8).tolist()
    alone = parts(pool, whole.tolist(), reduced=False)
    assert alone[0] == got[0] and alone[1][1] == quantize_tensorwise(whole[3:])[1].tolist() != got[1][1]


def test_an_infinity_on_one_rank_saturates_the_others_values_too(pool):
    """The scale becomes 1 on all ranks, so that 1e5 exceeds it on a rank that sees finite values alone."""
    got = parts(pool, [[math.inf, 1.0], [1e5, -3.0]], reduced=True, dtype="kFloat8E5M2")
    assert [scale for _, scale in got] == [[1.0], [1.0]]
    assert got[0][0] == [[0x7B, 0x3C]] and got[1][0] == [[0x7B, 0xC2]]

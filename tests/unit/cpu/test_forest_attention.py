"""Attention over ancestors equals attention over each row by itself, in values and gradients, over random trees."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gspo_mega.algorithm.terms import local_positions
from gspo_mega.cpu import packed_sdpa
from gspo_mega.cpu.forest_attention import ForestNodes, forest_attend
from gspo_mega.data.forest import lay_out, num_computed

# Rows in tree order: sizes, and how much of the row before is shared, in parts of the most that can be.
TREES = st.lists(st.tuples(st.integers(0, 9), st.sampled_from([0, 0.25, 0.5, 0.75, 1])), min_size=1, max_size=8)


def shared_tokens(rows: list[tuple[int, float]]) -> tuple[list[int], list[int]]:
    sizes = [size for size, _ in rows]
    most = [min(size, before) for size, before in zip(sizes, [0, *sizes])]
    return sizes, [int(part * limit) for (_, part), limit in zip(rows, most)]


def by_rows(query, key, value, places, scale, sinks=None, window=None):
    """The oracle: softmax over each row's own tokens, written out; one output [heads, v] per row position."""
    outs = []
    for place in places:
        q, k, v = (x[place].transpose(0, 1) for x in (query, key, value))
        k, v = (x.repeat_interleave(q.size(0) // k.size(0), 0) for x in (k, v))
        scores = q @ k.transpose(1, 2) * scale
        hidden = torch.ones(len(place), len(place), dtype=torch.bool).triu(1)
        if window is not None:
            hidden = hidden | torch.ones(len(place), len(place), dtype=torch.bool).tril(-window)
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(place), 1)], dim=-1)
        outs.append((scores.softmax(-1)[..., : len(place)] @ v).transpose(0, 1))
    return torch.cat(outs)


@given(rows=TREES, kv_heads=st.sampled_from([1, 2, 4]), value_dim=st.sampled_from([8, 4]), seed=st.integers(0, 99))
@example(rows=[(5, 0), (9, 0), (7, 0)], kv_heads=2, value_dim=8, seed=0)  # nothing is shared
@example(rows=[(6, 0), (6, 1), (6, 1)], kv_heads=2, value_dim=8, seed=1)  # one row three times
@example(rows=[(1, 0), (9, 1), (5, 0.25)], kv_heads=4, value_dim=4, seed=2)  # a row that is all prefix
@settings(max_examples=60, deadline=None)
def test_every_path_attends_as_if_it_stood_alone(rows, kv_heads, value_dim, seed):
    sizes, shared = shared_tokens(rows)
    if not sum(sizes):
        return
    forest = lay_out(sizes, shared)
    generator = torch.Generator().manual_seed(seed)
    count = int(forest.node_starts[-1])
    query, key, value = (
        torch.randn(count, heads, dim, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads, dim in ((4, 8), (kv_heads, 8), (kv_heads, value_dim))
    )
    nodes = ForestNodes(forest.node_starts.tolist(), forest.node_ends.tolist(), torch.zeros(count, dtype=torch.int64))
    computed_at = torch.from_numpy(forest.computed_at)
    places = computed_at.split(sizes)
    out = forest_attend(query, key, value, nodes, 0.3)[computed_at]
    wanted = by_rows(query, key, value, places, 0.3).flatten(1)
    assert torch.allclose(out, wanted, rtol=0, atol=1e-12)
    weights = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    inputs = (query, key, value)
    ours = torch.autograd.grad((out * weights).sum(), inputs)
    theirs = torch.autograd.grad((wanted * weights).sum(), inputs)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-11)


@given(
    rows=TREES,
    kv_heads=st.sampled_from([2, 4]),
    window=st.sampled_from([None, 1, 2, 3, 5, 40]),
    has_sinks=st.booleans(),
    ranks=st.sampled_from([1, 2, 3]),
    seed=st.integers(0, 99),
)
@example(rows=[(6, 0), (9, 1), (8, 0.75)], kv_heads=2, window=3, has_sinks=True, ranks=1, seed=0)
@example(rows=[(9, 0), (9, 0.5), (9, 0.5), (7, 1)], kv_heads=2, window=None, has_sinks=True, ranks=2, seed=1)
@settings(max_examples=40, deadline=None)
def test_windows_and_sinks_are_of_each_path_on_every_context_rank(rows, kv_heads, window, has_sinks, ranks, seed):
    """The ranks' parts, each with its own queries and all keys, are the rows' attention, and their gradients add up."""
    sizes, shared = shared_tokens(rows)
    if not sum(sizes):
        return
    sizes[-1] += -num_computed(sizes, shared) % (2 * ranks)
    forest = lay_out(sizes, shared)
    count, generator = int(forest.node_starts[-1]), torch.Generator().manual_seed(seed)
    query, key, value = inputs = [
        torch.randn(count, heads, 8, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads in (4, kv_heads, kv_heads)
    ]
    sinks = None
    if has_sinks:
        sinks = torch.randn(4, generator=generator, dtype=torch.float64, requires_grad=True)
        inputs.append(sinks)
    whole = ForestNodes(forest.node_starts.tolist(), forest.node_ends.tolist(), torch.zeros(count, dtype=torch.int64))
    out = torch.zeros(count, 32, dtype=torch.float64)
    for rank in range(ranks):
        own, nodes = local_positions(count, ranks, rank), whole.for_rank(ranks, rank)
        if window is None:
            part = forest_attend(query[own], key, value, nodes, 0.3, sinks)
        else:
            part = packed_sdpa._attend_to_windows(query[own], key, value, nodes, 0.3, sinks, window)
        out = out.index_copy(0, own, part)
    computed_at = torch.from_numpy(forest.computed_at)
    out = out[computed_at]
    wanted = by_rows(query, key, value, computed_at.split(sizes), 0.3, sinks, window).flatten(1)
    assert torch.allclose(out, wanted, rtol=0, atol=1e-12)
    weights = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    ours, theirs = (torch.autograd.grad((found * weights).sum(), inputs) for found in (out, wanted))
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-11)


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 3e-6), (torch.bfloat16, 3e-2)])
def test_in_lower_precision_it_stays_near_the_rows(dtype, bound):
    sizes, shared = [300, 280, 290, 64], [0, 256, 256, 0]
    forest = lay_out(sizes, shared)
    torch.manual_seed(0)
    query, key, value = (torch.randn(int(forest.node_starts[-1]), heads, 16).to(dtype) for heads in (4, 2, 2))
    nodes = ForestNodes(forest.node_starts.tolist(), forest.node_ends.tolist(), torch.zeros(1))
    computed_at = torch.from_numpy(forest.computed_at)
    wanted = by_rows(query.double(), key.double(), value.double(), computed_at.split(sizes), 0.25).flatten(1)
    out = forest_attend(query, key, value, nodes)[computed_at]
    assert out.dtype == dtype and float((out.double() - wanted).abs().max()) < bound


def test_no_score_of_tokens_on_different_paths_is_computed():
    forest = lay_out([10, 9, 12], [0, 6, 6])
    nodes = ForestNodes(forest.node_starts.tolist(), forest.node_ends.tolist(), torch.zeros(1))
    blocks = [(q.start, q.stop, k.start, k.stop, causal) for q, k, causal in nodes.blocks()]
    assert blocks == [
        (0, 6, 0, 6, True),
        (6, 10, 6, 10, True),
        (10, 13, 10, 13, True),
        (13, 19, 13, 19, True),
        (6, 19, 0, 6, False),
    ]
    assert np.array_equal(forest.node_starts, [0, 6, 10, 13, 19]) and np.array_equal(forest.node_ends, [19, 10, 13, 19])

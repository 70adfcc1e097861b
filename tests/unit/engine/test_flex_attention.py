"""FlexAttention over a forest, as a GPU is to compute it: which blocks it gets, and its values and gradients on a CPU."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_mega.algorithm.terms import local_positions
from gspo_mega.cpu.forest_attention import ForestNodes
from gspo_mega.data.forest import Forest, lay_out, num_computed
from gspo_mega.engine import flex_attention as ours

TREES = st.lists(st.tuples(st.integers(1, 19), st.sampled_from([0, 0.25, 0.5, 0.75, 1])), min_size=1, max_size=8)


def sees(forest: Forest, sizes: list[int], window: int | None) -> np.ndarray:
    """Which position attends to which, row by row: [C, C] bool."""
    found = np.zeros((int(forest.node_starts[-1]),) * 2, bool)
    for places in np.split(forest.computed_at, np.cumsum(sizes)[:-1]):
        for depth, place in enumerate(places):
            found[place, places[max(0, depth + 1 - (window or len(places))) : depth + 1]] = True
    return found


@given(
    rows=TREES,
    ranks=st.sampled_from([1, 2, 3]),
    window=st.sampled_from([None, 1, 4, 7, 30]),
    block=st.sampled_from([1, 3, 4, 8]),
)
@settings(max_examples=80, deadline=None)
def test_the_blocks_are_those_with_something_to_compute(rows, ranks, window, block):
    """By counting in a mask of the whole pack, which the product never makes."""
    sizes = [size for size, _ in rows]
    shared = [int(part * min(size, before)) for (size, part), before in zip(rows, [0, *sizes])]
    sizes[-1] += -num_computed(sizes, shared) % (2 * ranks)
    forest = lay_out(sizes, shared)
    mask, count = sees(forest, sizes, window), int(forest.node_starts[-1])
    nodes = ForestNodes(forest.node_starts.tolist(), forest.node_ends.tolist(), torch.zeros(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ours, "BLOCK", block)
        for rank in range(ranks):
            own = local_positions(count, ranks, rank).numpy()
            some, whole = ours.blocks_of(nodes.for_rank(ranks, rank), window)
            padded = np.zeros((len(some) * block, some.shape[1] * block), bool)
            padded[: len(own), :count] = mask[own]
            blocks = padded.reshape(len(some), block, some.shape[1], block)
            assert np.array_equal(whole, blocks.all((1, 3)))
            has = blocks.any((1, 3))
            assert np.array_equal(some, has) if window is None else not np.any(has & ~some)


def by_rows(query, key, value, places, scale, sinks, window):
    """The oracle: softmax over each row's own tokens, written out; one output [heads, v] per row position."""
    outs = []
    for place in places:
        q, k, v = (x[place].transpose(0, 1) for x in (query, key, value))
        k, v = (x.repeat_interleave(q.size(0) // k.size(0), 0) for x in (k, v))
        distance = torch.arange(len(place))[:, None] - torch.arange(len(place))
        hidden = (distance < 0) | (distance >= (window or len(place)))
        scores = (q @ k.transpose(1, 2) * scale).masked_fill(hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(place), 1)], dim=-1)
        outs.append((scores.softmax(-1)[..., : len(place)] @ v).transpose(0, 1))
    return torch.cat(outs)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_it_is_attention_over_each_path_with_its_gradients(window, has_sinks, ranks, monkeypatch):
    """By FlexAttention's formulas in plain torch, which it refuses to differentiate on a CPU. Values are narrower than keys."""
    monkeypatch.setattr(
        importlib.import_module("torch.nn.attention.flex_attention"), "_validate_device", lambda *_: None
    )
    sizes, shared = [9, 9, 11, 7, 5], [0, 4, 7, 2, 0]
    sizes[-1] += -num_computed(sizes, shared) % (2 * ranks)
    forest = lay_out(sizes, shared)
    count, generator = int(forest.node_starts[-1]), torch.Generator().manual_seed(3)
    query, key, value = inputs = [
        torch.randn(count, heads, dim, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads, dim in ((4, 8), (2, 8), (2, 4))
    ]
    sinks = None
    if has_sinks:
        sinks = torch.randn(4, generator=generator, dtype=torch.float64, requires_grad=True)
        inputs.append(sinks)
    computed_at = torch.from_numpy(forest.computed_at)
    whole = ForestNodes(forest.node_starts.tolist(), forest.node_ends.tolist(), torch.zeros(1))
    out = torch.zeros(count, 16, dtype=torch.float64)
    for rank in range(ranks):
        own, nodes = local_positions(count, ranks, rank), whole.for_rank(ranks, rank)
        part = ours.flex_attend(query[own], key, value, nodes, 0.3, sinks, window)
        out = out.index_copy(0, own, part)
    out = out[computed_at]
    wanted = by_rows(query, key, value, computed_at.split(sizes), 0.3, sinks, window).flatten(1)
    assert torch.allclose(out, wanted, rtol=0, atol=1e-12)
    weights = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    found, expected = (torch.autograd.grad((one * weights).sum(), inputs) for one in (out, wanted))
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-11)


def test_other_packs_need_no_other_kernel(monkeypatch):
    """Dynamo traces it for the first lengths and for all others, and again for a window. A GPU would wait for each kernel."""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")  # as on a GPU
    counter = CompileCounter()
    flex = importlib.import_module("torch.nn.attention.flex_attention").flex_attention
    monkeypatch.setattr(ours, "flex_attention", torch.compile(flex, backend=counter, dynamic=True))
    traced = []
    for sizes, shared, window in (
        ([300, 310], [0, 200], None),
        ([500, 420, 510], [0, 400, 30], None),
        ([700], [0], None),
        ([300, 310], [0, 200], 20),
        ([500, 420, 510], [0, 400, 30], 20),
    ):
        forest = lay_out(sizes, shared)
        count = int(forest.node_starts[-1])
        nodes = ForestNodes(forest.node_starts.tolist(), forest.node_ends.tolist(), torch.zeros(1))
        query, key, value = (torch.randn(count, heads, 16) for heads in (4, 2, 2))
        ours.flex_attend(query, key, value, nodes, 0.3, None, window)
        traced.append(counter.frame_count)
    torch._dynamo.reset()
    assert 1 <= traced[0] <= traced[1] == traced[2] <= 2 and traced[2] < traced[3] == traced[4] <= 4

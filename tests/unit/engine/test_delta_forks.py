"""Gated delta nets over packs that share prefixes: convolution and state of every row are those of the row alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gspo_mega.cpu.delta_rule import causal_conv1d, chunk_gated_delta_rule
from gspo_mega.cpu.forest_attention import ForestNodes
from gspo_mega.data.forest import lay_out, num_computed
from gspo_mega.engine.delta_net import DeltaForks

WIDTH = 4
TREES = st.lists(st.tuples(st.integers(0, 9), st.sampled_from([0, 0.25, 0.5, 0.75, 1])), min_size=1, max_size=6)


def recurrence(q, k, v, g, beta):
    """The rule, one token of one row after the other: o [t, heads, value size]."""
    state, outputs = torch.zeros(v.size(1), k.size(2), v.size(2), dtype=v.dtype), []
    for t in range(len(v)):
        state = g[t].exp()[:, None, None] * state
        missing = v[t] - torch.einsum("hk,hkv->hv", k[t], state)
        state = state + torch.einsum("hk,hv->hkv", k[t], beta[t][:, None] * missing)
        outputs.append(torch.einsum("hk,hkv->hv", q[t], state) * k.size(2) ** -0.5)
    return torch.stack(outputs) if outputs else v


def convolution(x, weight):
    """Of one row: silu of the sum over its last WIDTH inputs, written out."""
    padded = torch.cat([x.new_zeros(WIDTH - 1, x.size(1)), x])
    return F.silu(torch.stack([padded[k : k + len(x)] * weight[:, k] for k in range(WIDTH)]).sum(0))


@given(rows=TREES, ranks=st.sampled_from([1, 2]), seed=st.integers(0, 99))
@example(rows=[(6, 0), (9, 1), (8, 0.75)], ranks=1, seed=0)
@example(rows=[(2, 0), (9, 0.5), (9, 0.25), (7, 1)], ranks=2, seed=1)  # prefixes shorter than the convolution
@settings(max_examples=25, deadline=None)
def test_every_path_has_its_own_state(rows, ranks, seed):
    sizes = [size for size, _ in rows]
    most = [min(size, before) for size, before in zip(sizes, [0, *sizes])]
    shared = [int(part * limit) for (_, part), limit in zip(rows, most)]
    if not sum(sizes):
        return
    sizes[-1] += -num_computed(sizes, shared) % (2 * ranks)
    forest = lay_out(sizes, shared)
    count, made = int(forest.node_starts[-1]), torch.Generator().manual_seed(seed)
    whole = ForestNodes(forest.node_starts.tolist(), forest.node_ends.tolist(), torch.zeros(count, dtype=torch.int64))
    # Context ranks have whole packs of a part of the heads; their nodes are cut further.
    forks = DeltaForks(whole.for_rank(ranks, 0), WIDTH, torch.device("cpu"))
    computed_at = torch.from_numpy(forest.computed_at)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made, dtype=torch.float64)

    x, weight = random(1, count, 6).requires_grad_(), random(6, WIDTH).requires_grad_()
    out = forks.convolve(x, lambda **given: causal_conv1d(weight=weight, activation="silu", **given))
    wanted = torch.cat([convolution(x[0, place], weight) for place in computed_at.split(sizes)])
    compare(out[0, computed_at], wanted, [x, weight], made)

    q, k = (F.normalize(random(1, count, 2, 3), dim=-1) for _ in range(2))
    inputs = [q, k, random(1, count, 2, 5), -random(1, count, 2).abs(), random(1, count, 2).sigmoid()]
    inputs = [one.requires_grad_() for one in inputs]
    out = forks.scan(inputs, chunk_gated_delta_rule)
    wanted = torch.cat([recurrence(*(one[0, place] for one in inputs)) for place in computed_at.split(sizes)])
    compare(out[0, computed_at], wanted, inputs, made)


def compare(out, wanted, inputs, made):
    assert torch.allclose(out, wanted, rtol=0, atol=1e-11)
    weights = torch.randn(out.shape, generator=made, dtype=torch.float64)
    ours, theirs = (torch.autograd.grad((found * weights).sum(), inputs) for found in (out, wanted))
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-10)

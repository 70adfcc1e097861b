"""What stands in for SGLang's kernels of gated delta nets: tokens one at a time equal the whole sequence, in any slot."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from gspo_mega.cpu.delta_rule import causal_conv1d, chunk_gated_delta_rule, gates
from gspo_mega.cpu.sglang_delta import (
    convolve,
    convolve_next,
    multiply_by_gate,
    plus_one_norms_and_gate,
    prefill_gates,
    rule,
    rule_next,
    split_projections,
)

LENGTHS, SLOTS = (5, 1, 70), (3, 0, 2)  # requests, and their places in a pool of four
PROMPTS = (3, 1, 66)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def cut(x: torch.Tensor, parts: list[slice]) -> torch.Tensor:
    """The parts of the sequences of a pack [t, ...], one after the other."""
    return torch.cat([one[part] for one, part in zip(x.split(LENGTHS), parts)])


def test_a_convolution_goes_on_from_its_slot():
    x, weight = random(sum(LENGTHS), 6), random(6, 4)
    bounds = F.pad(torch.tensor(LENGTHS).cumsum(0), (1, 0))
    whole, _ = causal_conv1d(x[None], weight, activation="silu", cu_seqlens=bounds)
    pool, slots = torch.full((4, 6, 3), 9.0), torch.tensor(SLOTS)
    starts = F.pad(torch.tensor(PROMPTS).cumsum(0), (1, 0))
    prompts = cut(x, [slice(0, n) for n in PROMPTS])
    out = convolve(
        prompts.T,
        weight,
        activation="silu",
        conv_states=pool,
        has_initial_state=torch.zeros(3, dtype=torch.bool),
        cache_indices=slots,
        query_start_loc=starts,
    )
    torch.testing.assert_close(out.T, cut(whole[0], [slice(0, n) for n in PROMPTS]), rtol=0, atol=1e-6)
    assert torch.equal(pool[1], torch.full((6, 3), 9.0))
    # Of the first and the third request, one more token, and of the first yet another.
    for place, n in ((0, 3), (2, 66), (0, 4)):
        token = x.split(LENGTHS)[place][n][None]
        found = convolve_next(token, pool, weight, None, "silu", conv_state_indices=slots[place : place + 1])
        torch.testing.assert_close(found[0], whole[0].split(LENGTHS)[place][n], rtol=0, atol=1e-6)


def test_the_rule_goes_on_from_its_slot():
    t, key_heads, heads = sum(LENGTHS), 2, 6
    q, k = random(1, t, key_heads, 8), random(1, t, key_heads, 8) + 1
    v, a, b = random(1, t, heads, 5), random(t, heads), random(t, heads + 1)[:, :heads]
    a_log, dt_bias = random(heads) - 2, random(heads + 2)[:heads]
    bounds = F.pad(torch.tensor(LENGTHS).cumsum(0), (1, 0))
    g, beta = gates(a_log, a, dt_bias, b)
    whole, _ = chunk_gated_delta_rule(q, k, v, g[None], beta[None], cu_seqlens=bounds, use_qk_l2norm_in_kernel=True)
    pool, slots = torch.zeros(4, heads, 5, 8), torch.tensor(SLOTS)
    firsts = [slice(0, n) for n in PROMPTS]
    g, beta = prefill_gates(a_log, cut(a, firsts), cut(b, firsts), dt_bias)
    out, last, _ = rule(
        *(cut(x[0], firsts)[None] for x in (q, k, v)),
        g,
        beta,
        initial_state=pool,
        initial_state_indices=slots,
        cu_seqlens=F.pad(torch.tensor(PROMPTS).cumsum(0), (1, 0)),
        use_qk_l2norm_in_kernel=True,
        head_first=False,
    )
    torch.testing.assert_close(out[0], cut(whole[0], firsts), rtol=0, atol=1e-5)
    assert torch.equal(pool[slots], last.mT) and not pool[1].any()
    for place, n in ((0, 3), (2, 66), (0, 4), (2, 67)):
        token = [x[0].split(LENGTHS)[place][n][None, None] for x in (q, k, v)]
        found = rule_next(
            A_log=a_log,
            dt_bias=dt_bias,
            q=token[0],
            k=token[1],
            v=token[2],
            a=a.split(LENGTHS)[place][n][None],
            b=b.split(LENGTHS)[place][n][None],
            initial_state_source=pool,
            initial_state_indices=slots[place : place + 1],
        )
        torch.testing.assert_close(found[0, 0], whole[0].split(LENGTHS)[place][n], rtol=0, atol=1e-5)


def test_projections_are_split_as_they_lie():
    qkvz, ba = random(3, 2 * 4 + 2 * 12), random(3, 8)  # two key heads of 2, four value heads of 3
    convolved, z, b, a = split_projections(qkvz, ba, 2, 4, 2, 3)
    assert torch.equal(convolved, qkvz[:, :20]) and torch.equal(z.flatten(1), qkvz[:, 20:])
    assert torch.equal(b, ba[:, :4]) and torch.equal(a, ba[:, 4:])


def test_queries_and_gates_take_turns_and_norms_multiply_by_one_more():
    both, k = random(2, 3 * 2 * 4), random(2, 4)
    q_weight, k_weight = random(4), random(5)[:4]
    query, key, gate = plus_one_norms_and_gate(both, k, q_weight, k_weight, 1e-6, 4, 3)
    one = plus_one_norms_and_gate(both[:1], k[:1], q_weight, k_weight, 1e-6, 4, 3)
    assert all(part.is_contiguous() for part in (query, key, gate, *one))
    second = both[1].view(3, 2, 4)[2]  # the last head of the second token: its query and its gate
    wanted = second[0] / second[0].pow(2).mean().add(1e-6).sqrt() * (1 + q_weight)
    torch.testing.assert_close(query[5], wanted)
    assert torch.equal(gate[5], second[1])
    torch.testing.assert_close(key[1], k[1] / k[1].pow(2).mean().add(1e-6).sqrt() * (1 + k_weight))
    x = random(2, 12)
    wanted = x * torch.sigmoid(gate.reshape(2, 12))
    multiply_by_gate(x, gate)
    torch.testing.assert_close(x, wanted)

"""The gated delta rule of the CPU: a recurrence token by token, transformers' own, packs, states and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers.models.qwen3_next import modeling_qwen3_next as theirs

from gspo_mega.cpu import delta_rule
from gspo_mega.cpu.delta_rule import causal_conv1d, chunk_gated_delta_rule, l2norm

LENGTHS = (1, 63, 64, 65, 130, 3)
NAMES = ("q", "k", "v", "g", "beta")


def inputs(tokens: int, heads: int = 4, key_heads: int = 2, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """q, k, v, g, beta of one pack; keys are unit vectors, as in the layer, and decays reach from 0 to -16."""
    made = torch.Generator().manual_seed(tokens)
    q, k = (torch.randn(1, tokens, key_heads, 8, generator=made, dtype=torch.float64) for _ in range(2))
    v = torch.randn(1, tokens, heads, 6, generator=made, dtype=torch.float64)
    g = -16 * torch.rand(1, tokens, heads, generator=made, dtype=torch.float64) ** 6
    beta = torch.rand(1, tokens, heads, generator=made, dtype=torch.float64)
    return [x.to(dtype) for x in (l2norm(q), l2norm(k), v, g, beta)]


def recurrence(q, k, v, g, beta, state=None):
    """The rule of the paper, one token after the other, for one sequence: o [1, t, heads, value size] and the state."""
    shared = v.size(2) // k.size(2)
    q, k = (x.repeat_interleave(shared, dim=2)[0] for x in (q, k))
    v, g, beta = v[0], g[0], beta[0]
    state = torch.zeros(v.size(1), k.size(2), v.size(2), dtype=v.dtype) if state is None else state
    outputs = []
    for t in range(len(v)):
        state = g[t].exp()[:, None, None] * state
        missing = v[t] - torch.einsum("hk,hkv->hv", k[t], state)
        state = state + torch.einsum("hk,hv->hkv", k[t], beta[t][:, None] * missing)
        outputs.append(torch.einsum("hk,hkv->hv", q[t], state) * k.size(2) ** -0.5)
    return torch.stack(outputs)[None], state


def cuts(lengths) -> torch.Tensor:
    return F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(torch.int32)


def parts(tensors, bounds):
    for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist()):
        yield [x[:, start:end] for x in tensors]


def test_a_pack_equals_the_recurrence_of_each_sequence_with_gradients():
    bounds = cuts(LENGTHS)
    ours = [x.requires_grad_() for x in inputs(int(bounds[-1]))]
    slow = [x.detach().clone().requires_grad_() for x in ours]
    out, states = chunk_gated_delta_rule(*ours, output_final_state=True, cu_seqlens=bounds)
    found = [recurrence(*part) for part in parts(slow, bounds)]
    wanted = torch.cat([o for o, _ in found], dim=1)
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-12)
    torch.testing.assert_close(states, torch.stack([state for _, state in found]), rtol=0, atol=1e-12)
    weights = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    (out * weights).sum().backward()
    (wanted * weights).sum().backward()
    for name, one, other in zip(NAMES, ours, slow):
        torch.testing.assert_close(
            one.grad, other.grad, rtol=1e-10, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}"
        )


def test_each_sequence_equals_the_rule_of_transformers_in_fp32():
    bounds = cuts(LENGTHS)
    tensors = inputs(int(bounds[-1]), dtype=torch.float32)
    out, _ = chunk_gated_delta_rule(*tensors, cu_seqlens=bounds, use_qk_l2norm_in_kernel=True)
    wanted = []
    for q, k, *others in parts(tensors, bounds):
        wide = [x.repeat_interleave(2, dim=2) for x in (q, k)]
        found, _ = theirs.torch_chunk_gated_delta_rule(*wide, *others, use_qk_l2norm_in_kernel=True)
        wanted.append(found)
    torch.testing.assert_close(out, torch.cat(wanted, dim=1), rtol=0, atol=2e-6)


def test_a_sequence_goes_on_from_a_state():
    tensors = inputs(100)
    whole, last = chunk_gated_delta_rule(*tensors, output_final_state=True)
    first, state = chunk_gated_delta_rule(*(x[:, :37] for x in tensors), output_final_state=True)
    second, again = chunk_gated_delta_rule(*(x[:, 37:] for x in tensors), initial_state=state, output_final_state=True)
    torch.testing.assert_close(torch.cat([first, second], dim=1), whole, rtol=0, atol=1e-12)
    torch.testing.assert_close(again, last, rtol=0, atol=1e-12)


def test_a_batch_is_its_rows():
    tensors = [x.view(4, 24, *x.shape[2:]) for x in inputs(96)]
    out, states = chunk_gated_delta_rule(*tensors, output_final_state=True)
    for row in range(4):
        one, state = chunk_gated_delta_rule(*(x[row : row + 1] for x in tensors), output_final_state=True)
        torch.testing.assert_close(out[row : row + 1], one, rtol=0, atol=1e-13)
        torch.testing.assert_close(states[row : row + 1], state, rtol=0, atol=1e-13)


def test_the_largest_decay_leaves_finite_gradients():
    q, k, v, g, beta = inputs(128)
    ours = [x.requires_grad_() for x in (q, k, v, torch.full_like(g, -80.0), beta)]
    chunk_gated_delta_rule(*ours)[0].sum().backward()
    assert all(bool(x.grad.isfinite().all()) for x in ours)


@pytest.mark.parametrize("activation", [None, "silu", "swish"])
def test_a_convolution_sees_only_its_own_sequence(activation):
    bounds = cuts((1, 2, 3, 9, 40))
    made = torch.Generator().manual_seed(2)
    x = torch.randn(1, int(bounds[-1]), 5, generator=made, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 4, generator=made, dtype=torch.float64, requires_grad=True)
    out, state = causal_conv1d(x, weight, activation=activation, output_final_state=True, cu_seqlens=bounds)
    wanted = torch.cat(
        [
            theirs.causal_conv1d_fn(part.transpose(1, 2), weight, activation=activation and "silu").transpose(1, 2)
            for (part,) in parts([x], bounds)
        ],
        dim=1,
    )
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-13)
    # The state after two tokens: two zeros before them, and they.
    assert torch.equal(state[1].mT, F.pad(x[0, 1:3], (0, 0, 2, 0)))
    grads = [torch.autograd.grad((one * x.detach()).sum(), (x, weight)) for one in (out, wanted)]
    for one, other in zip(*grads):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_a_convolution_goes_on_from_a_state():
    x = torch.randn(2, 11, 5, generator=torch.Generator().manual_seed(3))
    weight = torch.randn(5, 4, generator=torch.Generator().manual_seed(4))
    whole, _ = causal_conv1d(x, weight, activation="silu")
    first, state = causal_conv1d(x[:, :5], weight, activation="silu", output_final_state=True)
    second, _ = causal_conv1d(x[:, 5:], weight, activation="silu", initial_state=state)
    torch.testing.assert_close(torch.cat([first, second], dim=1), whole, rtol=0, atol=1e-6)


def test_half_precision_is_computed_in_fp32_and_rounded_once():
    bounds = cuts((20, 70))
    tensors = [x.to(torch.bfloat16) for x in inputs(90)]
    out, state = chunk_gated_delta_rule(*tensors, output_final_state=True, cu_seqlens=bounds)
    wide, _ = chunk_gated_delta_rule(*(x.double() for x in tensors), cu_seqlens=bounds)
    assert (out.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    assert float((out.double() - wide).abs().max()) <= 2**-8 * float(wide.abs().max())


def test_gates_are_those_of_the_layer():
    a_log, dt_bias = torch.tensor([0.0, 2.0]), torch.tensor([1.0, -1.0])
    g, beta = delta_rule.gates(a_log, torch.tensor([[0.5, 3.0]]), dt_bias, torch.tensor([[0.0, 1.0]]))
    torch.testing.assert_close(g, torch.tensor([[-1.7014133, -15.7159902]]), rtol=0, atol=1e-5)
    torch.testing.assert_close(beta, torch.tensor([[0.5, 0.7310586]]))


@pytest.mark.parametrize("length", [1, 16, 200])
def test_another_length_of_chunks_is_the_same_rule_and_ends_with_its_block(length):
    tensors, bounds = inputs(sum(LENGTHS)), cuts(LENGTHS)
    usual, _ = chunk_gated_delta_rule(*tensors, cu_seqlens=bounds)
    with delta_rule.chunks_of(length):
        assert length == delta_rule.CHUNK
        out, _ = chunk_gated_delta_rule(*tensors, cu_seqlens=bounds)
    assert delta_rule.CHUNK == 64
    torch.testing.assert_close(out, usual, rtol=0, atol=1e-12)
    assert not torch.equal(out, usual)  # in another order of additions

"""What the CPU server computes in fewer operations: sampling, queries and keys, experts."""

from __future__ import annotations

import math
import types

import pytest
import torch

from gspo_mega.cpu.sglang_layers import (
    _heads,
    add_gated,
    experts_forward_plain,
    gated,
    rotate,
    rotation_of,
    sample,
)


def test_samples_have_the_distribution():
    torch.manual_seed(0)
    probs = torch.tensor([0.5, 0.0, 0.3, 0.0, 0.15, 0.05, 0.0])
    num_draws = 200_000
    counts = torch.bincount(sample(probs.expand(num_draws, -1)).long(), minlength=len(probs))
    assert counts[probs == 0].sum() == 0
    expected = probs * num_draws
    chi_squared = ((counts - expected) ** 2 / expected)[probs > 0].sum()
    assert chi_squared < 16.3, "3 degrees of freedom, one in a thousand"


def test_rows_are_sampled_independently():
    torch.manual_seed(0)
    probs = torch.rand(50_000, 2)
    first, second = sample(probs / probs.sum(1, keepdim=True)).view(2, -1).float()
    assert abs(torch.corrcoef(torch.stack((first, second)))[0, 1]) < 0.03


def test_small_probabilities_of_a_large_vocabulary_count():
    torch.manual_seed(0)
    probs = torch.full((400, 150_000), 1.0e-7)  # 1.5 % together, each below float32's spacing at 1
    probs[:, 0] = 1 - 1.0e-7 * 149_999
    share = torch.stack([sample(probs) > 0 for _ in range(25)]).float().mean()
    assert 0.010 < share < 0.020


def test_a_large_vocabulary_is_sampled_by_blocks_of_any_number_of_tokens():
    """Tokens of different blocks, the first and the last of the vocabulary, and next to ones of probability 0."""
    torch.manual_seed(0)
    size = 128 * 20 + 5  # the last block is short
    chances = {0: 0.2, 127: 0.1, 128: 0.15, 1000: 0.05, size - 6: 0.2, size - 5: 0.1, size - 1: 0.2}
    probs = torch.zeros(size)
    probs[list(chances)] = torch.tensor(list(chances.values()))
    num_draws = 40_000
    counts = torch.bincount(sample(probs.expand(num_draws, -1)).long(), minlength=size)
    expected = probs * num_draws
    assert counts[probs == 0].sum() == 0
    chi_squared = ((counts - expected) ** 2 / expected)[probs > 0].sum()
    assert chi_squared < 22.5, "6 degrees of freedom, one in a thousand"
    for place in chances:
        alone = torch.zeros(2, size)
        alone[:, place] = 1e-30
        assert sample(alone).tolist() == [place, place]


@pytest.mark.parametrize("value", [float("nan"), 0.0, float("inf")])
@pytest.mark.parametrize("place", [0, 2500, 2564])
def test_a_large_row_without_a_distribution_is_an_error(value, place):
    probs = torch.full((2, 2565), 1 / 2565)
    probs[1] = 0.0
    probs[1, place] = value
    with pytest.raises(RuntimeError, match="probability tensor"):
        sample(probs)


@pytest.mark.parametrize("row", [[0.5, float("nan")], [0.0, 0.0], [float("inf"), 1.0]])
def test_a_row_without_a_distribution_is_an_error(row):
    with pytest.raises(RuntimeError, match="probability tensor"):
        sample(torch.tensor([[0.5, 0.5], row]))


def test_rotary_positions_are_those_of_the_halves():
    torch.manual_seed(0)
    angles = torch.rand(10, 4) * 6
    cache, positions, x = torch.cat((angles.cos(), angles.sin()), -1), torch.tensor([3, 9, 0]), torch.randn(3, 2, 8)
    cos, sin = angles[positions, None].cos(), angles[positions, None].sin()
    one, two = x.chunk(2, -1)
    expected = torch.cat((one * cos - two * sin, two * cos + one * sin), -1)
    torch.testing.assert_close(rotate(x, rotation_of(cache, positions)), expected, rtol=0, atol=1e-6)


def test_queries_and_keys_together_have_the_bits_of_each_alone():
    torch.manual_seed(0)
    tokens, heads, kv_heads, dim, eps = 5, 4, 2, 8, 1e-3
    named = types.SimpleNamespace
    attention = named(
        head_dim=dim,
        num_heads=heads,
        num_kv_heads=kv_heads,
        qkv_proj=named(weight=torch.randn((heads + 2 * kv_heads) * dim, 16), bias=torch.randn(64)),
        q_norm=named(weight=torch.randn(dim), variance_epsilon=eps),
        k_norm=named(weight=torch.randn(dim), variance_epsilon=eps),
    )
    hidden, rotation = torch.randn(tokens, 16), rotation_of(torch.randn(20, dim), torch.tensor([3, 0, 7, 19, 2]))
    parts = torch.nn.functional.linear(hidden, attention.qkv_proj.weight, attention.qkv_proj.bias)
    query, key, value = parts.view(tokens, -1, dim).split((heads, kv_heads, kv_heads), dim=1)
    normed = [
        torch.nn.functional.rms_norm(part, (dim,), norm.weight, eps)
        for part, norm in ((query, attention.q_norm), (key, attention.k_norm))
    ]
    expected = (*(rotate(part, rotation) for part in normed), value)
    found = _heads(attention, hidden, rotation)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
    assert found[0].is_contiguous()


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-7)])
def test_queries_and_keys_without_norms_are_rotated_as_by_sglang(dtype, bound):
    """Llama's. In bf16 SGLang rounds both products; here one is rounded, and the sum."""
    torch.manual_seed(0)
    tokens, heads, kv_heads, dim = 5, 4, 2, 8
    named = types.SimpleNamespace
    product = named(weight=torch.randn((heads + 2 * kv_heads) * dim, 16).to(dtype), bias=None)
    attention = named(head_dim=dim, num_heads=heads, num_kv_heads=kv_heads, qkv_proj=product)
    angles = 6 * torch.rand(20, dim // 2)
    cache = torch.cat((angles.cos(), angles.sin()), -1).to(dtype)
    hidden, positions = torch.randn(tokens, 16).to(dtype), torch.tensor([3, 0, 7, 19, 2])
    query, key, value = (
        torch.nn.functional.linear(hidden, product.weight)
        .view(tokens, -1, dim)
        .split((heads, kv_heads, kv_heads), dim=1)
    )
    found = _heads(attention, hidden, rotation_of(cache, positions, dtype))
    assert torch.equal(found[2], value)
    cos, sin = cache[positions, None].chunk(2, -1)
    for ours, plain in zip(found, (query, key)):
        one, two = plain.chunk(2, -1)
        theirs = torch.cat((one * cos - two * sin, two * cos + one * sin), -1)
        assert ours.dtype == dtype
        assert (ours - theirs).abs().max() <= bound * plain.abs().max()


def test_experts_are_those_of_the_router():
    torch.manual_seed(0)
    layer = types.SimpleNamespace(num_experts=5, w13_weight=torch.randn(5, 12, 4), w2_weight=torch.randn(5, 4, 6))
    config = types.SimpleNamespace(activation="silu", gemm1_alpha=None, apply_router_weight_on_input=False)
    # No token has expert 2.
    x, chosen, weights = torch.randn(3, 4), torch.tensor([[4, 0], [1, 4], [0, 3]], dtype=torch.int32), torch.rand(3, 2)

    def one(token: int, expert: int) -> torch.Tensor:
        gate, up = (layer.w13_weight[expert] @ x[token]).chunk(2)
        return layer.w2_weight[expert] @ (torch.nn.functional.silu(gate) * up)

    expected = torch.zeros(3, 4)
    for token in range(3):
        for expert, weight in zip(chosen[token], weights[token]):
            expected[token] += weight * one(token, int(expert))

    def stock(*_):
        raise AssertionError("SGLang's own experts are not needed here")

    output = experts_forward_plain(stock)(layer, x, (weights, chosen, None), config)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


def test_other_experts_are_left_to_the_server():
    layer = types.SimpleNamespace(w13_weight=torch.zeros(1))
    config = types.SimpleNamespace(activation="gelu", gemm1_alpha=None, apply_router_weight_on_input=False)
    x = torch.zeros(1, 4)
    marker = torch.ones(1)
    assert experts_forward_plain(lambda *_: marker)(layer, x, (None, None, None), config) is marker


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gate_of_a_shared_expert(dtype):
    """sigmoid(0) is a half, sigmoid(ln 3) three quarters; what is added is rounded once."""
    hidden = torch.tensor([[1.0, 1.0], [math.log(3.0), 0.0]])
    gate, shared = torch.tensor([1.0, -1.0]), torch.tensor([[2.0, -4.0], [8.0, 16.0]], dtype=dtype)
    final = torch.tensor([[1.0, 1.0], [0.0, 256.0]], dtype=dtype)
    expected = torch.tensor([[1.0, -2.0], [6.0, 12.0]])
    found = gated(hidden, gate, shared)
    assert found.dtype == dtype and torch.allclose(found.float(), expected)
    added = (final.float() + expected).to(dtype)
    assert add_gated(hidden, gate, shared, final) is None and torch.allclose(final, added)

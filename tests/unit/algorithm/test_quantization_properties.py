"""What holds for every tensor: rounding twice is rounding once, powers of two pass through, errors have a bound."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_mega.algorithm.fp8 import (
    dequantize_blocks,
    dequantize_mx,
    from_fp8,
    quantize_blocks,
    quantize_mx,
    quantize_published_blocks,
    quantize_tensorwise,
)
from gspo_mega.algorithm.rounding import dequantize_int8_rows, quantize_int8_rows, round_mantissa

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Half a step relative to a normal value, and half of the least subnormal, in units of scale_inv.
HALF_STEP = {E4M3: 2.0**-4, E5M2: 2.0**-3}
HALF_LEAST = {E4M3: 2.0**-10, E5M2: 2.0**-17}

blocks = st.sampled_from([(128, 128), (1, 128), (128, 1), (2, 3), (1, 32)])
dtypes = st.sampled_from([E4M3, E5M2])


@st.composite
def matrices(draw):
    n, m = draw(st.integers(1, 9)), draw(st.sampled_from([1, 2, 3, 31, 127, 128, 129, 260]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randn(n, m, generator=generator) * torch.exp(
        torch.randn(n, m, generator=generator) * draw(st.floats(0, 4))
    )
    x = x * 2.0 ** draw(st.integers(-40, 40))
    if draw(st.booleans()):
        x[torch.rand(n, m, generator=generator) < draw(st.floats(0, 1))] = 0
    return x.to(draw(st.sampled_from([torch.float32, torch.bfloat16])))


def by_columns(x, block):
    return x.t().contiguous() if block == (128, 1) else x


@settings(max_examples=150, deadline=None)
@given(matrices(), blocks, st.booleans(), dtypes)
def test_quantising_what_was_quantised_changes_nothing(x, block, power_of_two, dtype):
    x = by_columns(x, block)
    data, scale_inv = quantize_blocks(x, block, power_of_two, dtype)
    once = dequantize_blocks(data, scale_inv, block)
    again, scale_inv_again = quantize_blocks(once, block, power_of_two, dtype)
    if power_of_two:  # the byte may differ: 224 at one scale is 448 at the next
        assert torch.equal(dequantize_blocks(again, scale_inv_again, block), once)
    else:  # the scale may differ in its last bits: it comes from 448 * scale_inv, which is rounded
        assert torch.equal(from_fp8(again), from_fp8(data))
        assert torch.allclose(scale_inv_again, scale_inv, rtol=2.0**-21, atol=0)


@settings(max_examples=150, deadline=None)
@given(matrices(), blocks, st.booleans(), dtypes, st.integers(-20, 20))
def test_a_power_of_two_moves_the_scale_and_no_value(x, block, power_of_two, dtype, exponent):
    x = by_columns(x, block)
    data, scale_inv = quantize_blocks(x, block, power_of_two, dtype)
    moved, moved_scale = quantize_blocks(x * 2.0**exponent, block, power_of_two, dtype)
    assert torch.equal(from_fp8(moved), from_fp8(data))
    rows, columns = (torch.arange(n) // b for n, b in zip(x.shape, block, strict=True))
    empty = (
        torch.zeros(scale_inv.shape).index_put((rows[:, None], columns[None]), (x != 0).float(), accumulate=True) == 0
    )
    assert torch.equal(moved_scale, torch.where(empty, scale_inv, scale_inv * 2.0**exponent))


@settings(max_examples=150, deadline=None)
@given(matrices(), blocks, st.booleans(), dtypes)
def test_the_error_is_at_most_half_a_step(x, block, power_of_two, dtype):
    x = by_columns(x, block)
    data, scale_inv = quantize_blocks(x, block, power_of_two, dtype)
    back = dequantize_blocks(data, scale_inv, block)
    least = dequantize_blocks(torch.full(x.shape, 1.0).to(dtype), scale_inv, block) * HALF_LEAST[dtype]
    bound = torch.maximum(x.float().abs() * HALF_STEP[dtype], least) * (1 + 2.0**-20)
    assert ((x.float() - back).abs() <= bound).all()


@settings(max_examples=100, deadline=None)
@given(matrices(), st.booleans(), dtypes)
def test_a_tensor_is_one_block(x, power_of_two, dtype):
    data, scale_inv = quantize_tensorwise(x, dtype, power_of_two=power_of_two)
    block_data, block_scale = quantize_blocks(x, tuple(x.shape), power_of_two, dtype)
    assert torch.equal(data.view(torch.uint8), block_data.view(torch.uint8))
    assert scale_inv.item() == block_scale.item()


@settings(max_examples=100, deadline=None)
@given(matrices(), blocks)
def test_the_published_rule_differs_in_last_bits_only(x, block):
    x = by_columns(x, block)
    data, scale_inv = quantize_blocks(x, block)
    published, published_scale = quantize_published_blocks(x, block)
    assert torch.allclose(published_scale, scale_inv, rtol=2.0**-22, atol=0)
    # A value next to a tie may fall on its other side: one step, and no more.
    close = from_fp8(data).abs() * 2.0**-3 + 2.0**-9
    assert ((from_fp8(published) - from_fp8(data)).abs() <= close).all()


@settings(max_examples=100, deadline=None)
@given(matrices(), dtypes)
def test_microscaling_rounds_once_and_never_saturates(x, dtype):
    data, codes = quantize_mx(x, (1, 32), dtype)
    once = dequantize_mx(data, codes)
    again = dequantize_mx(*quantize_mx(once, (1, 32), dtype))
    assert torch.equal(again, once)
    least = dequantize_mx(torch.full(x.shape, 1.0).to(dtype), codes) * HALF_LEAST[dtype]
    assert ((x.float() - once).abs() <= torch.maximum(x.float().abs() * HALF_STEP[dtype], least)).all()


@settings(max_examples=100, deadline=None)
@given(matrices())
def test_int8_rounds_once(x):
    data, scale = quantize_int8_rows(x)
    again, scale_again = quantize_int8_rows(dequantize_int8_rows(data, scale))
    assert torch.equal(again, data)
    assert torch.allclose(scale_again, scale, rtol=2.0**-21, atol=0)


@settings(max_examples=100, deadline=None)
@given(matrices(), st.integers(0, 23), st.integers(0, 23))
def test_fewer_mantissa_bits_after_more_are_the_fewer(x, bits, other):
    once = round_mantissa(x, bits)
    assert torch.equal(round_mantissa(once, bits), once)
    assert ((once.float() - x.float()).abs() <= x.float().abs() * 2.0 ** -(bits + 1)).all()
    assert torch.equal(round_mantissa(once, max(bits, other)), once)


@pytest.mark.parametrize("block", [(128, 128), (1, 128)])
def test_a_block_knows_nothing_of_its_neighbours(block):
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    data, scale_inv = quantize_blocks(x, block)
    part, part_scale = quantize_blocks(x[128:, :128].contiguous(), block)
    assert torch.equal(from_fp8(part), from_fp8(data)[128:, :128])
    assert torch.equal(part_scale, scale_inv[128 // block[0] :, :1])

"""FP8 rounding and scales against values worked out by hand and against an enumeration of the formats in numpy."""

import numpy as np
import pytest
import torch
from fp8_by_numpy import fp8_value, nearest_fp8

from gspo_mega.algorithm.fp8 import (
    amax_of,
    dequantize_blocks,
    from_fp8,
    quantize_blocks,
    quantize_published_blocks,
    quantize_tensorwise,
    scale_from_amax,
    to_fp8,
)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FLOAT32_MAX = torch.finfo(torch.float32).max


def codes(*values: float, dtype: torch.dtype = E4M3) -> list[int]:
    return to_fp8(torch.tensor(values), dtype).view(torch.uint8).tolist()


def test_e4m3_codes_worked_out_by_hand():
    # Exponent bias 7, three mantissa bits: 1.0 is 0.0111.000 = 0x38; one step up is 1.125 = 0x39.
    assert codes(0.0, -0.0, 1.0, 1.125, -1.0) == [0x00, 0x80, 0x38, 0x39, 0xB8]
    # Halfway between 1.0 (even) and 1.125 (odd) goes down, between 1.125 (odd) and 1.25 (even) goes up.
    assert codes(1.0625, 1.1875) == [0x38, 0x3A]
    # Subnormals are multiples of 2^-9: 2^-9 is 0x01; half of it is a tie and goes to zero; anything above goes to 0x01;
    # 1.5 * 2^-9 is a tie between 1 and 2 and goes to 2; the least normal is 2^-6 = 0x08.
    assert codes(2**-9, 2**-10, 1.0001 * 2**-10, 1.5 * 2**-9, 2**-6) == [0x01, 0x00, 0x01, 0x02, 0x08]
    # 448 is 0x7E; 464 would be a tie with the NaN code; everything above saturates, infinity too; NaN is 0x7F.
    assert codes(448, 463.9, 464, 1e30, torch.inf, -torch.inf, torch.nan, -torch.nan) == [
        *(0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0xFE),
        *(0x7F, 0x7F),
    ]


def test_e5m2_codes_worked_out_by_hand():
    # Exponent bias 15, two mantissa bits: 1.0 is 0.01111.00 = 0x3C.
    assert codes(1.0, 1.25, 1.125, 1.375, dtype=E5M2) == [0x3C, 0x3D, 0x3C, 0x3E]
    # Subnormals are multiples of 2^-16; the largest is 57344 = 0x7B, and no infinity (0x7C) is ever written.
    assert codes(2**-16, 2**-17, 57344, 61440, 1e30, torch.inf, torch.nan, dtype=E5M2) == [
        *(0x01, 0x00, 0x7B, 0x7B, 0x7B, 0x7B),
        0x7F,
    ]


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_every_code_and_every_midpoint_round_as_the_format_says(dtype):
    name = "e4m3" if dtype == E4M3 else "e5m2"
    finite = np.array(sorted({v for c in range(256) if np.isfinite(v := fp8_value(c, name))}), np.float32)
    middles = (finite[1:] + finite[:-1]) / 2
    x = np.concatenate([finite, middles, np.nextafter(middles, np.float32(np.inf)), np.nextafter(middles, -finite[-1])])
    ours = from_fp8(to_fp8(torch.from_numpy(x), dtype)).numpy()
    np.testing.assert_array_equal(ours, nearest_fp8(x, name))
    every = torch.arange(256, dtype=torch.uint8)
    table = np.array([fp8_value(c, name) for c in range(256)], np.float32)
    np.testing.assert_array_equal(from_fp8(every.view(dtype)).numpy(), table)


def test_a_scale_is_divided_once():
    # float32(448 / 3) = 149.33333 and float32(448 * float32(1/3)) = 149.33334 (1/3 is rounded up): they differ.
    scale = scale_from_amax(torch.tensor([3.0]))
    assert scale.item() == float(np.float32(448) / np.float32(3))
    assert scale.item() != float(np.float32(448) * (np.float32(1) / np.float32(3)))
    amax = torch.rand(10_000, generator=torch.Generator().manual_seed(0)) * 100
    np.testing.assert_array_equal(scale_from_amax(amax).numpy(), np.float32(448) / amax.numpy())


def test_scales_of_unusual_amax():
    amax = torch.tensor([0.0, torch.inf, torch.nan, 1e-40, 448.0, 449.0, 224.0])
    # 448 / 449 lies between 1/2 and 1; 1e-40 is subnormal and 448e40 is no float32.
    expected = [1.0, 1.0, 1.0, FLOAT32_MAX, 1.0, float(np.float32(448) / np.float32(449)), 2.0]
    assert scale_from_amax(amax).tolist() == expected
    assert scale_from_amax(amax, power_of_two=True).tolist() == [1.0, 1.0, 1.0, 2.0**127, 1.0, 0.5, 2.0]
    # epsilon is a least amax, and NaN is not less than it.
    assert scale_from_amax(amax[:3], epsilon=448.0).tolist() == [1.0, 1.0, 1.0]
    assert scale_from_amax(torch.tensor([0.0, 1.0]), epsilon=2.0).tolist() == [224.0, 224.0]


def test_amax_ignores_nan_and_an_empty_tensor_has_none():
    assert amax_of(torch.tensor([1.0, -3.0, torch.nan])).item() == 3.0
    assert amax_of(torch.tensor([torch.nan, torch.nan])).item() == 0.0
    assert amax_of(torch.tensor([torch.nan, -torch.inf])).item() == torch.inf
    assert amax_of(torch.empty(0, 4)).item() == 0.0
    assert amax_of(torch.tensor([-2.5], dtype=torch.bfloat16)).dtype == torch.float32


def test_tensorwise_by_hand():
    # amax 3.5: scale 448 / 3.5 = 128 exactly, so that q = 128 x.
    data, scale_inv = quantize_tensorwise(torch.tensor([3.5, -1.0, 0.0078125, 0.0]))
    assert from_fp8(data).tolist() == [448.0, -128.0, 1.0, 0.0]
    assert scale_inv.tolist() == [1 / 128]
    zeros, scale_inv = quantize_tensorwise(torch.zeros(2, 3))
    assert from_fp8(zeros).tolist() == [[0.0] * 3] * 2
    assert scale_inv.tolist() == [1.0]
    # An infinity has the scale 1 and saturates; the others are rounded as they are.
    data, scale_inv = quantize_tensorwise(torch.tensor([torch.inf, 1.0625, 500.0]))
    assert (from_fp8(data).tolist(), scale_inv.tolist()) == ([448.0, 1.0, 448.0], [1.0])
    # NaN stays NaN and does not disturb its neighbours.
    data, scale_inv = quantize_tensorwise(torch.tensor([torch.nan, 3.5, 1.0]))
    assert (data.view(torch.uint8).tolist()[0], from_fp8(data).tolist()[1:]) == (0x7F, [448.0, 128.0])
    assert scale_inv.tolist() == [1 / 128]


def test_blocks_by_hand_with_ragged_edges():
    # 2 x 2 blocks over a 3 x 3 tensor: the right and lower blocks hold 2, 2 and 1 values.
    x = torch.tensor([[1.0, 2.0, 0.0], [3.5, -7.0, 0.0], [14.0, 0.5, 1e30]])
    data, scale_inv = quantize_blocks(x, (2, 2), power_of_two=True)
    # amax 7 → 64; amax 0 → 1; amax 14 → 32; amax 1e30 → 4.48e-28, between 2^-91 = 4.04e-28 and 2^-90.
    assert scale_inv.tolist() == [[1 / 64, 1.0], [1 / 32, 2.0**91]]
    assert from_fp8(data)[:2].tolist() == [[64.0, 128.0, 0.0], [224.0, -448.0, 0.0]]
    assert from_fp8(data)[2, :2].tolist() == [448.0, 16.0]
    assert torch.equal(dequantize_blocks(data, scale_inv, (2, 2))[:, :2], x[:, :2])


def test_one_huge_value_costs_its_own_block_only():
    x = torch.full((1, 256), 0.01)
    x[0, 5] = 1e6
    data, scale_inv = quantize_blocks(x, (1, 128))
    assert scale_inv.shape == (1, 2)
    back = dequantize_blocks(data, scale_inv, (1, 128))[0]
    assert back[5].item() == pytest.approx(1e6)
    assert back[:5].tolist() == [0.0] * 5  # 0.01 * 448e-6 is below half of the least subnormal
    assert back[128:].tolist() == pytest.approx([0.01] * 128)


def test_bfloat16_inputs_are_exact_in_float32_and_cap_an_infinite_scale_at_their_own_largest():
    x = torch.randn(3, 130, generator=torch.Generator().manual_seed(1)).bfloat16()
    for ours, theirs in zip(quantize_blocks(x, (1, 128)), quantize_blocks(x.float(), (1, 128)), strict=True):
        assert torch.equal(ours.float(), theirs.float())
    tiny = torch.full((1, 4), 1e-39)
    assert quantize_blocks(tiny, (1, 128))[1].item() == float(np.float32(1) / np.float32(FLOAT32_MAX))
    least = torch.finfo(torch.bfloat16).max
    assert quantize_blocks(tiny.bfloat16(), (1, 128))[1].item() == float(np.float32(1) / np.float32(least))


def test_published_blocks_by_hand():
    # amax 3: scale_inv is float32(3 / 448), and the largest value is 448 codes of it.
    data, scale_inv = quantize_published_blocks(torch.tensor([[3.0, -1.5], [0.0, 3.0]]), (2, 2))
    assert scale_inv.item() == float(np.float32(3) / np.float32(448))
    assert from_fp8(data).tolist() == [[448.0, -224.0], [0.0, 448.0]]
    data, scale_inv = quantize_published_blocks(torch.zeros(1, 3), (1, 2))
    assert (from_fp8(data).tolist(), scale_inv.tolist()) == ([[0.0] * 3], [[1.0, 1.0]])


def test_scales_of_another_number_of_blocks_are_refused():
    data, scale_inv = quantize_blocks(torch.randn(4, 256), (1, 128))
    with pytest.raises(ValueError, match=r"scales of shape \(1, 2\), not \(4, 2\)"):
        dequantize_blocks(data, scale_inv, (128, 128))
    with pytest.raises(ValueError, match="not an FP8 type"):
        to_fp8(torch.zeros(1), torch.bfloat16)

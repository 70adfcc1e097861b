"""INT8 by rows and rounding to fewer mantissa bits, against values worked out by hand."""

import numpy as np
import pytest
import torch

from gspo_mega.algorithm.rounding import dequantize_int8_rows, quantize_int8_rows, round_mantissa


def test_int8_rows_by_hand():
    # Row 0: amax 127, so q = round(x); halves go away from zero. Row 1: amax 254, so q = round(x / 2).
    x = torch.tensor([[127.0, 0.5, -0.5, 1.5, 0.49999997], [-254.0, 2.0, 3.0, 0.9, 0.0]])
    data, scale = quantize_int8_rows(x)
    assert data.tolist() == [[127, 1, -1, 2, 0], [-127, 1, 2, 0, 0]]
    assert scale.tolist() == [[1.0], [2.0]]
    assert dequantize_int8_rows(data, scale)[1].tolist() == [-254.0, 2.0, 4.0, 0.0, 0.0]


def test_int8_row_of_zeros_and_of_bfloat16():
    data, scale = quantize_int8_rows(torch.zeros(1, 4, dtype=torch.bfloat16))
    assert data.tolist() == [[0] * 4]
    assert scale.item() == float(np.float32(1e-10) / np.float32(127))
    assert scale.dtype == torch.float32


def test_int8_error_is_at_most_half_a_step():
    x = torch.randn(64, 100, generator=torch.Generator().manual_seed(0)) * 30
    data, scale = quantize_int8_rows(x)
    assert ((x - dequantize_int8_rows(data, scale)).abs() <= 0.5 * scale * (1 + 1e-5)).all()
    assert data.abs().max() == 127


def test_seven_mantissa_bits_are_bfloat16_and_ten_are_float16():
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    x *= torch.exp(torch.randn(10_000, generator=torch.Generator().manual_seed(1)) * 20)
    assert torch.equal(round_mantissa(x, 7), x.bfloat16().float())
    middling = x[(x.abs() > 2.0**-14) & (x.abs() < 60000)]
    assert len(middling) > 1000
    assert torch.equal(round_mantissa(middling, 10), middling.half().float())


def test_mantissa_by_hand():
    # One bit: 1 and 1.5 within a power of two. 1.25 is a tie and goes to the even 1.0, 1.75 to 2.0 (the carry).
    assert round_mantissa(torch.tensor([1.25, 1.75, -1.26, 3.0]), 1).tolist() == [1.0, 2.0, -1.5, 3.0]
    # No bits: powers of two; 1.5 is a tie between 1 (exponent code 127, odd) and 2 (128, even).
    assert round_mantissa(torch.tensor([1.5, 1.49, 3.0, 0.0]), 0).tolist() == [2.0, 1.0, 2.0, 0.0]
    special = torch.tensor([torch.inf, -torch.inf, torch.nan])
    np.testing.assert_array_equal(round_mantissa(special, 3).numpy(), special.numpy())  # NaN counts as equal


@pytest.mark.parametrize("bits", range(24))
def test_mantissa_rounds_to_the_nearest_multiple_of_its_unit(bits):
    x = torch.randn(2000, generator=torch.Generator().manual_seed(bits))
    _, exponent = np.frexp(x.double().numpy())
    unit = np.ldexp(1.0, exponent - 1 - bits)
    expected = np.rint(x.double().numpy() / unit) * unit  # rint: ties to even, exact in float64
    np.testing.assert_array_equal(round_mantissa(x, bits).double().numpy(), expected)


def test_the_dtype_stays_and_impossible_bits_are_refused():
    x = torch.randn(5).bfloat16()
    assert round_mantissa(x, 7).dtype == torch.bfloat16
    assert torch.equal(round_mantissa(x, 7), x)
    assert round_mantissa(x, 23) is not x
    for bits in (-1, 24):
        with pytest.raises(ValueError, match="0 to 23"):
            round_mantissa(x, bits)

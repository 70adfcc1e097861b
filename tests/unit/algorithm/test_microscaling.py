"""MXFP8 against values worked out by hand and a loop over runs in numpy. `tests/soak/microscaling_torchao.py` holds it
against torchao.
"""

import numpy as np
import pytest
import torch
from fp8_by_numpy import LARGEST, fp8_value, nearest_fp8

from gspo_mega.algorithm.fp8 import dequantize_mx, e8m0_from_amax, e8m0_values, from_fp8, quantize_mx

NAMES = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


def byte_by_search(amax: float, largest: float) -> int:
    """The least byte e with 2^(e - 127) >= amax / largest, in exact arithmetic on whole multiples of 2^-200."""
    wanted = int(amax * 2.0**100) << 100  # a float32 times 2^100 may be a fraction: its tail is below any tie here
    wanted += 1 if amax * 2.0**100 != int(amax * 2.0**100) else 0
    for e in range(255):
        if int(largest) << (200 + e - 127) >= wanted:
            return e
    return 0xFE


def spread(n, m, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((n, m), generator=generator) * torch.exp(torch.randn((n, m), generator=generator) * 8)


def test_bytes_by_hand():
    # 448 / 448 = 1 = 2^0: 127. Anything above needs the next power: 128. 447 / 448 is below 1 and above 1/2: 127.
    # 224 / 448 = 1/2: 126. Zero has no bits at all: byte 0. Infinity: 0xFE, the largest. 1e-38 / 448 = 2.2e-41 is below
    # 2^-127 = 5.9e-39: byte 0.
    amax = torch.tensor([448.0, 448.5, 447.0, 224.0, 0.0, torch.inf, 1e-38, 3.0e38])
    # 3e38 / 448 = 6.696e35, between 2^119 = 6.646e35 and 2^120: 127 + 120 = 247.
    assert e8m0_from_amax(amax).tolist() == [127, 128, 127, 126, 0, 0xFE, 0, 247]
    values = e8m0_values(torch.tensor([0, 1, 127, 254, 255], dtype=torch.uint8))
    assert values[:4].tolist() == [2.0**-127, 2.0**-126, 1.0, 2.0**127] and torch.isnan(values[4])


def test_runs_by_hand():
    # 33 columns: a run of 32 and a run of one. 7 / 448 = 1/64: byte 121, factor 64. The single -3: 3 / 448 lies between
    # 1/256 and 1/128: byte 120, factor 128: -384 = -1.5 * 2^8 is exact.
    x = torch.zeros(2, 33)
    x[0, 0], x[0, 31], x[0, 32] = 7.0, -1.0, -3.0
    data, codes = quantize_mx(x)
    assert codes.tolist() == [[121, 120], [0, 0]]
    assert from_fp8(data)[0, [0, 31, 32]].tolist() == [448.0, -64.0, -384.0]
    assert torch.equal(dequantize_mx(data, codes), x)
    # NaN counts for nothing and stays; an infinity takes the largest scale and saturates.
    x[0, 1], x[1, 0] = torch.nan, torch.inf
    data, codes = quantize_mx(x)
    assert codes.tolist() == [[121, 120], [0xFE, 0]]
    assert data.view(torch.uint8)[0, 1].item() == 0x7F and data.view(torch.uint8)[1, 0].item() == 0x7E


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
def test_by_loops(dtype, source):
    name = NAMES[dtype]
    x = spread(8, 96, seed=0).to(source)
    data, codes = quantize_mx(x, (1, 32), dtype)
    for row in range(8):
        for run in range(3):
            part = x[row, 32 * run : 32 * run + 32].float().numpy()
            byte = byte_by_search(float(np.abs(part).max()), LARGEST[name])
            assert codes[row, run].item() == byte
            expected = nearest_fp8(part * np.float32(2.0 ** (127 - byte)), name)
            np.testing.assert_array_equal(from_fp8(data)[row, 32 * run : 32 * run + 32].numpy(), expected)


def test_columns_are_the_rows_of_the_transpose_and_squares_share_a_byte():
    x = spread(64, 96, seed=1)
    by_columns, codes = quantize_mx(x, (32, 1))
    by_rows, transposed = quantize_mx(x.t().contiguous(), (1, 32))
    assert torch.equal(codes, transposed.t()) and torch.equal(from_fp8(by_columns), from_fp8(by_rows).t())
    _, squares = quantize_mx(x, (32, 32))
    assert torch.equal(squares, codes.reshape(2, 3, 32).amax(-1))


def test_every_value_of_the_tables_is_its_own_quantisation():
    every = torch.tensor([[fp8_value(c, "e4m3") for c in range(0x7F)] + [0.0]])
    data, codes = quantize_mx(every, (1, 128))
    assert codes.item() == 127 and torch.equal(from_fp8(data), every)

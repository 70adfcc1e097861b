"""FP8 by the definitions of the formats, in numpy and nothing of the product: every code is enumerated and searched."""

import functools

import numpy as np

FLOAT32_MAX = float(np.finfo(np.float32).max)
BFLOAT16_MAX = 255 * 2.0**120  # eight significant bits, exponent 127
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}


def fp8_value(code: int, name: str) -> float:
    """The value of a byte: (-1)^s 2^(e - bias) (1 + m / 2^bits), subnormal at e = 0 (Micikevicius et al. 2022, table 1)."""
    bits, bias = (3, 7) if name == "e4m3" else (2, 15)
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code & 0x7F) >> bits, code & ((1 << bits) - 1)
    if name == "e4m3" and (code & 0x7F) == 0x7F:
        return float("nan")
    if name == "e5m2" and exponent == 31:
        return sign * float("inf") if mantissa == 0 else float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - bits)
    return sign * (1 + mantissa / 2**bits) * 2.0 ** (exponent - bias)


@functools.cache
def _grid(name: str) -> np.ndarray:
    """The finite values of the positive codes; the index is the code, so an even index is an even mantissa."""
    values = [fp8_value(code, name) for code in range(0x80)]
    return np.array([value for value in values if np.isfinite(value)])


def nearest_fp8(x: np.ndarray, name: str) -> np.ndarray:
    """The nearest value, ties to the even code, saturating; NaN stays. In float64, where float32 is exact."""
    grid = _grid(name)
    magnitude = np.minimum(np.abs(x.astype(np.float64)), LARGEST[name])
    upper = np.clip(np.searchsorted(grid, np.nan_to_num(magnitude)), 1, len(grid) - 1)
    lower = upper - 1
    to_lower, to_upper = magnitude - grid[lower], grid[upper] - magnitude
    code = np.where((to_lower < to_upper) | ((to_lower == to_upper) & (lower % 2 == 0)), lower, upper)
    return np.where(np.isnan(x), np.nan, np.copysign(grid[code], x)).astype(np.float32)


def scale_of(
    amax: np.float32, name: str, power_of_two: bool, epsilon: float = 0.0, highest: float = FLOAT32_MAX
) -> np.float32:
    """Transformer Engine's documented rule for one amax, by whole-number exponents where a power of two is asked for.

    `highest`: the scale where the quotient overflows; of blocks it is the largest value of the input's type.
    """
    amax = np.float32(max(amax, np.float32(epsilon)))
    if not np.isfinite(amax) or amax == 0:
        return np.float32(1)
    with np.errstate(over="ignore"):
        scale = np.float32(LARGEST[name]) / amax
    if np.isinf(scale):
        scale = np.float32(highest)
    if power_of_two:
        _, exponent = np.frexp(scale)
        scale = np.float32(np.ldexp(1.0, int(exponent) - 1))
    return np.float32(scale)


def quantize_by_loops(
    x: np.ndarray,
    block: tuple[int, int],
    name: str = "e4m3",
    power_of_two: bool = False,
    epsilon: float = 0.0,
    highest: float = FLOAT32_MAX,
) -> tuple[np.ndarray, np.ndarray]:
    """(values on the FP8 grid [n, m], scale_inv per block), block after block."""
    n, m = x.shape
    rows, columns = -(-n // block[0]), -(-m // block[1])
    values, scale_inv = np.empty((n, m), np.float32), np.empty((rows, columns), np.float32)
    for i in range(rows):
        for j in range(columns):
            here = np.s_[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            part = x[here].astype(np.float32)
            known = np.abs(part[~np.isnan(part)])
            scale = scale_of(np.float32(known.max() if known.size else 0), name, power_of_two, epsilon, highest)
            with np.errstate(over="ignore", invalid="ignore"):
                values[here] = nearest_fp8(part * scale, name)
            scale_inv[i, j] = np.float32(1) / scale
    return values, scale_inv

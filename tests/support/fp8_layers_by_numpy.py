"""What each FP8 recipe reads of an operand, and the products of a linear layer: numpy in float64, none of the product.

Recipes as Transformer Engine documents them: per tensor (tensorwise; delayed once its scales stand), 1x128 along the
summed dimension for activations and gradients and 128x128 for weights (blockwise), 1x32 along the summed dimension with
powers of two rounded up (mxfp8). Gradients are E5M2 where one scale serves a whole tensor, else E4M3.
"""

from typing import NamedTuple

import numpy as np
from fp8_by_numpy import BFLOAT16_MAX, LARGEST, nearest_fp8, quantize_by_loops


def _micro(x: np.ndarray, name: str) -> np.ndarray:
    """Runs of 32 along rows, each divided by the least power of two that keeps it within the format."""
    out = np.zeros(x.shape)
    for row in range(x.shape[0]):
        for start in range(0, x.shape[1], 32):
            part = x[row, start : start + 32].astype(np.float64)
            amax = np.abs(part).max()
            if amax > 0:
                unit = 2.0 ** np.ceil(np.log2(amax / LARGEST[name]))
                out[row, start : start + 32] = nearest_fp8(part / unit, name) * unit
    return out


def read(x: np.ndarray, recipe: str, role: str, by_columns: bool, power_of_two: bool = False) -> np.ndarray:
    """The values [n, m] float64 that a product reads of x, whose sum runs along rows, or with `by_columns` along columns.

    role: input, weight or gradient.
    """
    name = "e5m2" if role == "gradient" and recipe == "tensorwise" else "e4m3"
    if recipe == "mxfp8":
        return _micro(x.T, name).T if by_columns else _micro(x, name)
    if recipe == "tensorwise":
        block = x.shape
    elif role == "weight":
        block = (128, 128)
    else:
        block = (128, 1) if by_columns else (1, 128)
    values, scale_inv = quantize_by_loops(x, block, name, power_of_two, highest=BFLOAT16_MAX)
    spread = np.kron(scale_inv.astype(np.float64), np.ones(block))[: x.shape[0], : x.shape[1]]
    return values.astype(np.float64) * spread


class Product(NamedTuple):
    """An exact product, and the sum of magnitudes that bounds the rounding of its sums."""

    exact: np.ndarray
    magnitudes: np.ndarray
    terms: int

    @classmethod
    def of(cls, a: np.ndarray, b: np.ndarray) -> "Product":
        return cls(a @ b, np.abs(a) @ np.abs(b), a.shape[1])

    def check(self, got: np.ndarray, what: str, added: np.ndarray | float = 0.0) -> None:
        """`got` is the product (plus `added`), summed in float32 in any order and rounded once to bfloat16."""
        exact = self.exact + added
        # float32: one rounding per term and one of each dequantised operand. bfloat16 has eight significant bits, so
        # that half a step is 2^-8.
        bound = (self.terms + 4) * 2.0**-24 * (self.magnitudes + np.abs(added)) + np.abs(exact) * 2.0**-8
        worst = (np.abs(got - exact) - bound).max()
        assert worst <= 0, f"{what}: off by {worst:g} beyond the bound; largest value {np.abs(exact).max():g}"


def linear(x: np.ndarray, weight: np.ndarray, gradient: np.ndarray, recipe: str, power_of_two: bool = False) -> dict:
    """The three products of y = x weight^T: output, dgrad and wgrad. x [n, k], weight [m, k], gradient [n, m]."""

    def seen(array: np.ndarray, role: str, by_columns: bool) -> np.ndarray:
        return read(array, recipe, role, by_columns, power_of_two)

    return dict(
        output=Product.of(seen(x, "input", False), seen(weight, "weight", False).T),
        dgrad=Product.of(seen(gradient, "gradient", False), seen(weight, "weight", True)),
        wgrad=Product.of(seen(gradient, "gradient", True).T, seen(x, "input", True)),
    )

"""Rounding to fewer mantissa bits at an unchanged exponent range: a dose of imprecision with one knob.

Owns the rounding. It does not own what is rounded or when.
"""

from __future__ import annotations

import torch

MANTISSA_BITS = 23  # explicit mantissa bits of a float32


def round_mantissa(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Rounds to the nearest value with so many explicit mantissa bits, ties to even: 7 bits are bfloat16's mantissa.

    A carry goes into the exponent, so a value next to float32's largest becomes infinite, as in a conversion to
    bfloat16. Infinities, NaN and zeros stay. Subnormals keep their grid's lowest `23 - bits` bits at zero.

    Args:
        x: [...] float32, bfloat16 or float16.
        bits: 0 to 23 explicit mantissa bits.

    Returns:
        [...] of x's dtype.

    Raises:
        ValueError: `bits` is not 0 to 23.
    """
    if not 0 <= bits <= MANTISSA_BITS:
        raise ValueError(f"{bits} explicit mantissa bits: a float32 has 0 to {MANTISSA_BITS}")
    dropped = MANTISSA_BITS - bits
    if dropped == 0:
        return x.clone()
    code = x.float().view(torch.int32)
    last_kept = (code >> dropped) & 1
    rounded = (code + ((1 << (dropped - 1)) - 1) + last_kept) & -(1 << dropped)
    return torch.where(torch.isfinite(x), rounded.view(torch.float32), x.float()).to(x.dtype)

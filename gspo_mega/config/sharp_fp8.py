"""Whether a certificate of FP8 computes with fp32 numbers between its products (`certify.sharp_fp8`).

In bf16 the last bit of an activation differs from layout to layout, and FP8 turns it into half of its own error: the
tolerance hides what it should find. In fp32 one number in a million falls to the other side of an edge of FP8. Owns
the condition alone; what follows from it is in the engine's precision and in the certificate's tolerances.
"""

from __future__ import annotations

from gspo_mega.config.schema import Config


def is_sharp(config: Config) -> bool:
    """Whether parameters and activations between FP8 products are fp32."""
    return config.precision == "fp8" and config.certify.sharp_fp8

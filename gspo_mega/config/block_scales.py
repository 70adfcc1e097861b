"""Whether the scales of FP8 blocks are powers of two: one answer for the trainer's products and for published weights.

Owns the rule behind `fp8.block_scales`, and the variable by which Transformer Engine is told. How a scale is rounded
is `gspo_mega/algorithm/fp8.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from gspo_mega.config.schema import Config

# 1: scales of blocks are any float32; else powers of two. Transformer Engine reads it when it is imported.
FLOAT32_SCALES_VARIABLE = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"
# Compute capability 10.0: its products take powers of two, and Transformer Engine refuses others there.
BLACKWELL = (10, 0)


def has_powers_of_two(block_scales: str, capability: tuple[int, int] | None) -> bool:
    """What `fp8.block_scales` means on a GPU of this compute capability, None without one (numbers of Hopper)."""
    if block_scales == "auto":
        return capability is not None and capability >= BLACKWELL
    return block_scales == "power_of_two"


def multiplies_blocks(config: Config) -> bool:
    """Are there products of the trainer whose scales `fp8.block_scales` decides?"""
    return config.precision == "fp8" and config.fp8.recipe == "blockwise"


def block_scale_variable(
    config: Config | None, environment: Mapping[str, str], capability: tuple[int, int] | None
) -> dict[str, str]:
    """The variable for Transformer Engine, or nothing where it is right already.

    The configuration alone decides, so that products and published weights agree. For a program without one (None) a
    variable that is set stays as it is.
    """
    given = environment.get(FLOAT32_SCALES_VARIABLE)
    if config is None and given:
        return {}
    wanted = "0" if has_powers_of_two("auto" if config is None else config.fp8.block_scales, capability) else "1"
    return {} if wanted == (given or "0") else {FLOAT32_SCALES_VARIABLE: wanted}

"""In which precision a server holds weights, computes and caches: what `server.dtype`, `server.quantization` and
`server.kv_cache` mean, for the plan, the publish and the server alike.

Owns the meaning only. SGLang's names for it are `rollout/server/server_spec.py`'s; the emulation on a CPU is
`cpu/sglang_cpu_quantization.py`'s; quantising what is published is `weights/`'s.
"""

from __future__ import annotations

from typing import Literal

from gspo_mega.config.block_scales import BLACKWELL
from gspo_mega.config.schema import Config

ServerDtype = Literal["fp32", "bf16"]
DTYPES: dict[ServerDtype, str] = {"fp32": "float32", "bf16": "bfloat16"}
"""What config.json and SGLang call them."""
BLOCK = (128, 128)
"""Rows and columns of one weight block of `server.quantization: fp8_block`."""

PUBLISHED_QUANTIZED = frozenset({"fp8_block"})
"""Quantizations whose weights a server loads already quantized, with their scales. It quantizes those of the others
itself while it loads them.
"""

_FP8_PRODUCTS = (8, 9)
"""The first compute capability with products of FP8 operands."""


def server_dtype(config: Config) -> ServerDtype:
    """The precision of a server's activations and of its weights that are not quantized: `server.dtype`, and with
    `auto` the trainer's (bf16 for an FP8 trainer).
    """
    if config.server.dtype != "auto":
        return config.server.dtype
    return "fp32" if config.precision == "fp32" else "bf16"


def loads_quantized(config: Config) -> bool:
    """True if servers are sent quantized weights with their scales; False if plain ones."""
    return config.server.quantization in PUBLISHED_QUANTIZED


def publishes(config: Config) -> bool:
    """True if servers of this configuration are sent new weights while they run; an evaluation's are not."""
    return config.train is not None or config.sft is not None


def capability_problem(quantization: str, capability: tuple[int, int], is_published_to: bool) -> str | None:
    """Why SGLang 0.5.23 cannot hold these weights on a GPU of this compute capability, in words; None where it can.

    `is_published_to`: the server is sent new weights while it runs.
    """
    where = f"{quantization} on a GPU of compute capability {capability[0]}.{capability[1]}"
    if quantization in ("fp8", "fp8_block") and capability < _FP8_PRODUCTS:
        return (
            f"{where}: SGLang repacks FP8 weights for products with operands that are not rounded (Marlin), which are"
            " other numbers than this key names, and new weights cannot be loaded into what is repacked"
        )
    if quantization == "fp8_block" and capability >= BLACKWELL and is_published_to:
        return (
            f"{where}: SGLang replaces the blocks' scales by packed powers of two of another shape (DeepGEMM), so that"
            " every publish would fail; without `train` and `sft` (`gspo-mega eval`) it can be used"
        )
    return None


_WEIGHTS = {
    "fp8": "e4m3 weights, quantized by the server while it loads",
    "fp8_block": "e4m3 weights in 128 x 128 blocks, quantized by the trainer",
    "int8": "INT8 weights, quantized by the server while it loads",
}


def describe_server_precision(config: Config) -> str:
    """For the plan: what servers compute in, hold and cache."""
    dtype = server_dtype(config)
    weights = _WEIGHTS.get(config.server.quantization, f"{dtype} weights")
    cache = "e4m3" if config.server.kv_cache == "fp8" else dtype
    return f"{dtype} activations, {weights}, {cache} cache"

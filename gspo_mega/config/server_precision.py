"""In which precision a server holds weights, computes and caches: what `server.dtype`, `server.quantization` and
`server.kv_cache` mean, for the plan, the publish and the server alike.

Owns the meaning only. SGLang's names for it are `rollout/server/server_spec.py`'s; the emulation on a CPU is
`rollout/server/sglang_cpu_quantization.py`'s; quantising what is published is `weights/`'s.
"""

from __future__ import annotations

from typing import Literal

from gspo_mega.config.schema import Config

ServerDtype = Literal["fp32", "bf16"]
BLOCK = (128, 128)
"""Rows and columns of one weight block of `server.quantization: fp8_block`."""

PUBLISHED_QUANTIZED = frozenset({"fp8_block"})
"""Quantizations whose weights a server loads already quantized, with their scales. It quantizes those of the others
itself while it loads them.
"""


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

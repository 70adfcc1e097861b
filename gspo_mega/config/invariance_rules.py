"""What contradicts `engine.batch_invariant` in every model. What follows from model and device is the plan's
(`plan/invariance_needs.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from gspo_mega.base.errors import Violation
from gspo_mega.config.schema import Config
from gspo_mega.config.server_precision import server_dtype

_SAID = "with `engine.batch_invariant: true`"


def invariance_violations(config: Config) -> Iterator[Violation]:
    """Settings with which trainer and servers would add in different orders, or round differently."""
    if not config.engine.batch_invariant:
        return
    parallel, server = config.parallel, config.server
    if config.precision == "fp8":
        yield Violation("precision", f"fp8 {_SAID}: only plain layers have these operations; valid then: fp32, bf16")
    for key in ("transformer_engine", "fuse_activation"):
        if getattr(config.engine, key):
            yield Violation(
                f"engine.{key}", f"true {_SAID}, whose operations are others; valid then: false, or leave it out"
            )
    ways = {name: getattr(parallel, name) for name in ("tensor", "pipeline", "context")} | {"server": server.tensor}
    for name, size in ways.items():
        if size > 1:
            key = "server.tensor" if name == "server" else f"parallel.{name}"
            why = "was not compared" if name == "pipeline" else "divides sums over ranks"
            yield Violation(key, f"{size} {_SAID}: it {why}; valid then: 1")
    if config.lora is not None:
        yield Violation("lora", f"set {_SAID}: adapters were not compared; leave one of the two out")
    if server.quantization != "none":
        yield Violation("server.quantization", f"{server.quantization} {_SAID}: it rounds; valid then: none")
    if server.kv_cache != "auto":
        yield Violation("server.kv_cache", f"{server.kv_cache} {_SAID}: it rounds; valid then: auto")
    if config.precision != "fp8" and server_dtype(config) != config.precision:
        yield Violation("server.dtype", f"{server.dtype} {_SAID} and `precision: {config.precision}`; valid then: auto")
    if server.attention_backend is not None:
        yield Violation(
            "server.attention_backend", f"{server.attention_backend} {_SAID}, which has one of its own; leave it out"
        )
    if server.speculative is not None:
        yield Violation("server.speculative", f"set {_SAID}: its passes were not compared; leave it out")

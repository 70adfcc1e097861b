"""What a model with sinks, sliding windows and biases in every layer (gpt-oss) cannot be used with, by name.

Some of it Megatron cannot do, some has not been tried; each text says which.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from gspo_mega.base.errors import Violation
from gspo_mega.config.layer_library import has_transformer_engine_layers
from gspo_mega.config.schema import Config
from gspo_mega.models.spec import ModelSpec
from gspo_mega.plan.verification import is_on_gpu


def check_biased_layers(config: Config, spec: ModelSpec, device: Literal["cpu", "gpu"] | None) -> Iterator[Violation]:
    """Nothing for other models. `device`: what the ranks will run on, None where that is not known."""
    if spec.sinks:
        yield from _attention(config, spec, device)
    if spec.linear_bias:
        yield from _biases(config, spec)


def _attention(config: Config, spec: ModelSpec, device: Literal["cpu", "gpu"] | None) -> Iterator[Violation]:
    has_gpu = is_on_gpu(config, device)
    if config.precision == "fp8":
        yield Violation(
            "precision", f"fp8: {spec.family} has been tried with Megatron's plain layers only", "bf16, fp32"
        )
    elif has_transformer_engine_layers(config, has_gpu=has_gpu is not False):
        chosen = "true" if config.engine.transformer_engine else "left out, which on a GPU means true"
        yield Violation(
            "engine.transformer_engine",
            f"{chosen}: Transformer Engine's attention with sinks and windows has not been compared with transformers'",
            "false",
        )
    if has_gpu is False and config.server.attention_backend is not None:
        yield Violation(
            "server.attention_backend",
            f"{config.server.attention_backend} without GPUs: of those that SGLang has there none has both sinks and"
            " windows",
            "null, which is this package's",
        )


def _biases(config: Config, spec: ModelSpec) -> Iterator[Violation]:
    if config.parallel.expert_tensor > 1:
        yield Violation(
            "parallel.expert_tensor",
            f"{config.parallel.expert_tensor}: Megatron adds the biases of experts once for each rank that has a part"
            " of them, and refuses it",
            "1",
        )
    if config.engine.fuse_activation:
        yield Violation(
            "engine.fuse_activation",
            "true: Megatron's fused activation of these experts has no biases for single experts",
            "false, or leave it out",
        )
    if config.lora is not None:
        yield Violation(
            "lora", f"set with {spec.family}: adapters beside its biased layers have not been tried", "null"
        )
    if config.server.quantization != "none":
        yield Violation(
            "server.quantization",
            f"{config.server.quantization} with {spec.family}: experts with biases have no quantised form here",
            "none",
        )

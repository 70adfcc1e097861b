"""Whose layers compute the policy: Transformer Engine's, or Megatron's plain ones.

Owns the choice alone, so that a rank can prepare for it before it imports torch. How the layers are built is the
engine's; what a GPU or a wheel needs for them is the plan's.
"""

from __future__ import annotations

import sys
from pathlib import Path

from gspo_mega.config.schema import Config

# Set to 1 in a process without a GPU that shall load Transformer Engine. A rank sets it from its configuration; a
# program of its own sets it before it imports `gspo_mega.engine`.
TRANSFORMER_ENGINE_VARIABLE = "GSPO_TRANSFORMER_ENGINE"


def wheel_folder(prefix: str | None = None) -> Path:
    """Where `launch/setup.sh` puts Transformer Engine's wheel for a machine without a GPU: a folder of the environment
    that no import path names.
    """
    return Path(prefix or sys.prefix) / "opt" / "transformer_engine"


def has_transformer_engine_layers(config: Config, has_gpu: bool) -> bool:
    """Whether this configuration's policy has Transformer Engine's layers: as `engine.transformer_engine` says; without
    it in fp8, and on a GPU in bf16 too. fp32, and a policy with adapters, have Megatron's plain layers everywhere.
    """
    if config.precision == "fp32" or config.lora is not None:
        return False
    chosen = config.engine.transformer_engine
    return config.precision == "fp8" or (has_gpu if chosen is None else chosen)

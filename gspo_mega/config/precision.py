"""What computes and holds the policy's numbers: Transformer Engine's layers or Megatron's plain ones, which operations
are fused, the scales of FP8 blocks, and the precision of servers and what they are sent.

One answer for the session, the plan, the engine and the notices. Rules are elsewhere (the `validate` modules). Nothing
here imports torch or numpy, so a rank can ask before it imports torch.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gspo_mega.config.schema import Certify, Config, Engine, Fp8, Precision, Server, Sft, Train

# Set to 1 in a process without a GPU that is to load Transformer Engine. A rank sets it from its configuration; any
# other program sets it before it imports `gspo_mega.engine`.
TRANSFORMER_ENGINE_VARIABLE = "GSPO_TRANSFORMER_ENGINE"
FusionKey = Literal["fuse_activation", "fuse_permutation", "fuse_weight_gradient"]
# Each key of `engine`, and the setting of Megatron's TransformerConfig that it decides.
FUSION_SETTINGS: dict[FusionKey, str] = {
    "fuse_activation": "bias_activation_fusion",
    "fuse_permutation": "moe_permute_fusion",
    "fuse_weight_gradient": "gradient_accumulation_fusion",
}
# The operations' names in a report.
_FUSION_NAMES: dict[FusionKey, str] = {
    "fuse_activation": "activation",
    "fuse_permutation": "permutation",
    "fuse_weight_gradient": "weight gradient",
}


def wheel_folder(prefix: str | None = None) -> Path:
    """Return the folder where `launch/setup.sh` puts Transformer Engine's wheel for a machine without a GPU. It is in
    the environment `prefix`, and no import path names it.
    """
    return Path(prefix or sys.prefix) / "opt" / "transformer_engine"


def megatron_folder(prefix: str | None = None) -> Path:
    """Return the folder where `launch/setup.sh --trace` puts the Megatron-Core of launch/env/gpu.txt. It is in the
    environment `prefix`, and only a traced rank has it on its path.
    """
    return Path(prefix or sys.prefix) / "opt" / "megatron_core"


def has_transformer_engine_layers(precision: Precision, engine: Engine, has_gpu: bool) -> bool:
    """Return whether the policy has Transformer Engine's layers. `engine.transformer_engine` decides; if it is absent,
    fp8 has them, and bf16 on a GPU. fp32 always has Megatron's plain layers.
    """
    if precision == "fp32":
        return False
    chosen = engine.transformer_engine
    return precision == "fp8" or (has_gpu if chosen is None else chosen)


@dataclass(frozen=True)
class FusionChoice:
    """Whether an operation is fused, and why, in words for a report."""

    key: FusionKey
    on: bool
    why: str


def fused_operations(
    config: Config, *, has_experts: bool, has_gpu: bool, missing: Mapping[FusionKey, str] | None = None
) -> list[FusionChoice]:
    """Return the choice for each operation. `missing`: what a machine lacks for an operation, in words, if that is
    known.

    A key that is true is chosen even if something is in its way; `fusion_obstacle` and `missing` say what that is.
    """
    choices = []
    for key in FUSION_SETTINGS:
        wanted = getattr(config.engine, key)
        against = fusion_obstacle(config, key, has_experts=has_experts, has_gpu=has_gpu) or (missing or {}).get(key)
        if wanted is not None:
            choices.append(FusionChoice(key, wanted, f"engine.{key}"))
        elif against is not None:
            choices.append(FusionChoice(key, False, against))
        else:
            choices.append(
                FusionChoice(key, has_gpu, "by default on a GPU" if has_gpu else "without a GPU only if asked")
            )
    return choices


def fused_keys(config: Config, *, has_experts: bool, has_gpu: bool) -> frozenset[FusionKey]:
    """Return the keys of `engine` whose operations are fused if no library is missing."""
    made = fused_operations(config, has_experts=has_experts, has_gpu=has_gpu)
    return frozenset(choice.key for choice in made if choice.on)


def fusion_obstacle(config: Config, key: FusionKey, *, has_experts: bool, has_gpu: bool) -> str | None:
    """Return why this model in this configuration cannot have the operation on any machine of that kind; None if it
    can.
    """
    if key == "fuse_permutation" and not has_experts:
        return "no experts"
    if key != "fuse_activation" and not has_transformer_engine_layers(config.precision, config.engine, has_gpu):
        return "Megatron's plain layers"
    if key == "fuse_weight_gradient" and config.lora is not None:
        return "layers whose weights are frozen"
    return None


def describe_fusions(choices: list[FusionChoice]) -> str:
    """Return one line: what is fused and what is not, each with its reason."""
    parts = []
    for on in (True, False):
        named = [f"{_FUSION_NAMES[choice.key]} ({choice.why})" for choice in choices if choice.on is on]
        if named:
            parts.append(("fused: " if on else "not fused: ") + ", ".join(named))
    return "; ".join(parts)


# FP8: whether the scales of blocks are powers of two, one answer for the trainer's products and for published weights.
# How a scale is rounded is in `gspo_mega/algorithm/fp8.py`.

# Set to 1, scales of blocks are any float32; otherwise they are powers of two. Transformer Engine reads the variable
# when it is imported.
FLOAT32_SCALES_VARIABLE = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"
# Compute capability 10.0. Its products take powers of two, and Transformer Engine refuses other scales there.
BLACKWELL = (10, 0)


def has_powers_of_two(block_scales: str, capability: tuple[int, int] | None) -> bool:
    """Return whether `fp8.block_scales` means powers of two on a GPU of this compute capability. None stands for a
    machine without a GPU, which computes Hopper's numbers.
    """
    if block_scales == "auto":
        return capability is not None and capability >= BLACKWELL
    return block_scales == "power_of_two"


def has_block_scaled_products(precision: Precision, fp8: Fp8) -> bool:
    """Return whether the trainer has products whose scales `fp8.block_scales` decides."""
    return precision == "fp8" and fp8.recipe == "blockwise"


def block_scale_variable(
    fp8: Fp8 | None, environment: Mapping[str, str], capability: tuple[int, int] | None
) -> dict[str, str]:
    """Return the variable to set for Transformer Engine; empty if `environment` is right already.

    Only `fp8.block_scales` decides, so that products and published weights agree. For a program without it (None), a
    variable that is set stays as it is.
    """
    given = environment.get(FLOAT32_SCALES_VARIABLE)
    if fp8 is None and given:
        return {}
    wanted = "0" if has_powers_of_two("auto" if fp8 is None else fp8.block_scales, capability) else "1"
    return {} if wanted == (given or "0") else {FLOAT32_SCALES_VARIABLE: wanted}


def is_sharp_fp8(precision: Precision, certify: Certify) -> bool:
    """Return whether a certificate of FP8 keeps parameters and activations between FP8 products in fp32
    (`certify.sharp_fp8`).

    In bf16 the last bit of an activation differs from layout to layout, and FP8 turns it into half of its own error, so
    the tolerance would hide what it should find. In fp32 one number in a million falls to the other side of an edge of
    FP8. `cpu/te_loading.py::compute_sharply` says what else a sharp certificate computes differently.
    """
    return precision == "fp8" and certify.sharp_fp8


# The precision of servers, and what they are sent.

ServerDtype = Literal["fp32", "bf16"]
SERVER_DTYPES: dict[ServerDtype, str] = {"fp32": "float32", "bf16": "bfloat16"}
"""The names that config.json and SGLang use."""
WEIGHT_BLOCK = (128, 128)
"""Rows and columns of one weight block of `server.quantization: fp8_block`."""
PUBLISHED_QUANTIZED = frozenset({"fp8_block"})
"""Quantizations whose weights a server loads already quantized, with their scales. With the others it quantizes the
weights itself while it loads them.
"""
_FP8_PRODUCTS = (8, 9)
"""The first compute capability with products of FP8 operands."""
_WEIGHTS = {
    "fp8": "e4m3 weights, quantized by the server while it loads",
    "fp8_block": "e4m3 weights in 128 x 128 blocks, quantized by the trainer",
    "int8": "INT8 weights, quantized by the server while it loads",
}


def server_dtype(server: Server, precision: Precision) -> ServerDtype:
    """Return the precision of a server's activations and of its weights that are not quantized: `server.dtype`, and
    with `auto` the trainer's (bf16 for an FP8 trainer).
    """
    if server.dtype != "auto":
        return server.dtype
    return "fp32" if precision == "fp32" else "bf16"


def loads_quantized(server: Server) -> bool:
    """Return whether servers are sent quantized weights with their scales instead of plain ones."""
    return server.quantization in PUBLISHED_QUANTIZED


def publishes(train: Train | None, sft: Sft | None) -> bool:
    """Return whether servers of this configuration are sent new weights while they run. Those of an
    evaluation are not.
    """
    return train is not None or sft is not None


def publishes_adapters(config: Config) -> bool:
    """Return whether servers are sent only adapters and hold the weights of `model.path` all the time."""
    return config.lora is not None and config.publish.lora == "adapter" and publishes(config.train, config.sft)


def capability_problem(quantization: str, capability: tuple[int, int], is_published_to: bool) -> str | None:
    """Return why SGLang 0.5.23 cannot hold these weights on a GPU of this compute capability; None if it can.

    `is_published_to`: the server is sent new weights while it runs.
    """
    where = f"{quantization} on a GPU of compute capability {capability[0]}.{capability[1]}"
    if quantization in ("fp8", "fp8_block") and capability < _FP8_PRODUCTS:
        return (
            f"{where}: SGLang repacks FP8 weights for products with operands that are not rounded (Marlin). The"
            " numbers are"
            " not those that this key names, and new weights cannot be loaded into repacked ones"
        )
    if quantization == "fp8_block" and capability >= BLACKWELL and is_published_to:
        return (
            f"{where}: SGLang replaces the blocks' scales by packed powers of two of another shape (DeepGEMM), so"
            " every publish would fail; without `train` and `sft` (`gspo-mega eval`) it can be used"
        )
    return None


def describe_server_precision(server: Server, precision: Precision) -> str:
    """Return, for the plan's report, what servers compute in, hold and cache."""
    dtype = server_dtype(server, precision)
    weights = _WEIGHTS.get(server.quantization, f"{dtype} weights")
    cache = "e4m3" if server.kv_cache == "fp8" else dtype
    return f"{dtype} activations, {weights}, {cache} cache"

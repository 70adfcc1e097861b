"""Precision on this machine: what is installed, Megatron's settings, what is refused.

FP8 applies to Transformer Engine's linear layers only. Embedding, LM head, norms, the router (fp32) and attention keep
their precision. fp32 uses Megatron's plain layers on a GPU too: Transformer Engine multiplies fp32 as TF32, and its
attention takes packed sequences in half precision only.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import logging

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_config import TransformerConfig

from gspo_mega.base.errors import ModelError
from gspo_mega.config.block_scales import BLACKWELL, FLOAT32_SCALES_VARIABLE, has_powers_of_two, multiplies_blocks
from gspo_mega.config.layer_library import has_transformer_engine_layers
from gspo_mega.config.schema import Config
from gspo_mega.config.server_precision import loads_quantized
from gspo_mega.config.sharp_fp8 import is_sharp
from gspo_mega.cpu import te_loading
from gspo_mega.cpu.backend import is_cpu_backend
from gspo_mega.models.block_fp8 import publishes_powers_of_two
from gspo_mega.plan.precision_needs import check_precision

logger = logging.getLogger(__name__)

# The dtype of parameters, of activations between layers and of exported weights; nominal for FP8 parameters. A
# certificate may compute otherwise: `parameter_dtype`.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.bfloat16}

# With one scale per tensor gradients need the range of e5m2 (`hybrid`); with one per block e4m3 is wide enough for
# both.
_FORMATS = {"delayed": "hybrid", "tensorwise": "hybrid", "blockwise": "e4m3", "mxfp8": "e4m3"}


def parameter_dtype(config: Config) -> torch.dtype:
    """The dtype of a model's parameters, and of activations between layers."""
    return torch.float32 if is_sharp(config) else DTYPES[config.precision]


def uses_transformer_engine(megatron_config: TransformerConfig) -> bool:
    """True if the layers of this configuration are Transformer Engine's; else they are Megatron's plain ones."""
    return megatron_config.transformer_impl == "transformer_engine"


def require_precision(config: Config) -> None:
    """Raise ModelError, with a remedy, if this machine cannot compute in the configured precision."""
    if is_cpu_backend():
        if has_transformer_engine_layers(config, has_gpu=False) and not te_loading.is_loaded():
            raise ModelError(
                f"precision: {config.precision} with Transformer Engine's layers, which this process has not loaded; it"
                f" loads them if {te_loading.VARIABLE}=1 when it starts"
            )
        if te_loading.is_loaded():
            te_loading.compute_as_gpu_of(config.fp8.recipe if config.precision == "fp8" else None)
            te_loading.scale_tensors(power_of_two=is_sharp(config))
        _require_block_scales(config, None)
        return
    capability = torch.cuda.get_device_capability()
    problem = check_precision(config, capability, torch.version.cuda, transformer_engine_version())
    if problem is None:
        _require_block_scales(config, capability)
        return
    reason = transformer_engine_error()
    if reason is not None:
        problem += f" (importing it: {reason})"
    raise ModelError(f"precision: {problem}")


def _require_block_scales(config: Config, capability: tuple[int, int] | None) -> None:
    """Raise ModelError if the scales of blocks in products are not those that the configuration asks for, or not those
    of the published weights. `capability`: this rank's GPU, None without one, where published weights may be for any.
    """
    wanted = has_powers_of_two(config.fp8.block_scales, capability)
    if loads_quantized(config) and (multiplies_blocks(config) or capability is not None):
        published = publishes_powers_of_two(config)
        if published != wanted:
            raise ModelError(
                f"fp8.block_scales: {config.fp8.block_scales} is {_kind(wanted)} on {_device(capability)}, and"
                f" {_kind(published)} in published weights, which follow cluster.gpu ({config.cluster.gpu or 'null'});"
                " name this machine's GPU there, or set fp8.block_scales to power_of_two"
                + (" or float32" if capability is None or capability < BLACKWELL else "")
            )
    if multiplies_blocks(config) and (found := _multiplies_powers_of_two()) != wanted:
        raise ModelError(
            f"fp8.block_scales: {config.fp8.block_scales} is {_kind(wanted)} on {_device(capability)}, but this process"
            f" multiplies with {_kind(found)}: Transformer Engine reads {FLOAT32_SCALES_VARIABLE} once, when it is"
            " imported. A rank sets it before that; another program must, and cannot change it later"
        )


def _multiplies_powers_of_two() -> bool:
    """What Transformer Engine read when it was imported."""
    recipe = importlib.import_module("transformer_engine.common.recipe").Float8BlockScaling()
    return recipe.fp8_quant_fwd_weight.power_2_scale


def _kind(powers_of_two: bool) -> str:
    return "powers of two" if powers_of_two else "float32 scales"


def _device(capability: tuple[int, int] | None) -> str:
    return "a CPU" if capability is None else f"a GPU of compute capability {capability[0]}.{capability[1]}"


def precision_settings(config: Config) -> dict:
    """The settings of Megatron's TransformerConfig that define how numbers are stored and multiplied."""
    dtype, fp8 = parameter_dtype(config), config.fp8
    settings: dict = dict(
        params_dtype=dtype, pipeline_dtype=dtype, bf16=dtype == torch.bfloat16, transformer_impl="local"
    )
    if has_transformer_engine_layers(config, has_gpu=not is_cpu_backend()):
        settings["transformer_impl"] = "transformer_engine"
        # One kernel for the rotary positions of a whole pack, instead of one per sequence.
        settings["apply_rope_fusion"] = True
    if config.precision == "fp8":
        settings |= dict(fp8=_FORMATS[fp8.recipe], fp8_recipe=fp8.recipe, fp8_param=fp8.parameters)
        if fp8.recipe == "delayed":
            # Of steps: `fp8_scales.py` updates scales once in a step.
            settings |= dict(fp8_amax_history_len=16, fp8_amax_compute_algo="max")
    return settings


@functools.cache
def transformer_engine_error() -> str | None:
    """Why Transformer Engine cannot be imported; None if it can. On a machine without a GPU a process has it from its
    start, or not at all.
    """
    if is_cpu_backend():
        return None if te_loading.is_loaded() else "there is no GPU, and this process did not load it"
    try:
        importlib.import_module("transformer_engine.pytorch")
    # A build for another CUDA or torch fails with any error of its loader.
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def transformer_engine_version() -> str | None:
    """Transformer Engine's version, None if it cannot be imported."""
    if transformer_engine_error() is not None:
        return None
    return str(importlib.import_module("transformer_engine").__version__)


def describe_backends() -> list[str]:
    """The libraries and devices that this machine computes with, one line each, for a run's log."""
    lines = [f"PyTorch {torch.__version__}, Megatron-Core {importlib.metadata.version('megatron-core')}"]
    if is_cpu_backend():
        if not te_loading.is_loaded():
            return [*lines, "no GPU: Megatron's plain layers over gloo"]
        version = transformer_engine_version()
        return [*lines, f"Transformer Engine {version} over CPU kernels: its numbers, not its speed", "no GPU: gloo"]
    major, minor = torch.cuda.get_device_capability()
    lines.append(f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}, CUDA {torch.version.cuda}")
    version = transformer_engine_version()
    lines.append(
        f"Transformer Engine {version}" if version else f"Transformer Engine: no ({transformer_engine_error()})"
    )
    return lines


@functools.cache
def log_backends() -> None:
    """Log `describe_backends`, once per process and on rank 0 only."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        for line in describe_backends():
            logger.info(line)

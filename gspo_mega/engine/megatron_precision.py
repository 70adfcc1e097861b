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

from gspo_mega.config.schema import Config, Fp8
from gspo_mega.engine.cpu import is_cpu_backend
from gspo_mega.errors import ModelError
from gspo_mega.plan.precision_needs import check_precision

logger = logging.getLogger(__name__)

# The dtype of parameters, of activations between layers and of exported weights; nominal for FP8 parameters.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.bfloat16}

# With one scale per tensor gradients need the range of e5m2 (`hybrid`); with one per block e4m3 is wide enough for
# both.
_FORMATS = {"delayed": "hybrid", "tensorwise": "hybrid", "blockwise": "e4m3", "mxfp8": "e4m3"}


def uses_transformer_engine(dtype: torch.dtype) -> bool:
    """True if layers of this parameter dtype are Transformer Engine's; else they are Megatron's plain ones."""
    return not is_cpu_backend() and dtype != torch.float32


def require_precision(config: Config) -> None:
    """Raise ModelError, with a remedy, if this machine cannot compute in the configured precision."""
    capability = None if is_cpu_backend() else torch.cuda.get_device_capability()
    problem = check_precision(config, capability, torch.version.cuda, transformer_engine_version())
    if problem is None:
        return
    reason = transformer_engine_error()
    if reason is not None and capability is not None:
        problem += f" (importing it: {reason})"
    raise ModelError(f"precision: {problem}")


def precision_settings(precision: str, fp8: Fp8) -> dict:
    """The settings of Megatron's TransformerConfig that define how numbers are stored and multiplied."""
    dtype = DTYPES[precision]
    settings: dict = dict(params_dtype=dtype, pipeline_dtype=dtype, bf16=dtype == torch.bfloat16)
    if uses_transformer_engine(dtype):
        # One kernel for the rotary positions of a whole pack, instead of one per sequence.
        settings["apply_rope_fusion"] = True
        # Adds weight gradients to their fp32 buffer inside the product. Megatron's LM head layer refuses the setting
        # without Apex's kernel, whichever library does the other layers' products.
        settings["gradient_accumulation_fusion"] = has_fused_weight_gradient()
    if precision == "fp8":
        settings |= dict(fp8=_FORMATS[fp8.recipe], fp8_recipe=fp8.recipe, fp8_param=fp8.parameters)
        if fp8.recipe == "delayed":
            # Scales come from the largest value of many passes. With one pass, the old pass would set the training
            # pass's.
            settings |= dict(fp8_amax_history_len=1024, fp8_amax_compute_algo="max")
    return settings


@functools.cache
def transformer_engine_error() -> str | None:
    """Why Transformer Engine cannot be imported; None if it can. Does not try on a machine without a GPU."""
    if is_cpu_backend():
        return "there is no GPU, and it needs one"
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


def has_fused_weight_gradient() -> bool:
    """True if Apex's `fused_weight_gradient_mlp_cuda` can be loaded; it comes with NVIDIA's source or container."""
    return not is_cpu_backend() and _loads("fused_weight_gradient_mlp_cuda")


@functools.cache
def _loads(name: str) -> bool:
    try:
        importlib.import_module(name)
    except (ImportError, OSError):
        return False
    return True


def describe_backends() -> list[str]:
    """The libraries and devices that this machine computes with, one line each, for a run's log."""
    lines = [f"PyTorch {torch.__version__}, Megatron-Core {importlib.metadata.version('megatron-core')}"]
    if is_cpu_backend():
        return [*lines, "no GPU: Megatron's plain layers over gloo"]
    major, minor = torch.cuda.get_device_capability()
    lines.append(f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}, CUDA {torch.version.cuda}")
    version = transformer_engine_version()
    lines.append(
        f"Transformer Engine {version}" if version else f"Transformer Engine: no ({transformer_engine_error()})"
    )
    lines.append(f"Apex: {_apex()}")
    return lines


@functools.cache
def log_backends() -> None:
    """Log `describe_backends`, once per process and on rank 0 only."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        for line in describe_backends():
            logger.info(line)


def _apex() -> str:
    """Megatron uses Apex's fused Adam and norms only without Transformer Engine's. What remains is one kernel."""
    if has_fused_weight_gradient():
        return "weight gradients are added to their fp32 buffers inside the product"
    return "its fused_weight_gradient_mlp_cuda is not installed; weight gradients are added in a step of their own"

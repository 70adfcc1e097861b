"""Fused operations and the dispatcher of experts' tokens, as settings of Megatron's TransformerConfig, on this machine.

Owns which libraries are there for them, and the refusal of what was asked for and is not. What is chosen, and why, is
`config/fused_operations.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import logging
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.moe import fused_a2a, moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig

from gspo_mega.base.errors import ModelError
from gspo_mega.config.fused_operations import SETTINGS, Choice, Key, describe_fusions, fused_operations, obstacle
from gspo_mega.config.schema import Config
from gspo_mega.cpu.backend import is_cpu_backend

logger = logging.getLogger(__name__)

_PERMUTATIONS = (
    "fused_permute",
    "fused_permute_with_probs",
    "fused_sort_chunks_by_index",
    "fused_sort_chunks_by_index_with_probs",
    "fused_unpermute",
)
# The field with which Megatron lets ranks of an expert group have packs of different lengths under HybridEP.
_UNEVEN_HYBRID = "moe_hybridep_pad_uneven_dispatch_inputs"


def choices(config: Config, has_experts: bool) -> list[Choice]:
    """What is fused on this machine. Raises ModelError for an operation that is asked for and cannot be fused here."""
    missing, has_gpu = _missing(), not is_cpu_backend()
    for key in SETTINGS:
        if getattr(config.engine, key):
            reason = obstacle(config, key, has_experts=has_experts, has_gpu=has_gpu) or missing.get(key)
            if reason is not None:
                raise ModelError(f"engine.{key}: true, and this cannot be: {reason}; leave the key out")
    return fused_operations(config, has_experts=has_experts, has_gpu=has_gpu, missing=missing)


def fusion_settings(config: Config, has_experts: bool) -> dict[str, bool]:
    """The settings of TransformerConfig. Raises ModelError as `choices`. Logs the choice once, on rank 0."""
    made = choices(config, has_experts)
    _log(describe_fusions(made))
    return {SETTINGS[choice.key]: choice.on for choice in made}


def dispatcher_settings(config: Config) -> dict[str, Any]:
    """How tokens reach the experts of other ranks. Raises ModelError where the library for it is not there."""
    chosen = config.parallel.expert_dispatcher
    if chosen in ("alltoall", "allgather"):
        return {"moe_token_dispatcher_type": chosen}
    settings: dict[str, Any] = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": chosen}
    if chosen == "hybridep":
        if _UNEVEN_HYBRID not in {field.name for field in dataclasses.fields(TransformerConfig)}:
            raise ModelError(
                "parallel.expert_dispatcher: hybridep needs Megatron-Core 0.19: an older one takes packs of one length"
                " only; use alltoall or deepep"
            )
        settings[_UNEVEN_HYBRID] = True
    found = fused_a2a.HAVE_DEEP_EP if chosen == "deepep" else fused_a2a.HAVE_HYBRIDEP
    if not found:
        branch = "" if chosen == "deepep" else ", branch hybrid-ep"
        raise ModelError(
            f"parallel.expert_dispatcher: {chosen} needs the Python package deep_ep, and this Python cannot import what"
            f" Megatron takes from it (https://github.com/deepseek-ai/DeepEP{branch}); install it, or use alltoall"
        )
    return settings


@contextlib.contextmanager
def head_without_apex() -> Iterator[None]:
    """Within it, Megatron builds an LM head layer where weight gradients are fused and Apex is not installed.

    That layer's own product, which would call Apex's kernel, is never run: `log_probs.py` multiplies by its weight. The
    other layers are Transformer Engine's, which need no Apex.
    """
    before = layers._grad_accum_fusion_available
    layers._grad_accum_fusion_available = True
    try:
        yield
    finally:
        layers._grad_accum_fusion_available = before


def _missing() -> dict[Key, str]:
    """What this process cannot do for lack of a library, in words."""
    found: dict[Key, str] = {}
    if any(getattr(moe_utils, name, None) is None for name in _PERMUTATIONS):
        found["fuse_permutation"] = "Megatron found no Transformer Engine 2.1 or later with Triton"
    if not is_cpu_backend() and importlib.util.find_spec("triton") is None:
        found["fuse_activation"] = "torch.compile needs Triton on a GPU, and it is not installed"
    return found


@functools.cache
def _log(line: str) -> None:
    """Once per process and line, on rank 0 only."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.info(line)

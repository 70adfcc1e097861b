"""The differences between Megatron-Core 0.16 and 0.19 that matter here.

Each function asks which feature the installed version has, never for its number.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter


def router_losses() -> dict[str, torch.Tensor]:
    """The routers' losses since they were last cleared, by name: [layers] float32, before coefficients, this rank's."""
    return {name: entry["values"] for name, entry in moe_utils.get_moe_layer_wise_logging_tracker().items()}


def clear_router_losses() -> None:
    """Clear the routers' losses. 0.16 returns its own dictionary; 0.19 returns a copy and has a tracker to clear."""
    tracker = getattr(moe_utils, "get_moe_metrics_tracker", moe_utils.get_moe_layer_wise_logging_tracker)()
    tracker.clear()


def router_losses_know_their_parts() -> bool:
    """Does Megatron multiply a router loss by all positions of a pack (0.19), or by this rank's part of them (0.16)?

    For a loss that is later divided by tokens the former is right; 0.16 leaves out the tensor and context ranks.
    """
    return "needs_dp_avg" in inspect.signature(TopKRouter.attach_and_log_load_balancing_loss).parameters


def asynchronous_save() -> dict[str, Any]:
    """Arguments with which `dist_checkpointing.save` returns a request instead of waiting.

    0.19 uses NVIDIA's resiliency extension unless Megatron's own way, the only one of 0.16, is named.
    """
    named = "async_strategy" in inspect.signature(dist_checkpointing.save).parameters
    return {"async_sharded_save": True} | ({"async_strategy": "mcore"} if named else {})


def mlp_parts(mlp: Any) -> Any:
    """The submodules of a layer's MLP, as its spec has it: a ModuleSpec (0.16), or a partly applied function (0.19)."""
    return mlp.keywords["submodules"] if isinstance(mlp, functools.partial) else mlp.submodules

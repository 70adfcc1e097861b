"""The metrics of a policy's adapters (`lora`): how many numbers are trained, and how far they are from nothing."""

from __future__ import annotations

from gspo_mega.engine.adapters import adapter_norm
from gspo_mega.engine.policy import PolicyEngine
from gspo_mega.plan.adapter_shares import num_adapter_parameters


def adapter_metrics(engine: PolicyEngine) -> dict[str, float]:
    """On every rank; empty without `lora`. Collective."""
    lora = engine.config.lora
    if lora is None:
        return {}
    return {
        "lora/norm": adapter_norm(engine.chunks, engine.groups),
        "lora/num_parameters": num_adapter_parameters(lora, engine.spec),
    }

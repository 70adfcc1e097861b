"""Adapters (`lora`) in a plan: their parameters on a rank, how many are trained, and what they cannot be beside.

Owns what follows from the model; what contradicts every model is `config/lora_rules.py`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from gspo_mega.base.errors import ModelError, Violation
from gspo_mega.config.schema import Config, Lora
from gspo_mega.models.families import TensorEntry, hf_tensors, parameter_shape
from gspo_mega.models.low_rank import adapted, adapter_tensors, module_of, targets_of
from gspo_mega.models.spec import ModelSpec

if TYPE_CHECKING:
    from gspo_mega.plan.layout import Layout
    from gspo_mega.plan.shares import Share

# Families with experts whose adapters a real server has computed as the trainer does.
_SERVED_WITH_EXPERTS = ("qwen3_moe",)


def check_adapters(config: Config, spec: ModelSpec) -> Iterator[Violation]:
    """What `lora` asks for and this model, or its layout, does not have."""
    if config.lora is None:
        return
    try:
        found = adapted(spec, config.lora.targets)
    except ModelError as error:
        yield Violation("lora.targets", str(error).partition(": ")[2])
        return
    if config.publish.lora == "adapter" and (said := _not_served(spec, found)):
        yield Violation("publish.lora", f"adapter, and the model ({spec.family}) has {said}", "merged")
    if any(entries[0].expert is not None for entries in found.values()) and config.parallel.expert_tensor > 1:
        own = [name for name in targets_of(spec) if name not in _of_experts(spec)]
        yield Violation(
            "parallel.expert_tensor",
            f"{config.parallel.expert_tensor} cuts every expert, and an expert's adapter is whole on its rank; without"
            f" adapters on experts `lora.targets: [{', '.join(own)}]`",
            "1",
        )


def _not_served(spec: ModelSpec, found: dict[str, list[TensorEntry]]) -> str:
    """Why servers do not get these adapters as such; empty where they do."""
    if spec.latent is not None:
        return (
            "latent attention: SGLang adds what kv_b_proj's adapters change of it by GPU kernels alone, and no server"
            " has been compared with the trainer"
        )
    if spec.moe is not None and spec.family not in _SERVED_WITH_EXPERTS:
        served = ", ".join(_SERVED_WITH_EXPERTS)
        return f"experts: servers with adapters were compared with the trainer for {served} and models without experts"
    roles = {entry.role for entries in found.values() for entry in entries if entry.expert is not None}
    if roles and not {"gate", "whole"} <= roles:
        gate, _, down = dict.fromkeys(module_of(e) for e in hf_tensors(spec) if e.expert is not None)
        return f"experts with adapters: SGLang computes them only if {gate} and {down} are both in lora.targets"
    return ""


def _of_experts(spec: ModelSpec) -> set[str]:
    found = adapted(spec, ())
    return {module_of(entry) for entries in found.values() for entry in entries if entry.expert is not None}


def trained_parameters(config: Config, spec: ModelSpec, total: int) -> int:
    """Numbers of the policy that are trained: all of them, or those of the adapters."""
    lora = config.lora
    return total if lora is None else num_adapter_parameters(lora, spec)


def num_adapter_parameters(lora: Lora, spec: ModelSpec) -> int:
    return sum(tensor.num_elements for tensor in adapter_tensors(spec, lora.rank, lora.targets))


def adapter_shares(lora: Lora, spec: ModelSpec, layout: Layout, shares: Sequence[Share]) -> list[Share]:
    """A rank's parts of the adapters of a chunk whose own parameters are `shares`, in the order of the engine's
    modules: B, then the A of each matrix.
    """
    wanted = adapted(spec, lora.targets)
    found = []
    for share in shares:
        entries = wanted.get(share.name, [])
        if not entries:
            continue
        cut = layout.expert_tensor if entries[0].expert is not None else layout.tensor
        rows, columns = parameter_shape(spec, entries[0], cut)
        for size in (rows, *[columns] * len(entries)):
            found.append(replace(share, num_elements=size * lora.rank, linear=False))
    return found

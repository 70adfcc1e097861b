"""Adapters (`lora`) in a plan: their parameters on a rank, how many are trained, and what they cannot be beside.

Owns what follows from the model; what contradicts every model is `config/lora_rules.py`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from gspo_mega.config.schema import Config, Lora
from gspo_mega.errors import ModelError, Violation
from gspo_mega.model.families import parameter_shape
from gspo_mega.model.low_rank import adapted, adapter_tensors, module_of, targets_of
from gspo_mega.model.spec import ModelSpec

if TYPE_CHECKING:
    from gspo_mega.plan.layout import Layout
    from gspo_mega.plan.shares import Share


def check_adapters(config: Config, spec: ModelSpec) -> Iterator[Violation]:
    """What `lora` asks for and this model, or its layout, does not have."""
    if config.lora is None:
        return
    try:
        found = adapted(spec, config.lora.targets)
    except ModelError as error:
        yield Violation("lora.targets", str(error).partition(": ")[2])
        return
    if config.publish.lora == "adapter" and (spec.moe is not None or spec.latent is not None):
        has = "experts" if spec.moe is not None else "latent attention"
        yield Violation(
            "publish.lora",
            f"adapter, and the model ({spec.family}) has {has}: PEFT's form of their adapters is another one than"
            " SGLang's, and nothing has compared them with the trainer's",
            "merged",
        )
    if any(entries[0].expert is not None for entries in found.values()) and config.parallel.expert_tensor > 1:
        own = [name for name in targets_of(spec) if name not in _of_experts(spec)]
        yield Violation(
            "parallel.expert_tensor",
            f"{config.parallel.expert_tensor} cuts every expert, and an expert's adapter is whole on its rank; without"
            f" adapters on experts `lora.targets: [{', '.join(own)}]`",
            "1",
        )


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

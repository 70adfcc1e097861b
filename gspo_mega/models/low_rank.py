"""Which matrices of a model get low-rank adapters (LoRA), and the adapters' own tensors under the names of PEFT.

For a matrix W [out, in] the adapter is A [rank, in] and B [out, rank]; the policy computes with W + (alpha / rank) B A.
Every Hugging Face matrix has its own A and B, also if Megatron fuses several matrices in one parameter. Each A is then
a parameter of its own, while the Bs lie in one parameter in the same order as the rows of the matrices. This module
moves no data and imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from gspo_mega.base.errors import ModelError
from gspo_mega.models.spec import ModelSpec
from gspo_mega.models.tensors import TensorEntry, hf_tensors

PREFIX = "base_model.model."
# The PEFT folder of a run's result, next to its Hugging Face folder.
ADAPTER_FOLDER = "adapter"
# The servers' name for the policy's adapters, if adapters are published.
SERVED_NAME = "policy"
_WEIGHT = ".weight"
# Megatron's names for the linear layers of a gated delta net.
_OF_DELTA_NETS = (".self_attention.in_proj.weight", ".self_attention.out_proj.weight")


def module_of(entry: TensorEntry) -> str:
    """The last name of the Hugging Face module that owns a matrix, as `lora.targets` and PEFT name it: `q_proj`."""
    return entry.name.split(".")[-2]


def targets_of(spec: ModelSpec) -> tuple[str, ...]:
    """The modules of this model that can have an adapter, in the order of the model."""
    return tuple(dict.fromkeys(module_of(entry) for entry in hf_tensors(spec) if _is_linear(entry)))


def is_of_linear_layer(parameter: str) -> bool:
    """Whether a parameter of this canonical name is of one of Megatron's linear layers, which may have adapters."""
    layer = parameter.rpartition(".")[0].rpartition(".")[2]
    return layer.startswith("linear_") or parameter.endswith(_OF_DELTA_NETS)


def _is_linear(entry: TensorEntry) -> bool:
    return entry.stage == "layer" and is_of_linear_layer(entry.parameter) and len(entry.shape) == 2


def adapted(spec: ModelSpec, targets: Sequence[str]) -> dict[str, list[TensorEntry]]:
    """The matrices with an adapter, by the parameter that owns them, in the order of the model. Without `targets` these
    are all linear layers.

    Raises ModelError for a target to which no matrix of the model belongs.
    """
    valid = targets_of(spec)
    if unknown := [name for name in targets if name not in valid]:
        raise ModelError(
            f"lora.targets: the model ({spec.family}) has no linear layer {', '.join(map(repr, unknown))}; valid:"
            f" {', '.join(valid)}"
        )
    chosen = set(targets or valid)
    found: dict[str, list[TensorEntry]] = {}
    for entry in hf_tensors(spec):
        if _is_linear(entry) and module_of(entry) in chosen:
            found.setdefault(entry.parameter, []).append(entry)
    return found


def half_name(entry: TensorEntry, half: Literal["A", "B"]) -> str:
    """PEFT's name of one half of a matrix's adapter."""
    return f"{PREFIX}{entry.name.removesuffix(_WEIGHT)}.lora_{half}.weight"


def half_parameter(parameter: str, half: Literal["A", "B"], role: str = "") -> str:
    """The canonical name of the parameter that holds one half of an adapter. `parameter`: that of the layer; `role`:
    the role of the matrix in it. Every A has a parameter of its own, and the Bs of fused matrices share one.
    """
    return f"{parameter.removesuffix(_WEIGHT)}." + (f"A.{role}" if half == "A" else "B")


def adapter_tensors(spec: ModelSpec, rank: int, targets: Sequence[str]) -> list[TensorEntry]:
    """Every tensor of the adapters, cut over ranks as the matrices are: the rows of B, or the columns of A."""
    found = []
    for entries in adapted(spec, targets).values():
        for entry in entries:
            rows, columns = entry.shape
            a = replace(
                entry,
                name=half_name(entry, "A"),
                shape=(rank, columns),
                parameter=half_parameter(entry.parameter, "A", entry.role),
                role="whole",
                sharding="columns" if entry.sharding == "columns" else "replicated",
                stack=None,
            )
            b = replace(
                entry,
                name=half_name(entry, "B"),
                shape=(rows, rank),
                parameter=half_parameter(entry.parameter, "B"),
                sharding="rows" if entry.sharding == "rows" else "replicated",
                stack=None,
            )
            found += [a, b]
    return found

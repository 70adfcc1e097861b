"""From a model chunk's own parameter names to canonical ones.

The chunk's names differ between layer specs (plain and Transformer Engine) and between layouts (local layer and expert
numbers). `models/tensors.py` declares the canonical names. This module imports nothing of Megatron, because tools that
convert checkpoints need only the names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from gspo_mega.base.errors import ModelError
from gspo_mega.models.spec import ModelSpec
from gspo_mega.models.tensors import TensorEntry, hf_tensors, parameter_shape

if TYPE_CHECKING:
    import torch

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_SEQUENTIAL_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12]\.(?:weight|bias))")
_GROUPED_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12]\.(?:weight|bias))(\d+)")
# Transformer Engine fuses a norm into the linear layer that follows it.
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
# Megatron's buffers that are weights of the model.
_BUFFER = ".router.expert_bias"
# Adapters are not weights of the model; `checkpoint/adapters.py` has their names.
ADAPTERS = "adapters."
# A critic's head, which starts at zero, is not a weight of the model either.
VALUE_HEAD = "value_head."


def table_by_parameter(spec: ModelSpec) -> dict[str, list[TensorEntry]]:
    """The tensors that each parameter fuses, by canonical name, in table order."""
    return by_parameter(hf_tensors(spec))


def by_parameter(entries: Iterable[TensorEntry]) -> dict[str, list[TensorEntry]]:
    """Tensors by the parameter that fuses them, in their order."""
    table: dict[str, list[TensorEntry]] = {}
    for entry in entries:
        table.setdefault(entry.parameter, []).append(entry)
    return table


def tensor_group(groups: Any, entry: TensorEntry) -> Any:
    """The `RankGroup` of `groups` (ParallelGroups) over which the tensor is sharded."""
    return groups.tensor if entry.expert is None else groups.expert_tensor


def replica_group(groups: Any, entry: TensorEntry) -> Any:
    """The `RankGroup` of `groups` (ParallelGroups) whose ranks all hold the same share of the tensor."""
    return groups.data_context if entry.expert is None else groups.expert_data


def canonical_parameters(spec: ModelSpec, groups: Any, chunks: Sequence[Any]) -> dict[str, torch.Tensor]:
    """This rank's parameters, and the buffers that are weights, by canonical name, checked against the family table.

    Each has this rank's local shape `parameter_shape(...)` and the model's dtype (buffers fp32). `groups` are the
    rank's ParallelGroups, `chunks` unwrapped GPT chunks whose layers know their global `layer_number` (from 1). Raises
    ModelError for a parameter that is in no table or has another shape than there, because its weights would be lost
    without notice.
    """
    table = table_by_parameter(spec)
    expected = {parameter: entries[0] for parameter, entries in table.items()}
    expected |= {copy: entries[0] for entries in table.values() for copy in entries[0].copies}
    found: dict[str, torch.Tensor] = {}
    for chunk in chunks:
        buffers = ((name, buffer) for name, buffer in chunk.named_buffers() if name.endswith(_BUFFER))
        for name, parameter in (*chunk.named_parameters(), *buffers):
            if name.startswith((ADAPTERS, VALUE_HEAD)):
                continue
            canonical = canonical_name(spec, groups, chunk, name)
            entry = expected.get(canonical)
            if entry is None:
                raise ModelError(
                    f"{spec.family}: the model has a parameter {name!r} ({canonical}) that is in no tensor table"
                )
            shape = parameter_shape(spec, entry, tensor_group(groups, entry).size)
            if tuple(parameter.shape) != shape:
                raise ModelError(
                    f"{spec.family}: parameter {name!r} has shape {tuple(parameter.shape)}; the tensor table says"
                    f" {shape}"
                )
            if canonical in found:
                raise ModelError(f"{spec.family}: two parameters of this rank are {canonical}; the second is {name!r}")
            found[canonical] = parameter
    return found


def canonical_name(spec: ModelSpec, groups: Any, chunk: Any, name: str) -> str:
    """The canonical name of what the chunk calls `name`; outside the layers it is the name itself."""
    in_layer = _LAYER.fullmatch(name)
    if in_layer is None:
        return name
    layers: Any = chunk.decoder.layers  # torch declares a list of plain modules, which have no number
    layer = layers[int(in_layer[1])].layer_number - 1
    rest = _FUSED_NORMS.get(in_layer[2], in_layer[2])
    local, linear = None, None
    if match := _SEQUENTIAL_EXPERT.fullmatch(rest):
        local, linear = int(match[1]), match[2]
    elif match := _GROUPED_EXPERT.fullmatch(rest):
        local, linear = int(match[2]), match[1]
    if local is not None and spec.moe is not None:
        expert = groups.expert.rank * (spec.moe.num_experts // groups.expert.size) + local
        rest = f"mlp.experts.{expert}.{linear}"
    return f"decoder.layers.{layer}.{rest}"

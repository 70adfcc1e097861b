"""Megatron's marks on parameters: how often a gradient counts in the norm, and where it is summed.

A mark is an attribute that Megatron's layers set, or forget: https://github.com/NVIDIA/Megatron-LM/issues/7452 (finding
8) and https://github.com/NVIDIA/Megatron-LM/pull/5916 are two that were forgotten. Here the family table decides, which
also says how a checkpoint is cut, so that a new family or layer cannot bring a mark of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from gspo_mega.base.errors import ModelError
from gspo_mega.engine.parameter_names import canonical_parameters, table_by_parameter
from gspo_mega.engine.process_groups import ParallelGroups
from gspo_mega.models.families import TensorEntry
from gspo_mega.models.spec import ModelSpec

if TYPE_CHECKING:
    from gspo_mega.engine.model import PolicyModel

_CUT_ALONG = {"rows": 0, "vocabulary": 0, "columns": 1}


def set_marks(spec: ModelSpec, groups: ParallelGroups, chunks: Sequence[PolicyModel]) -> None:
    """Mark every parameter of the model's own as its tensors are cut. Before data parallelism and the optimizer, which
    copy the marks.

    `tensor_model_parallel`: each rank of the tensor group (for an expert, of the expert-tensor group) has another part
    of it. `sequence_parallel`: it is whole on each of them and has seen that rank's positions, so that its gradient is
    a sum over them; an expert's is complete, because its rank has all tokens that chose it.

    Raises ModelError for a parameter that is in no table, or that Megatron reduces in a way that the table excludes.
    """
    table = table_by_parameter(spec)
    owners = {parameter: entries[0] for parameter, entries in table.items()}
    owners |= {copy: entries[0] for entries in table.values() for copy in entries[0].copies}
    sequence_parallel = chunks[0].config.sequence_parallel
    for name, parameter in canonical_parameters(spec, groups, chunks).items():
        if isinstance(parameter, nn.Parameter):
            _mark(name, parameter, owners[name], groups, sequence_parallel)


def _mark(name: str, parameter: Any, entry: TensorEntry, groups: ParallelGroups, sequence_parallel: bool) -> None:
    along = _CUT_ALONG.get(entry.sharding)
    parameter.tensor_model_parallel = along is not None
    parameter.partition_dim = -1 if along is None else along
    if not hasattr(parameter, "partition_stride"):
        parameter.partition_stride = 1
    parameter.sequence_parallel = sequence_parallel and along is None and entry.expert is None
    is_experts_own = entry.expert is not None and groups.expert.size > 1
    if getattr(parameter, "allreduce", True) == is_experts_own:
        raise ModelError(
            f"{name}: Megatron reduces its gradient {'over all data ranks' if is_experts_own else 'as an expert'}, and"
            f" the tensor table says that it is {'an expert' if is_experts_own else 'none'}"
        )
    if getattr(parameter, "average_gradients_across_tp_domain", False):
        raise ModelError(
            f"{name}: Megatron averages its gradient over the tensor group; no parameter of a known family is averaged"
        )

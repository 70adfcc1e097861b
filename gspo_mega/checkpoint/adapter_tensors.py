"""The adapters of a policy (`lora`) as whole tensors under PEFT's names, from and to any layout.

Owns the way between this rank's parts and the tensors; `adapter_folder.py` owns the files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from gspo_mega.checkpoint.gather import PolicyTensors
from gspo_mega.config.schema import Lora
from gspo_mega.engine.parameter_names import tensor_group
from gspo_mega.models.families import TensorEntry, parameter_blocks
from gspo_mega.models.low_rank import adapter_tensors
from gspo_mega.models.spec import ModelSpec

if TYPE_CHECKING:
    from gspo_mega.engine.model import PolicyModel
    from gspo_mega.engine.process_groups import ParallelGroups


class AdapterTensors(PolicyTensors):
    """Every A and B of the policy, spread over ranks as its weights are. Construction is collective."""

    def __init__(
        self,
        settings: Lora,
        spec: ModelSpec,
        groups: ParallelGroups,
        chunks: Sequence[PolicyModel],
        values: Callable[[nn.Parameter], torch.Tensor] | None = None,
    ) -> None:
        """`values`: what to gather instead of a parameter's values, as for `PolicyTensors`."""
        self._settings = settings
        super().__init__(spec, groups, chunks, values)

    def _find(self) -> dict[str, torch.Tensor]:
        return dict(_halves(self._chunks))

    def _table(self) -> dict[str, list[TensorEntry]]:
        return _by_parameter(self.spec, self._settings)


def fill_adapters(
    settings: Lora,
    spec: ModelSpec,
    groups: ParallelGroups,
    chunks: Sequence[PolicyModel],
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Set this rank's parts from whole tensors by PEFT's names, each of the shape that `adapter_tensors` gives it."""
    table = _by_parameter(spec, settings)
    with torch.no_grad():
        for name, parameter in _halves(chunks).items():
            parameter.zero_()
            for entry in table[name]:
                group = tensor_group(groups, entry)
                for block in parameter_blocks(spec, entry, group.size, group.rank):
                    values = tensors[entry.name].narrow(block.dim, block.start, block.length)
                    parameter.narrow(block.dim, block.local_start, block.length).copy_(values)


def _halves(chunks: Sequence[PolicyModel]) -> dict[str, nn.Parameter]:
    return {name: half for chunk in chunks for one in chunk.low_rank() for name, half in one.halves().items()}


def _by_parameter(spec: ModelSpec, settings: Lora) -> dict[str, list[TensorEntry]]:
    table: dict[str, list[TensorEntry]] = {}
    for entry in adapter_tensors(spec, settings.rank, settings.targets):
        table.setdefault(entry.parameter, []).append(entry)
    return table

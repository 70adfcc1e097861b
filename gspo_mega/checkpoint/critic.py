"""A critic as whole tensors, and its export to and import from Hugging Face folders, in any layout.

Two things differ from a policy: the table of tensors (`models/value_models.py`), and a head that a folder may lack. The
rest is in `gather.py`, `hf_export.py` and `hf_import.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from gspo_mega.base.errors import ModelError
from gspo_mega.checkpoint.gather import PolicyTensors
from gspo_mega.checkpoint.hf_export import export_policy
from gspo_mega.checkpoint.hf_folder import HuggingFaceFolder
from gspo_mega.checkpoint.hf_import import fill_from
from gspo_mega.checkpoint.quantized import plain_form
from gspo_mega.models.parameter_names import by_parameter, canonical_parameters
from gspo_mega.models.spec import ModelSpec
from gspo_mega.models.tensors import TensorEntry
from gspo_mega.models.value_models import (
    SCORE,
    SCORE_BIAS,
    VALUE_HEAD,
    critic_config_json,
    critic_tensors,
    is_ignored_critic_tensor,
    zero_bias,
)

if TYPE_CHECKING:
    from gspo_mega.engine.critic import ValueModel
    from gspo_mega.engine.model import PolicyModel
    from gspo_mega.engine.process_groups import ParallelGroups


def _parameters(
    spec: ModelSpec, groups: ParallelGroups, chunks: Sequence[PolicyModel], with_head: bool = True
) -> dict[str, torch.Tensor]:
    last = cast("ValueModel", chunks[-1])
    head = {VALUE_HEAD: last.value_weight()} if last.post_process and with_head else {}
    return canonical_parameters(spec, groups, chunks) | head


class CriticTensors(PolicyTensors):
    """Every weight of a critic, spread over the ranks as a policy's are. Construction is collective."""

    def _find(self) -> dict[str, torch.Tensor]:
        return _parameters(self.spec, self.groups, self._chunks)

    def _table(self) -> dict[str, list[TensorEntry]]:
        return by_parameter(critic_tensors(self.spec))


class _WrittenCritic(CriticTensors):
    """The tensors of an export: those of the critic, and a bias of zero for readers that need one."""

    def _table(self) -> dict[str, list[TensorEntry]]:
        table = super()._table()
        table[VALUE_HEAD] = [*table[VALUE_HEAD], zero_bias()]
        return table

    def _assemble(self, entry: TensorEntry, shares: list[torch.Tensor]) -> torch.Tensor:
        return shares[0].new_zeros(1) if entry.name == SCORE_BIAS else super()._assemble(entry, shares)

    def config_json(self, raw: dict[str, Any]) -> dict[str, Any]:
        """Return the config.json of a classifier."""
        return critic_config_json(raw)


def export_critic(
    out_dir: str | Path,
    spec: ModelSpec,
    groups: ParallelGroups,
    chunks: Sequence[PolicyModel],
    dtype: torch.dtype,
    source_folder: str | Path,
    weight_version: int,
) -> dict[str, Any]:
    """Write the critic in `chunks` (this rank's unwrapped chunks) to `out_dir`, as `export_policy` does for a policy.

    transformers loads the folder as a sequence or token classifier with one label. Returns the manifest; errors are
    those of `export_policy`. Collective.
    """
    critic = _WrittenCritic(spec, groups, chunks)
    return export_policy(critic, out_dir, plain_form(dtype), source_folder, weight_version)


def import_critic(folder: str | Path, spec: ModelSpec, groups: ParallelGroups, chunks: Sequence[PolicyModel]) -> None:
    """Fill the backbone in `chunks` from the folder of a policy, a critic or a reward model, as `import_huggingface`
    does.

    The head is filled if the folder has one, and otherwise stays as it is. Collective. Errors are those of
    `import_huggingface`; a head with a bias is a ModelError too, because a critic has none.
    """

    def wanted(source: HuggingFaceFolder) -> tuple[dict[str, torch.Tensor], list[TensorEntry]]:
        if SCORE_BIAS in source.files and source.read(SCORE_BIAS).any():
            raise ModelError(f"{SCORE_BIAS} is not zero; a critic's head has no bias")
        has_head = SCORE in source.files
        entries = [entry for entry in critic_tensors(spec) if has_head or entry.name != SCORE]
        return _parameters(spec, groups, chunks, has_head), entries

    fill_from(folder, spec, groups, wanted, is_ignored_critic_tensor)

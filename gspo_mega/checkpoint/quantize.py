"""A checkpoint of any format as a Hugging Face folder of FP8 blocks, streamed.

Owns what is refused before anything is written, and that no tensor is quantised that FP8 cannot stand for. The layout
is `models/block_fp8.py`'s, the rule `checkpoint/quantize_published.py`'s, writing and continuation are `convert.py`'s.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gspo_mega.base.errors import CheckpointError, ModelError
from gspo_mega.checkpoint.convert import FILE_BYTES, Progress, to_huggingface
from gspo_mega.checkpoint.quantize_published import PublishedForm, Rule
from gspo_mega.checkpoint.tensor_sources import TensorSource
from gspo_mega.models.block_fp8 import SERVED_BLOCK, is_quantizable
from gspo_mega.models.families import TensorEntry, hf_tensors
from gspo_mega.models.spec import BlockFp8, ModelSpec
from gspo_mega.models.stacked import is_stacked


def to_blocks(
    source: TensorSource,
    out: Path,
    *,
    rule: Rule,
    dtype: torch.dtype | None = None,
    progress: Progress,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write `source` to the new folder `out`, its linear layers as FP8 blocks with scales by `rule`.

    `dtype`: of tensors that stay plain, and the one from which the others are rounded to FP8; by default the one that
    config.json names. Raises ModelError for a source that is quantised already, CheckpointError, also for a weight that
    is not finite, and OSError. A staging folder may stay, and the same call continues from it.
    """
    if source.spec.stored is not None:
        raise ModelError(
            f"{source.description}: its weights are FP8 already; quantising them again would round twice. Make plain"
            " weights of it first (tools/megatron_to_hf.py) if you want other scales"
        )
    if is_stacked(source.spec):
        raise ModelError(
            f"{source.description}: the experts of {source.spec.family} are stacked in files, which FP8 blocks are not"
            " for; valid: leave it plain (tools/megatron_to_hf.py)"
        )
    plain = dtype or getattr(torch, source.spec.torch_dtype)
    form = PublishedForm(plain, plain, BlockFp8(SERVED_BLOCK, power_of_two=rule == "power_of_two"), rule)
    to_form(source, out, form, progress=progress, file_bytes=file_bytes, carries=True)


def to_form(
    source: TensorSource,
    out: Path,
    form: PublishedForm,
    *,
    progress: Progress,
    file_bytes: int = FILE_BYTES,
    carries: bool = False,
) -> None:
    """Write `source` to the new folder `out` in `form`; errors as of `to_blocks`. `carries`: as of `to_huggingface`."""
    if not any(is_quantizable(entry) for entry in hf_tensors(source.spec)):
        raise ModelError(f"{source.description}: the model has no linear layer to quantise")
    to_huggingface(_Finite(source), out, form=form, progress=progress, file_bytes=file_bytes, carries=carries)


class _Finite:
    """`source`, where a weight that is to be quantised and not finite is an error."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self.kind: str = source.kind
        self.spec: ModelSpec = source.spec
        self.description: Path = source.description
        self.files: list[Path] = source.files
        self.tensors: list[TensorEntry] = source.tensors
        self.written: list[TensorEntry] = source.written

    def carried(self) -> list[TensorEntry]:
        return self._source.carried()

    def config_json(self, raw: dict[str, Any]) -> dict[str, Any]:
        return self._source.config_json(raw)

    def dtype(self, entry: TensorEntry) -> torch.dtype:
        return self._source.dtype(entry)

    def read(self, entry: TensorEntry, dtype: torch.dtype | None = None) -> torch.Tensor:
        tensor = self._source.read(entry, dtype)
        if is_quantizable(entry) and not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(
                f"{entry.name}: has a value that is not finite, for which FP8 blocks have no representation"
            )
        return tensor

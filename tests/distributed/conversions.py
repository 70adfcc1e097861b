"""Conversions there and back, for the tests of the converter."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from gspo_mega.checkpoint.compare import differences
from gspo_mega.checkpoint.convert import to_huggingface, to_megatron
from gspo_mega.checkpoint.tensor_sources import open_checkpoint

FILE_BYTES = 60_000  # several files of several tensors


def quiet(done: int, total: int, name: str) -> None:
    assert 0 < done <= total


def there_and_back(folder: Path, out: Path, **options) -> tuple[Path, Path]:
    to_megatron(open_checkpoint(folder), out / "megatron", progress=quiet, file_bytes=FILE_BYTES, **options)
    to_huggingface(open_checkpoint(out / "megatron"), out / "back", progress=quiet, file_bytes=FILE_BYTES)
    return out / "megatron", out / "back"


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def found(one: Path, other: Path) -> list[str]:
    return list(differences(open_checkpoint(one), open_checkpoint(other), quiet))

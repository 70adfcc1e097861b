"""Stacked tensors of experts (`models/stacked.py`) as values: put together for files and servers, and read apart.

Owns the place of one expert's tensor in the stack, and the reading of folders that have stacks, plain or in MXFP4 as
gpt-oss is published.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from gspo_mega.algorithm.microscaling import dequantize_fp4
from gspo_mega.base.errors import ModelError
from gspo_mega.checkpoint.hf_folder import HuggingFaceFolder
from gspo_mega.models.families import TensorEntry, hf_tensors
from gspo_mega.models.spec import ModelSpec
from gspo_mega.models.stacked import stackings

BLOCKS, SCALES = "_blocks", "_scales"
_FP4_DTYPE = "U8"


def part_of(whole: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    """One expert's tensor [entry.shape] in its stack: a view."""
    assert entry.stack is not None and entry.expert is not None
    rows = whole[entry.expert][..., entry.stack.first :: entry.stack.step]
    return rows.t() if len(entry.shape) == 2 else rows


def stacked(
    spec: ModelSpec, tensors: Iterator[tuple[TensorEntry, torch.Tensor]]
) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
    """Tensors as files have them, from those of `hf_tensors` in its order: (entry, tensor [entry.shape]). The parts of
    a stack follow each other, and all of them or none are there.
    """
    wholes = {part.name: (whole, len(parts)) for whole, parts in stackings(hf_tensors(spec)) for part in parts}
    begun: torch.Tensor | None = None
    missing = 0
    for entry, tensor in tensors:
        if entry.stack is None:
            yield entry, tensor
            continue
        whole, count = wholes[entry.name]
        if begun is None:
            begun, missing = torch.empty(whole.shape, dtype=tensor.dtype, device=tensor.device), count
        part_of(begun, entry).copy_(tensor)
        missing -= 1
        if not missing:
            yield whole, begun
            begun = None


class StackedFolder(HuggingFaceFolder):
    """A folder of a model `spec` whose experts are stacked. `files` has the stacks; `read` takes the names of
    `hf_tensors`, too. Weights in MXFP4 read as float32, and `files` has them under their plain names.
    """

    def __init__(self, folder: str | Path, spec: ModelSpec) -> None:
        super().__init__(folder)
        self._parts: dict[str, TensorEntry] = {}
        self._packed: dict[str, tuple[int, ...]] = {}
        for whole, parts in stackings(hf_tensors(spec)):
            self._parts |= {part.name: part for part in parts if part.stack is not None}
            if spec.stored_fp4 and parts[0].stack is not None and len(whole.shape) == 3:
                self._packed[whole.name] = whole.shape
        self._stored_files = dict(self.files)
        for name in self._packed:
            file = self.files.pop(name + BLOCKS, None)
            self.files.pop(name + SCALES, None)
            if file is not None:
                self.files[name] = file

    @property
    def all_files(self) -> dict[str, str]:
        return self._stored_files

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._packed:
            return super().shape(name)
        experts, rows, runs, half = self._stored(name + BLOCKS).get_shape()
        return experts, runs * half * 2, rows

    def stored_dtype(self, name: str) -> str:
        return self._stored(name + BLOCKS).get_dtype() if name in self._packed else super().stored_dtype(name)

    def file_of(self, name: str) -> str:
        entry = self._parts.get(name)
        return self.files[name if entry is None or entry.stack is None else entry.stack.name]

    def type_problem(self, name: str) -> str | None:
        """As of a plain folder; the types of MXFP4 weights are `problems`' business."""
        return None if name in self._packed else super().type_problem(name)

    def problems(self, may_be_there: Callable[[str], bool]) -> list[str]:
        """What does not fit of MXFP4 weights: scales that are missing or of another shape, and other types."""
        found = []
        for name in self._packed:
            if name not in self.files:
                continue
            if name + SCALES not in self._stored_files:
                found.append(f"missing: {name}{SCALES}, the scales of {name}{BLOCKS}")
                continue
            blocks, scales = self._stored(name + BLOCKS), self._stored(name + SCALES)
            found += [
                f"wrong type: {name}{kind} is {part.get_dtype()}; MXFP4 is {_FP4_DTYPE}"
                for kind, part in ((BLOCKS, blocks), (SCALES, scales))
                if part.get_dtype() != _FP4_DTYPE
            ]
            if list(scales.get_shape()) != list(blocks.get_shape())[:3]:
                found.append(
                    f"wrong shape: {name}{SCALES} is {list(scales.get_shape())}, the blocks make it"
                    f" {list(blocks.get_shape())[:3]}"
                )
        return found

    def read(self, name: str, dim: int = 0, start: int = 0, length: int | None = None) -> torch.Tensor:
        """As of a plain folder, for the tensors of one expert, too."""
        entry = self._parts.get(name)
        if entry is None:
            return super().read(name, dim, start, length)
        whole = self._expert(entry)
        return whole if length is None and start == 0 else whole.narrow(dim, start, length or whole.shape[dim] - start)

    def _expert(self, entry: TensorEntry) -> torch.Tensor:
        stack, expert = entry.stack, entry.expert
        assert stack is not None and expert is not None
        if stack.name not in self._packed:
            rows = self._stored(stack.name)[expert : expert + 1][0][..., stack.first :: stack.step]
            return (rows.t() if len(entry.shape) == 2 else rows).contiguous()
        blocks, scales = (self._stored(stack.name + kind)[expert : expert + 1][0] for kind in (BLOCKS, SCALES))
        rows = slice(stack.first, None, stack.step)
        try:
            return dequantize_fp4(blocks[rows], scales[rows])
        except ValueError as error:
            raise ModelError(f"{stack.name}{SCALES}: expert {expert}: {error}") from error

    def _stored(self, name: str):
        return self._slice(name, self._stored_files.get(name))

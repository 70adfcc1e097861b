"""Reading a folder whose linear layers are FP8 blocks: their values, whole or in slices, as if they were plain.

Owns joining a weight with its scales, and the check that each has exactly its own. `models/block_fp8.py` owns names and
shapes, `gspo_mega.algorithm` the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from gspo_mega.algorithm.fp8 import dequantize_blocks
from gspo_mega.base.errors import ModelError
from gspo_mega.checkpoint.hf_folder import HuggingFaceFolder
from gspo_mega.checkpoint.stacked_tensors import StackedFolder
from gspo_mega.models.block_fp8 import SCALE_SUFFIX, is_quantizable, is_quantized, scale_name, scale_shape
from gspo_mega.models.families import hf_tensors
from gspo_mega.models.huggingface import read_stored
from gspo_mega.models.spec import BlockFp8, ModelSpec
from gspo_mega.models.stacked import is_stacked

# Qwen3-FP8 stores scales in bfloat16, DeepSeek-V3 in float32; the last is a power of two in one byte.
_SCALE_DTYPES = {"F32", "BF16", "F8_E8M0"}
_DATA_DTYPE = "F8_E4M3"


def open_folder(folder: str | Path, spec: ModelSpec) -> HuggingFaceFolder:
    """The folder's tensors as plain values, in whichever layout its config.json says it is. Raises ModelError."""
    if is_stacked(spec):
        return StackedFolder(folder, spec)
    stored = read_stored(folder)
    return HuggingFaceFolder(folder) if stored is None else BlockFolder(folder, spec, stored)


class BlockFolder(HuggingFaceFolder):
    """A folder of a model `spec` in the layout `stored`. `files` has the weights without their scales; a quantised
    weight reads as float32.
    """

    def __init__(self, folder: str | Path, spec: ModelSpec, stored: BlockFp8) -> None:
        super().__init__(folder)
        self._stored = stored
        entries = hf_tensors(spec)
        self._quantized = {entry.name: entry.shape for entry in entries if is_quantized(stored, entry)}
        self._listed = {entry.name for entry in entries if is_quantizable(entry)} - self._quantized.keys()
        self._own = {entry.name for entry in entries}
        self._scale_files = {name: file for name, file in self.files.items() if name.endswith(SCALE_SUFFIX)}
        self.files = {name: file for name, file in self.files.items() if name not in self._scale_files}

    @property
    def all_files(self) -> dict[str, str]:
        return self.files | self._scale_files

    def type_problem(self, name: str) -> str | None:
        """As of a plain folder; where FP8 is right, `problems` says."""
        return None if self.stored_dtype(name).startswith("F8") else super().type_problem(name)

    def problems(self, may_be_there: Callable[[str], bool]) -> list[str]:
        """What does not fit: scales that are missing, superfluous or of another shape; weights that are FP8 and should
        not be, or the other way round. Missing weights and their shapes are `check_names_and_shapes`'.
        """
        found = []
        for name in self.files:
            if name not in self._own:
                continue
            kind = self.stored_dtype(name)
            if name in self._quantized:
                found += (
                    [f"not quantised: {name} is {kind}, and config.json lists no such module in modules_to_not_convert"]
                    if kind != _DATA_DTYPE
                    else []
                )
                found += self._scale_problems(name)
            elif kind.startswith("F8"):
                why = "config.json's modules_to_not_convert lists it" if name in self._listed else "its kind is never"
                found.append(f"quantised: {name} is {kind}, and {why}{'' if name in self._listed else ' quantised'}")
        for name in self._scale_files:
            weight = name.removesuffix(SCALE_SUFFIX)
            if weight not in self._quantized and not may_be_there(weight):
                found.append(f"unexpected: {name}, scales of a tensor that is not quantised")
        return found

    def _scale_problems(self, name: str) -> list[str]:
        scales, shape = scale_name(name), list(scale_shape(self._quantized[name], self._stored.block))
        if scales not in self._scale_files:
            return [f"missing: {scales} {shape}, the scales of {name}"]
        part = self._scale_slice(scales)
        if (kind := part.get_dtype()) not in _SCALE_DTYPES:
            return [f"wrong type: {scales} is {kind}; scales are one of {', '.join(sorted(_SCALE_DTYPES))}"]
        if list(part.get_shape()) != shape:
            rows, columns = self._stored.block
            return [
                f"wrong shape: {scales} is {list(part.get_shape())}, blocks of {rows} x {columns} of {name} make it"
                f" {shape}"
            ]
        return []

    def _scale_slice(self, scales: str):
        return self._slice(scales, self._scale_files[scales])

    def read(self, name: str, dim: int = 0, start: int = 0, length: int | None = None) -> torch.Tensor:
        """As of a plain folder; a quantised weight is float32. Raises ModelError for scales that are no scales."""
        if name not in self._quantized:
            return super().read(name, dim, start, length)
        size = self._quantized[name][dim]
        stop, side = size if length is None else start + length, self._stored.block[dim]
        first, last = start // side, -(-stop // side)
        data = super().read(name, dim, first * side, min(last * side, size) - first * side)
        scales = read_scales(self._scale_slice(scale_name(name))[:], self._stored, scale_name(name))
        values = dequantize_blocks(data, scales.narrow(dim, first, last - first), self._stored.block)
        return values.narrow(dim, start - first * side, stop - start)


def read_scales(stored: torch.Tensor, layout: BlockFp8, name: str) -> torch.Tensor:
    """The scales in float32, of the stored shape, exactly. Raises ModelError if one is negative or not finite, or not a
    power of two where the layout says so; `name` is theirs.
    """
    scales = stored.float()
    if not bool((torch.isfinite(scales) & (scales >= 0)).all()):
        raise ModelError(f"{name}: has a scale that is negative or not finite")
    mantissas = torch.frexp(scales).mantissa
    if layout.power_of_two and not bool(((mantissas == 0.5) | (scales == 0)).all()):
        raise ModelError(
            f"{name}: has a scale that is not a power of two, as scale_fmt 'ue8m0' in config.json promises"
        )
    return scales

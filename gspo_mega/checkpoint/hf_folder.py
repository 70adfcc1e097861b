"""Reading a Hugging Face folder of safetensors: the file and shape of each tensor, and its values, whole or in slices.

`open_folder` chooses the reader by the model and its config.json. All three give plain values:

- `HuggingFaceFolder` reads a plain folder, a single file or sharded with an index. It knows nothing of models or ranks.
- `StackedFolder` reads a folder whose experts are stacked (`models/tensors.py`), plain or in MXFP4 as gpt-oss is
  published. `stacked` puts stacks together again, for files and servers.
- `BlockFolder` reads a folder whose linear layers are FP8 blocks. It joins each weight with its scales, and checks that
  every quantised weight, and no other, has scales. `models/block_fp8.py` knows names and shapes, `gspo_mega.algorithm`
  the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from gspo_mega.algorithm.fp8 import dequantize_blocks, dequantize_fp4
from gspo_mega.base.errors import ModelError
from gspo_mega.base.untrusted import open_regular, read_json_file
from gspo_mega.models.block_fp8 import SCALE_SUFFIX, is_quantizable, is_quantized, scale_name, scale_shape
from gspo_mega.models.huggingface import read_stored
from gspo_mega.models.spec import BlockFp8, ModelSpec
from gspo_mega.models.tensors import TensorEntry, hf_tensors, is_stacked, stackings

# The types that weights may have, by safetensors' names.
_FLOATS = ("BF16", "F16", "F32", "F64")
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
# MXFP4: the endings of a weight's names, and its type.
BLOCKS, SCALES = "_blocks", "_scales"
_FP4_DTYPE = "U8"
# Qwen3-FP8 stores scales in bfloat16, DeepSeek-V3 in float32. The last type is a power of two in one byte.
_SCALE_DTYPES = {"F32", "BF16", "F8_E8M0"}
_DATA_DTYPE = "F8_E4M3"


def open_folder(folder: str | Path, spec: ModelSpec) -> HuggingFaceFolder:
    """Open a folder in the layout that its config.json names. Its tensors are read as plain values. Raises
    ModelError.
    """
    if is_stacked(spec):
        return StackedFolder(folder, spec)
    stored = read_stored(folder)
    return HuggingFaceFolder(folder) if stored is None else BlockFolder(folder, spec, stored)


class HuggingFaceFolder:
    """The tensors of one folder. Files are opened on first use and memory-mapped, so a slice reads only its bytes."""

    def __init__(self, folder: str | Path) -> None:
        """Raises ModelError if there are no safetensors or the index cannot be read."""
        self.path = Path(folder)
        self._open: dict[str, safe_open] = {}
        index = self.path / INDEX_NAME
        if index.is_file():
            self.files: dict[str, str] = _weight_map(index)
        elif (self.path / SINGLE_NAME).is_file():
            self.files = dict.fromkeys(self._file(SINGLE_NAME).keys(), SINGLE_NAME)
        else:
            raise ModelError(
                f"{self.path}: has neither {INDEX_NAME} nor {SINGLE_NAME}; only safetensors checkpoints are supported"
            )

    @property
    def all_files(self) -> dict[str, str]:
        """{tensor: file} of everything that is stored: the tensors of `files` and the ones that they are made from."""
        return self.files

    def __enter__(self) -> HuggingFaceFolder:
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.clear()

    def _file(self, name: str) -> safe_open:
        if name not in self._open:
            try:
                open_regular(self.path / name).close()  # the library itself would wait for ever on a pipe
                self._open[name] = safe_open(self.path / name, framework="pt")
            except (OSError, ValueError, SafetensorError) as error:
                raise ModelError(f"{self.path / name}: cannot be read as safetensors: {error}") from error
        return self._open[name]

    def problems(self, may_be_there: Callable[[str], bool]) -> list[str]:
        """Return what is wrong with how the folder stores its tensors. `may_be_there` is true for names to ignore."""
        return []

    def file_of(self, name: str) -> str:
        """Return the name of the file that a tensor which can be `read` comes from."""
        return self.files[name]

    def type_problem(self, name: str) -> str | None:
        """Return what is wrong with the type in which a tensor is stored, or None. Raises ModelError as `shape`
        does.
        """
        kind = self.stored_dtype(name)
        if kind in _FLOATS:
            return None
        return f"wrong type: {name} is {kind}; weights are one of {', '.join(_FLOATS)}"

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor that the index names. Raises ModelError if its file lacks it."""
        return tuple(self._slice(name).get_shape())

    def stored_dtype(self, name: str) -> str:
        """Return the name of a tensor's dtype in its file (`BF16`, `F8_E4M3`). Raises ModelError as `shape` does."""
        return self._slice(name).get_dtype()

    def _slice(self, name: str, file: str | None = None):
        file = self.files[name] if file is None else file
        try:
            return self._file(file).get_slice(name)
        except SafetensorError as error:
            raise ModelError(
                f"{self.path / file}: the index names {name!r} there, the file lacks it ({error})"
            ) from error

    def read(self, name: str, dim: int = 0, start: int = 0, length: int | None = None) -> torch.Tensor:
        """Return the slice [start, start + length) along `dim` (0 or 1) of a whole stored tensor, or without `length`
        all of it.

        The result has the tensor's shape except in `dim`, and the file's dtype. It is on the host and local to this
        rank.
        """
        part = self._slice(name)
        stop = part.get_shape()[dim] if length is None else start + length
        return part[start:stop] if dim == 0 else part[:, start:stop]


def _weight_map(index: Path) -> dict[str, str]:
    """Return {tensor: file in the folder of the index}. Raises ModelError for other paths, which a downloaded folder
    may name.
    """
    try:
        found = read_json_file(index)["weight_map"]
        if not isinstance(found, dict):
            raise TypeError(f"weight_map is of the type {type(found).__name__}")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(
            f"{index}: not an index of safetensors files ({type(error).__name__}: {error}); it needs a 'weight_map'"
        ) from error
    for tensor, file in found.items():
        if not isinstance(file, str) or file in ("", ".", "..") or "/" in file or "\0" in file:
            raise ModelError(
                f"{index}: weight_map: {tensor!r} has the file {file!r}; it must be the name of a file beside the index"
            )
    return found


def check_names_and_shapes(
    folder: HuggingFaceFolder, shapes: dict[str, tuple[int, ...]], may_be_there: Callable[[str], bool]
) -> list[str]:
    """Return the folder's problems for a model with these tensors: names that are missing or unexpected, tensors of
    another shape or type, and the folder's own `problems`.

    `may_be_there` is true for names to ignore.
    """
    problems = [f"missing: {name} {list(shape)}" for name, shape in shapes.items() if name not in folder.files]
    for name in folder.files:
        if name not in shapes:
            if not may_be_there(name):
                problems.append(f"unexpected: {name}")
            continue
        try:
            found = folder.shape(name)
        except ModelError as error:
            problems.append(str(error))
            continue
        if found != shapes[name]:
            problems.append(f"wrong shape: {name} is {list(found)}, config.json makes it {list(shapes[name])}")
        if (wrong := folder.type_problem(name)) is not None:
            problems.append(wrong)
    return problems + folder.problems(may_be_there)


def not_finite(values: torch.Tensor, name: str, file: str) -> str | None:
    """Return the problem of the stored tensor `name` in `file` if one of its `values` is NaN or infinite, else None.

    `values` has any shape and floating dtype, and is the whole tensor or a part of it.
    """
    if values.numel() == 0 or all(bool(torch.isfinite(end)) for end in torch.aminmax(values)):  # NaN is both ends
        return None
    kinds = [kind for kind, found in (("NaN", torch.isnan(values)), ("infinite", torch.isinf(values))) if found.any()]
    return f"not finite: {name} in {file} holds values that are {' and '.join(kinds)}"


def part_of(whole: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    """Return one expert's tensor [entry.shape] as a view of its stack."""
    assert entry.expert is not None
    return _part_of_expert(whole[entry.expert], entry)


def _part_of_expert(own: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    """Return the tensor [entry.shape] as a view of what its stack has for its expert."""
    stack, rows = entry.stack, entry.shape[0]
    assert stack is not None
    if stack.transposed and len(entry.shape) == 2:
        own = own.t()
    return own[stack.first :: stack.step] if stack.in_turn else own[stack.first * rows : (stack.first + 1) * rows]


def stacked(
    spec: ModelSpec, tensors: Iterator[tuple[TensorEntry, torch.Tensor]]
) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
    """Yield tensors as files have them, (entry, tensor [entry.shape]), from those of `hf_tensors` in its order.

    The parts of a stack follow each other, and all of them or none are there.
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
    """A folder of a model `spec` whose experts are stacked.

    `files` has the stacks, and `read` also accepts the names of `hf_tensors`. Weights in MXFP4 are read as float32, and
    `files` has them under their plain names.
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
        """The same as for a plain folder, except that `problems` checks the types of MXFP4 weights."""
        return None if name in self._packed else super().type_problem(name)

    def problems(self, may_be_there: Callable[[str], bool]) -> list[str]:
        """Return what is wrong with MXFP4 weights: scales that are missing or have another shape, and other types."""
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
        """The same as for a plain folder, and also for the tensors of one expert."""
        entry = self._parts.get(name)
        if entry is None:
            return super().read(name, dim, start, length)
        whole = self._expert(entry)
        return whole if length is None and start == 0 else whole.narrow(dim, start, length or whole.shape[dim] - start)

    def _expert(self, entry: TensorEntry) -> torch.Tensor:
        stack, expert = entry.stack, entry.expert
        assert stack is not None and expert is not None
        if stack.name not in self._packed:
            return _part_of_expert(self._stored(stack.name)[expert : expert + 1][0], entry).contiguous()
        blocks, scales = (self._stored(stack.name + kind)[expert : expert + 1][0] for kind in (BLOCKS, SCALES))
        rows = slice(stack.first, None, stack.step)
        try:
            return dequantize_fp4(blocks[rows], scales[rows])
        except ValueError as error:
            raise ModelError(f"{stack.name}{SCALES}: expert {expert}: {error}") from error

    def _stored(self, name: str):
        return self._slice(name, self._stored_files.get(name))


class BlockFolder(HuggingFaceFolder):
    """A folder of a model `spec` in the layout `stored`.

    `files` has the weights without their scales. A quantised weight is read as float32.
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
        """The same as for a plain folder, except that `problems` checks where FP8 is right."""
        return None if self.stored_dtype(name).startswith("F8") else super().type_problem(name)

    def problems(self, may_be_there: Callable[[str], bool]) -> list[str]:
        """Return what does not fit: scales that are missing, superfluous or of another shape, and weights that are FP8
        and should not be, or the other way round. `check_names_and_shapes` finds missing weights and wrong shapes.
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
        """The same as for a plain folder. A quantised weight is float32. Raises ModelError for impossible scales."""
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
    """Return the scales exactly, in float32 and the stored shape. `name` is their name, for errors.

    Raises ModelError if one is negative or not finite, or if the layout says powers of two and one is not.
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

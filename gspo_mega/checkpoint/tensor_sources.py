"""A checkpoint of any format, read as Hugging Face tensors one at a time, for conversion and comparison.

`open_checkpoint` accepts a Hugging Face folder of safetensors, a converted folder or a run's `checkpoints/step_N` with
Megatron's files under `megatron/`, or a bare Megatron `torch_dist` folder that a separate Hugging Face folder
describes. A critic is recognised by its value head in Megatron's files (`checkpoints/step_N/critic`), and by its class
in config.json.

The last part reads and writes safetensors files with plain reads and writes, so that only one tensor at a time is in
memory. The format's own library memory-maps a file for reading, whose pages then count as this process's memory, and
needs all tensors of a file at once for writing. A file has 8 bytes of header length (little-endian), a JSON header, and
the tensors' bytes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from gspo_mega.algorithm.fp8 import dequantize_blocks
from gspo_mega.base.errors import CheckpointError, ModelError
from gspo_mega.base.near_paths import did_you_mean
from gspo_mega.base.untrusted import open_regular
from gspo_mega.checkpoint.hf_export import tensor_bytes
from gspo_mega.checkpoint.hf_folder import (
    INDEX_NAME,
    SINGLE_NAME,
    check_names_and_shapes,
    open_folder,
    part_of,
    read_scales,
)
from gspo_mega.checkpoint.mtp_layers import CarriedLayers, is_carried
from gspo_mega.checkpoint.torch_dist import TorchDistFolder, stored_place
from gspo_mega.models.block_fp8 import is_quantized, scale_name
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.models.spec import ModelSpec
from gspo_mega.models.tensors import (
    TensorEntry,
    as_stored,
    hf_tensors,
    is_ignored_tensor,
    parameter_blocks,
    parameter_shape,
    stackings,
)
from gspo_mega.models.value_models import (
    SCORE_BIAS,
    VALUE_HEAD,
    critic_config_json,
    critic_tensors,
    is_classifier,
    is_ignored_critic_tensor,
    read_critic_spec,
    zero_bias,
)

MEGATRON_FOLDER = "megatron"
_HEAD = "lm_head.weight"
_MOST_PROBLEMS = 20

# The names of dtypes in safetensors files.
DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LENGTH_BYTES = 8
_LONGEST_HEADER = 100_000_000  # the limit of the format's own library


class TensorSource(Protocol):
    """The tensors of one checkpoint, read in a single process.

    `description` is the folder with config.json and tokenizer, and `files` are the files with the weights. `tensors`
    are the checkpoint's tensors in table order. `written` are these and what its Hugging Face folder has in addition.
    """

    kind: str
    spec: ModelSpec
    description: Path
    files: list[Path]
    tensors: list[TensorEntry]
    written: list[TensorEntry]

    def carried(self) -> list[TensorEntry]:
        """Return the tensors of layers for multi-token prediction that the description has. Raises ModelError."""
        ...

    def config_json(self, raw: dict[str, Any]) -> dict[str, Any]:
        """Return the config.json of a folder made from this checkpoint, from the description's, without those
        layers.
        """
        ...

    def dtype(self, entry: TensorEntry) -> torch.dtype:
        """Return the stored dtype, or for quantised tensors the one that config.json names."""
        ...

    def read(self, entry: TensorEntry, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the whole tensor with the shape `entry.shape`, on the host, in `dtype` or by default `dtype(entry)`.

        It is rounded once. Raises CheckpointError.
        """
        ...


def open_checkpoint(folder: Path, description: Path | None = None) -> TensorSource:
    """Open the checkpoint in `folder` and check all names and shapes.

    `description` is the Hugging Face folder that describes it, if `folder` has no config.json. Raises CheckpointError
    or ModelError, listing tensors that are missing or of another shape.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder{did_you_mean(folder)}")
    megatron = next(
        (
            f
            for f in (folder / MEGATRON_FOLDER, folder)
            if (f / "metadata.json").is_file() and (f / ".metadata").is_file()
        ),
        None,
    )
    if megatron is not None:
        return MegatronSource(
            megatron, folder if description is None and (folder / "config.json").is_file() else description
        )
    if (folder / INDEX_NAME).is_file() or (folder / SINGLE_NAME).is_file():
        return HuggingFaceSource(folder)
    raise CheckpointError(
        f"{folder}: no checkpoint; it has neither safetensors ({SINGLE_NAME}, {INDEX_NAME}) nor Megatron's .metadata"
    )


class _Model:
    """The part that both sources share: which tensors a policy or a critic has."""

    description: Path
    tensors: list[TensorEntry]
    written: list[TensorEntry]
    _stacks: dict[str, tuple[TensorEntry, ...]]
    is_critic = False
    _layers: CarriedLayers | None = None

    def carried(self) -> list[TensorEntry]:
        """As in the protocol; a critic has none."""
        if self.is_critic:
            return []
        return self._carried_layers().entries

    def _carried_layers(self) -> CarriedLayers:
        self._layers = self._layers or CarriedLayers(self.description)
        return self._layers

    def _set_tensors(self, spec: ModelSpec, is_critic: bool) -> None:
        self.is_critic = is_critic
        self.tensors = critic_tensors(spec) if is_critic else hf_tensors(spec)
        stored = list(stackings(self.tensors))
        self._stacks = {whole.name: parts for whole, parts in stored if parts[0].stack is not None}
        self.written = [whole for whole, _ in stored] + ([zero_bias()] if is_critic else [])

    def config_json(self, raw: dict[str, Any]) -> dict[str, Any]:
        """As in the protocol."""
        return critic_config_json(raw) if self.is_critic else raw

    def _stacked(self, entry: TensorEntry, dtype: torch.dtype, read: Callable[[TensorEntry], torch.Tensor]):
        """Return the stack of all experts, put together from its parts."""
        whole = torch.empty(entry.shape, dtype=dtype)
        for part in self._stacks[entry.name]:
            part_of(whole, part).copy_(read(part))
        return whole


class HuggingFaceSource(_Model):
    """A Hugging Face folder. FP8 blocks are read as plain values in the dtype that config.json names.

    Raises ModelError if config.json and the tensors disagree.
    """

    kind = "Hugging Face safetensors"

    def __init__(self, folder: Path) -> None:
        self.spec = read_critic_spec(folder)
        self.description = folder
        self._set_tensors(self.spec, is_classifier(folder))
        shapes = {entry.name: entry.shape for entry in as_stored(self.tensors)}
        is_allowed = is_ignored_critic_tensor if self.is_critic else is_ignored_tensor
        with open_folder(folder, self.spec) as names:
            problems = check_names_and_shapes(names, shapes, lambda name: is_allowed(self.spec, name))
            _refuse(problems, ModelError, f"{folder} does not hold a {self.spec.family} of its config.json")
            self._file_of = dict(names.all_files)
        self._of_stacks = open_folder(folder, self.spec) if self._stacks else None
        self.files = [folder / name for name in sorted(set(self._file_of.values()))]
        self._open = {file.name: SafetensorsFile(file, self.spec.stored_fp4) for file in self.files}
        if self.spec.tie_word_embeddings and _HEAD in self._file_of:
            embedding = next(entry for entry in hf_tensors(self.spec) if entry.copies)
            if not torch.equal(self.read(embedding), self._read(_HEAD)):
                raise ModelError(
                    f"{folder}: config.json ties the embeddings, but {_HEAD} differs from them; set tie_word_embeddings"
                    " to false there"
                )
        if SCORE_BIAS in self._file_of and self._read(SCORE_BIAS).any():
            raise ModelError(f"{folder}: {SCORE_BIAS} is not zero; a critic's head has no bias")

    def dtype(self, entry: TensorEntry) -> torch.dtype:
        if is_carried(entry):
            return self._carried_layers().dtype(entry)
        if entry.name == SCORE_BIAS:
            return self.dtype(self.tensors[-1])
        if is_quantized(self.spec.stored, entry):
            return getattr(torch, self.spec.torch_dtype)
        if self._of_stacks is not None and (entry.stack is not None or entry.name in self._stacks):
            name = entry.name if entry.stack is None else entry.stack.name
            if name not in self._file_of:  # MXFP4
                return getattr(torch, self.spec.torch_dtype)
            return self._open[self._file_of[name]].tensors[name].dtype
        return self._open[self._file_of[entry.name]].tensors[entry.name].dtype

    def stored(self) -> dict[str, Placed]:
        """Return every tensor of the files as it is stored, by name, including quantised values and their scales."""
        return {name: self._open[file].tensors[name] for name, file in self._file_of.items()}

    def read(self, entry: TensorEntry, dtype: torch.dtype | None = None) -> torch.Tensor:
        """As in the protocol."""
        dtype = dtype or self.dtype(entry)
        if is_carried(entry):
            return self._carried_layers().read(entry).to(dtype)
        if entry.name == SCORE_BIAS:
            return torch.zeros(entry.shape, dtype=dtype)
        if self._of_stacks is not None:
            if entry.stack is not None:
                return self._of_stacks.read(entry.name).to(dtype)
            if entry.name in self._stacks and entry.name not in self._file_of:
                return self._stacked(entry, dtype, lambda part: self.read(part, dtype))
        if self.spec.stored is None or not is_quantized(self.spec.stored, entry):
            return self._read(entry.name).to(dtype)
        scales = scale_name(entry.name)
        values = read_scales(self._read(scales), self.spec.stored, scales)
        return dequantize_blocks(self._read(entry.name), values, self.spec.stored.block).to(dtype)

    def _read(self, name: str) -> torch.Tensor:
        return self._open[self._file_of[name]].read(name)


class MegatronSource(_Model):
    """Megatron's `torch_dist` files, written by any layout. Optimizer state is ignored."""

    kind = "Megatron torch_dist"

    def __init__(self, folder: Path, description: Path | None) -> None:
        if description is None:
            raise CheckpointError(
                f"{folder}: has no config.json; name the Hugging Face folder that the model came from"
            )
        self._folder = TorchDistFolder(folder)
        is_critic = VALUE_HEAD in self._folder.tensors
        self.spec = read_critic_spec(description) if is_critic else read_model_spec(description)
        self.description = description
        self._set_tensors(self.spec, is_critic)
        if any(key.startswith("adapters.") for key in self._folder.tensors):
            raise CheckpointError(
                f"{folder} holds the adapters of a run with `lora`, and none of the model's own weights. The run's `hf`"
                " has both merged, as a Hugging Face folder, and `adapter` the adapters, as a PEFT folder"
            )
        problems = []
        for entry in self.tensors:
            place = stored_place(self.spec, entry.parameter)
            want, found = parameter_shape(self.spec, entry, 1), self._folder.shape(place)
            if found is None:
                key = self._folder.find(place)
                stored = f"; {key} is {list(self._folder.tensors[key].size)}" if key else ""
                problems.append(f"missing: {entry.parameter}{stored}")
            # Megatron pads the vocabulary by its own settings.
            elif found[1:] != want[1:] or (
                found[0] < entry.shape[0] if entry.sharding == "vocabulary" else found != want
            ):
                problems.append(f"wrong shape: {entry.parameter} is {list(found)}, config.json makes it {list(want)}")
        _refuse(
            list(dict.fromkeys(problems)),
            CheckpointError,
            f"{folder} does not hold the {self.spec.family} of {description}",
        )
        self.files = sorted(folder.glob("*.distcp"))
        self._last: tuple[str, torch.Tensor] | None = None

    def dtype(self, entry: TensorEntry) -> torch.dtype:
        if is_carried(entry):
            return self._carried_layers().dtype(entry)
        return self._folder.dtype(stored_place(self.spec, entry.parameter))

    def read(self, entry: TensorEntry, dtype: torch.dtype | None = None) -> torch.Tensor:
        """As in the protocol. The tensor may share memory with one that is read later."""
        if is_carried(entry):
            return self._carried_layers().read(entry).to(dtype or self.dtype(entry))
        if entry.name == SCORE_BIAS:
            return torch.zeros(entry.shape, dtype=dtype or self.dtype(entry))
        if entry.name in self._stacks:
            return self._stacked(entry, dtype or self.dtype(entry), self.read)
        # Tensors of one parameter follow each other, so the parameter is read once for all of them.
        if self._last is None or self._last[0] != entry.parameter:
            self._last = None  # frees its memory before the next one is read
            self._last = entry.parameter, self._folder.read(stored_place(self.spec, entry.parameter))
        parameter = self._last[1]
        blocks = parameter_blocks(self.spec, entry, 1, 0)
        parts = [parameter.narrow(b.dim, b.local_start, b.length) for b in blocks]
        # On a single rank the blocks of a tensor are in the tensor's own order.
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim=blocks[0].dim)
        return whole if dtype is None else whole.to(dtype)


def _refuse(problems: list[str], error: type[Exception], title: str) -> None:
    if problems:
        more = [f"... and {len(problems) - _MOST_PROBLEMS} more"] if len(problems) > _MOST_PROBLEMS else []
        raise error("\n  ".join([f"{title}:", *problems[:_MOST_PROBLEMS], *more]))


@dataclass(frozen=True)
class Placed:
    """A tensor in a file. `start` and `end` are byte positions in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsFile:
    """One file with its header. Tensors are read on request. Raises CheckpointError for another format or a cut file.

    `packed`: some tensors are bytes with several elements in each, and `read` returns them as bytes.
    """

    def __init__(self, path: Path, packed: bool = False) -> None:
        self.path = path
        self._dtypes = DTYPES | ({"U8": torch.uint8} if packed else {})
        try:
            with open_regular(path) as file:
                size = os.fstat(file.fileno()).st_size
                length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
                if not 0 < length <= min(size - _LENGTH_BYTES, _LONGEST_HEADER):
                    raise CheckpointError(
                        f"{path}: not a safetensors file: a header of {length} bytes in a file of {size}"
                    )
                header = json.loads(file.read(length))
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: cannot be read as safetensors: {type(error).__name__}: {error}") from error
        if not isinstance(header, dict):
            raise CheckpointError(f"{path}: cannot be read as safetensors: its header is not a JSON object")
        self.tensors = {
            name: self._placed(name, described, _LENGTH_BYTES + length)
            for name, described in header.items()
            if name != "__metadata__"
        }
        end = max((t.end for t in self.tensors.values()), default=0)
        if end > size:
            raise CheckpointError(f"{path}: cut short: it has {size} bytes, and its header names {end}")

    def _placed(self, name: str, described: Any, base: int) -> Placed:
        where = f"{self.path}: the header of {name!r}"
        if not isinstance(described, dict) or not {"dtype", "shape", "data_offsets"} <= described.keys():
            raise CheckpointError(f"{where}: it must have dtype, shape and data_offsets")
        kind, shape, offsets = described["dtype"], described["shape"], described["data_offsets"]
        if not isinstance(kind, str) or kind not in self._dtypes:
            raise CheckpointError(f"{where}: dtype {kind!r} is not supported; supported: {', '.join(self._dtypes)}")
        if not _are_sizes(shape):
            raise CheckpointError(f"{where}: shape is {shape!r}; it must be a list of sizes")
        if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise CheckpointError(f"{where}: data_offsets is {offsets!r}; it must be the start and the end in bytes")
        placed = Placed(self._dtypes[kind], tuple(shape), base + offsets[0], base + offsets[1])
        if math.prod(shape) * placed.dtype.itemsize != placed.end - placed.start:
            raise CheckpointError(
                f"{where}: {kind} of shape {shape} does not fill the {placed.end - placed.start} bytes that"
                " data_offsets give it"
            )
        return placed

    def read(self, name: str) -> torch.Tensor:
        """Return the whole tensor in the file's shape and dtype, on the host. Raises CheckpointError."""
        placed = self.tensors[name]
        flat = torch.empty(placed.end - placed.start, dtype=torch.uint8)
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(placed.start)
                _read_into(file, flat.numpy().data)
        except (OSError, EOFError) as error:
            raise CheckpointError(f"{self.path}: {name} cannot be read: {error}") from error
        return flat.view(placed.dtype).reshape(placed.shape)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _read_into(file, target: memoryview) -> None:
    while target:
        count = file.readinto(target)
        if not count:
            raise EOFError("the file ends early")
        target = target[count:]


def write_safetensors(
    path: Path, described: dict[str, tuple[torch.dtype, tuple[int, ...]]], tensors: Iterator[torch.Tensor]
) -> None:
    """Write a file of whole tensors. It is on the disk on return.

    `described` has their dtype and shape by name; `tensors` yields them in that order, local to this process. Raises
    CheckpointError for a tensor that differs from its description, and OSError.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, (dtype, shape) in described.items():
        size = torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that tensors begin aligned
    with path.open("wb") as file:
        file.write(len(text).to_bytes(_LENGTH_BYTES, "little"))
        file.write(text)
        for (name, (dtype, shape)), tensor in zip(described.items(), tensors, strict=True):
            if tensor.dtype != dtype or tuple(tensor.shape) != shape:
                raise CheckpointError(
                    f"{path}: {name} is {tensor.dtype} {list(tensor.shape)}, not {dtype} {list(shape)} as described"
                )
            file.write(tensor_bytes(tensor))
        file.flush()
        os.fsync(file.fileno())

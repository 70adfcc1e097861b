"""Megatron's `torch_dist` checkpoint format without Megatron's models or ranks: names, files, one parameter at a time.

If layers are alike, a stored tensor holds a parameter of all layers (and experts), stacked in the first dimensions:
`decoder.layers.mlp.linear_fc1.weight` is [layers, rows, columns], cut into chunks of any size. Megatron reads it into
any tensor, pipeline and expert layout. `stored_place` gives the place of a canonical parameter in it;
`models/tensors.py` knows how tensors are fused into parameters.

The format's index (`.metadata`) is a pickle. `safe_pickle.py` reads it without running code.
"""

from __future__ import annotations

import io
import itertools
import math
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from gspo_mega.base import atomic_io
from gspo_mega.base.errors import CheckpointError
from gspo_mega.base.run_folder import atomic_write_json
from gspo_mega.base.untrusted import open_regular
from gspo_mega.checkpoint.safe_pickle import FORMAT, read_index
from gspo_mega.models.families import FAMILIES
from gspo_mega.models.spec import ModelSpec

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(.+)")
_STACK = "decoder.layers."
# Transformer Engine stores a norm inside the linear layer after it, and stored names follow that. The exception is the
# norm before experts, where only models without Transformer Engine use that name. A checkpoint written here has both
# names for a norm before experts.
_NORMS = {
    "input_layernorm.weight": ("self_attention.linear_qkv.layer_norm_weight",),
    "pre_mlp_layernorm.weight": ("mlp.linear_fc1.layer_norm_weight",),
}
_BOTH_NORMS = ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")


@dataclass(frozen=True)
class StoredPlace:
    """The place of a parameter: in the tensors `keys` (any of them for reading, all for writing), at `index` of the
    stacked dimensions, which have the sizes `stack`.
    """

    keys: tuple[str, ...]
    index: tuple[int, ...]
    stack: tuple[int, ...]


def stored_place(spec: ModelSpec, parameter: str) -> StoredPlace:
    """Return the place of a parameter with a canonical name (`decoder.layers.3.mlp.experts.5.linear_fc1.weight`)."""
    if spec.delta is not None or FAMILIES[spec.family].text_part:
        kept = "the projections of a gated delta net in parts" if spec.delta is not None else "no vision tower"
        raise CheckpointError(
            f"{spec.family}: Megatron's files keep {kept}, and a conversion to or from them has not been written; a"
            " run's own checkpoints and its `hf` are not affected"
        )
    in_layer = _LAYER.fullmatch(parameter)
    if in_layer is None:
        return StoredPlace((parameter,), (), ())
    layer, rest = int(in_layer[1]), in_layer[2]
    # If layers differ (dense ones before those with experts), each is stored under its number. Otherwise they are
    # stacked.
    layers_differ = spec.moe is not None and spec.moe.num_dense_layers > 0
    prefix, index, stack = (f"{_STACK}{layer}.", (), ()) if layers_differ else (_STACK, (layer,), (spec.num_layers,))
    if spec.moe is not None and (expert := _EXPERT.fullmatch(rest)):
        return StoredPlace(
            (f"{prefix}mlp.experts.experts.{expert[2]}",), (*index, int(expert[1])), (*stack, spec.moe.num_experts)
        )
    return StoredPlace(tuple(prefix + name for name in _stored_names(spec, layer, rest)), index, stack)


def _stored_names(spec: ModelSpec, layer: int, name: str) -> tuple[str, ...]:
    if spec.latent is not None:  # Transformer Engine fuses only the norm before a dense MLP there
        return _BOTH_NORMS if name == "pre_mlp_layernorm.weight" and not spec.has_experts(layer) else (name,)
    if spec.moe is not None and name == "pre_mlp_layernorm.weight":
        return _BOTH_NORMS
    return _NORMS.get(name, (name,))


@dataclass(frozen=True)
class WrittenChunk:
    """A chunk in a file: the part of shape `sizes` at `offsets` of the stored tensor `key`, whose global shape is
    `size`.
    """

    key: str
    size: list[int]
    dtype: str
    offsets: list[int]
    sizes: list[int]
    file: str
    start: int
    length: int


def write_chunks(path: Path, spec: ModelSpec, parameters: Iterator[tuple[str, torch.Tensor]]) -> list[dict[str, Any]]:
    """Write parameters to one file, which is on the disk on return.

    parameters: (canonical name, whole tensor of the shape on a single rank, any dtype), local to this process. Returns
    the chunks as JSON values for `write_index`. Raises OSError.
    """
    written: list[dict[str, Any]] = []
    with path.open("wb") as file:
        for parameter, tensor in parameters:
            place = stored_place(spec, parameter)
            shape = list(tensor.shape)
            for key in place.keys:
                start = file.tell()
                torch.save(tensor.reshape(*[1] * len(place.stack), *shape), file)
                chunk = WrittenChunk(
                    key,
                    [*place.stack, *shape],
                    str(tensor.dtype).removeprefix("torch."),
                    [*place.index, *[0] * len(shape)],
                    [*[1] * len(place.stack), *shape],
                    path.name,
                    start,
                    file.tell() - start,
                )
                written.append(asdict(chunk))
        file.flush()
        os.fsync(file.fileno())
    return written


def write_index(folder: Path, chunks: list[dict[str, Any]]) -> None:
    """Complete a folder of written chunks with index, common part and format. The files are on the disk on return, and
    their names once the folder is synced.

    Raises CheckpointError if parts of one stored tensor differ in shape or dtype.
    """
    tensors: dict[str, TensorStorageMetadata] = {}
    results = []
    for chunk in (WrittenChunk(**value) for value in chunks):
        dtype = getattr(torch, chunk.dtype)
        stored = tensors.setdefault(
            chunk.key, TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(chunk.size), [])
        )
        if stored.properties.dtype != dtype or stored.size != torch.Size(chunk.size):
            kinds = f"{stored.properties.dtype} {list(stored.size)}, {dtype} {chunk.size}"
            raise CheckpointError(
                f"{chunk.key}: layers differ in dtype or shape: {kinds}; name one dtype to convert to"
            )
        index = MetadataIndex(chunk.key, torch.Size(chunk.offsets), len(stored.chunks))
        stored.chunks.append(ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)))
        results.append(WriteResult(index, chunk.length, _StorageInfo(chunk.file, chunk.start, chunk.length)))
    torch.save({}, folder / "common.pt")
    atomic_io.sync(folder / "common.pt")
    FileSystemWriter(folder).finish(Metadata(state_dict_metadata=dict(tensors)), [results])
    atomic_write_json(folder / "metadata.json", FORMAT)


class _FilePart(io.RawIOBase):
    """Bytes [start, start + length) of a file, as a file object."""

    def __init__(self, file, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, target) -> int:
        view = memoryview(target).cast("B")[: max(0, self._length - self._at)]
        self._file.seek(self._start + self._at)
        count = self._file.readinto(view) or 0
        self._at += count
        return count


class TorchDistFolder:
    """A checkpoint's folder with `.metadata`, read one parameter at a time."""

    def __init__(self, folder: Path) -> None:
        """Raises CheckpointError for another folder, or if the index cannot be read."""
        self.path = folder
        if not (folder / "metadata.json").is_file() or not (folder / ".metadata").is_file():
            raise CheckpointError(
                f"{folder}: not a Megatron torch_dist checkpoint: it must have metadata.json and .metadata"
            )
        metadata = read_index(folder)
        self.tensors = {
            key: value
            for key, value in metadata.state_dict_metadata.items()
            if isinstance(value, TensorStorageMetadata)
        }
        self._storage: dict[MetadataIndex, _StorageInfo] = metadata.storage_data
        self._chunks: dict[str, dict[tuple[int, ...], list[ChunkStorageMetadata]]] = {}

    def find(self, place: StoredPlace) -> str | None:
        """Return the first key of the place that is stored, or None."""
        return next((key for key in place.keys if key in self.tensors), None)

    def shape(self, place: StoredPlace) -> tuple[int, ...] | None:
        """Return the parameter's whole shape, or None if it is not stored or is stacked in another way."""
        key = self.find(place)
        if key is None or tuple(self.tensors[key].size[: len(place.stack)]) != place.stack:
            return None
        return tuple(self.tensors[key].size[len(place.stack) :])

    def _stored(self, place: StoredPlace) -> tuple[str, tuple[int, ...]]:
        key, shape = self.find(place), self.shape(place)
        if key is None or shape is None:
            raise CheckpointError(f"{self.path}: {place.keys[0]} is not stored")
        return key, shape

    def dtype(self, place: StoredPlace) -> torch.dtype:
        key, _ = self._stored(place)
        return self.tensors[key].properties.dtype

    def read(self, place: StoredPlace) -> torch.Tensor:
        """Return the whole parameter with its shape on a single rank, in the stored dtype, on the host.

        Raises CheckpointError if a part is missing or damaged.
        """
        key, shape = self._stored(place)
        depth, whole, covered = len(place.stack), None, 0
        for chunk in self._chunks_at(key, place.index):
            part = self._load(key, chunk)[tuple(i - o for i, o in zip(place.index, chunk.offsets))]
            if tuple(part.shape) == shape:
                return part
            whole = torch.empty(shape, dtype=part.dtype) if whole is None else whole
            whole[tuple(slice(o, o + s) for o, s in zip(chunk.offsets[depth:], chunk.sizes[depth:]))] = part
            covered += part.numel()
        if whole is None or covered != math.prod(shape):
            raise CheckpointError(
                f"{self.path}: {key}{list(place.index)}: {covered} of {math.prod(shape)} numbers are stored"
            )
        return whole

    def _chunks_at(self, key: str, index: tuple[int, ...]) -> list[ChunkStorageMetadata]:
        """Return the chunks that contain a part of the parameter at `index`.

        A stored tensor can have thousands of chunks, so they are indexed once.
        """
        if key not in self._chunks:
            by_index = self._chunks[key] = {}
            for chunk in self.tensors[key].chunks:
                ranges = [range(o, o + s) for o, s in zip(chunk.offsets[: len(index)], chunk.sizes)]
                for position in itertools.product(*ranges):
                    by_index.setdefault(position, []).append(chunk)
        return self._chunks[key].get(index, [])

    def _load(self, key: str, chunk: ChunkStorageMetadata) -> torch.Tensor:
        info = self._storage.get(MetadataIndex(key, chunk.offsets))
        if info is None:
            raise CheckpointError(f"{self.path}/.metadata: {key}{list(chunk.offsets)} is in no file")
        path = self.path / info.relative_path
        try:
            with open_regular(path) as file:
                # torch.load only reads and seeks, but its annotation asks for a file that can also be written.
                part = cast(IO[bytes], _FilePart(file, info.offset, info.length))
                tensor = torch.load(part, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged file can make torch.load raise anything
            raise CheckpointError(
                f"{path}: {key} cannot be read: {f'{type(error).__name__}: {error}'.splitlines()[0]}"
            ) from error
        if tuple(tensor.shape) != tuple(chunk.sizes):
            raise CheckpointError(f"{path}: {key} has shape {list(tensor.shape)}, but {list(chunk.sizes)} in the index")
        return tensor

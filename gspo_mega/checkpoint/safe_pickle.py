"""Reading Megatron's checkpoint files without trusting them: an unpickler with a list of allowed names, and checks.

A pickle is a program: it may call any function that it names. The format's index (`.metadata`) is a pickle, and so are
its byte entries. This unpickler allows only the names that the formats themselves use (`ALLOWED`), no matter who wrote
the file. Megatron's own loader has no such list, so `refuse_code` reads every file first and refuses unsafe ones.
`first_cause`, at the end, gives an error of Megatron's or torch's checkpoint code in one line.
"""

from __future__ import annotations

import copyreg
import enum
import io
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from gspo_mega.base.errors import CheckpointError
from gspo_mega.base.untrusted import open_regular, read_bytes, read_json_file

_DISTRIBUTED = "torch.distributed.checkpoint"
# What a pickle of a tensor asks for; the second one since Megatron-Core 0.19.
_LOADS_BYTES = {("torch.storage", "_load_from_bytes"), ("megatron.core.safe_globals", "safe_load_from_bytes")}
# Classes of plain data, and functions that look a value up or make a tensor from given bytes.
ALLOWED = {
    *(
        (f"{_DISTRIBUTED}.metadata", name)
        for name in (
            "Metadata",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "MetadataIndex",
            "TensorProperties",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    *((f"{_DISTRIBUTED}.filesystem", name) for name in ("_StorageInfo", "_StoragePrefix")),
    *(
        (f"{_DISTRIBUTED}.planner", name)
        for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")
    ),
    *(("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),
    ("torch._utils", "_rebuild_tensor_v2"),
    *_LOADS_BYTES,
    ("__builtin__", "bytes"),
    ("_codecs", "encode"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("_io", "BytesIO"),
}
# Transformer Engine's states name the recipe that made them. Recipes are plain classes, all in this module.
_RECIPES = "transformer_engine.common.recipe"
# The only format in Megatron's `metadata.json` that is read and written here. The entries of the common part are
# optional.
FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_PICKLE = b"\x80"


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _LOADS_BYTES:
            return _safe_torch_load
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        if (module, name) in ALLOWED or (module == _RECIPES and "." not in name):
            found = super().find_class(module, name)
            if module != _RECIPES or isinstance(found, type):
                return found
        raise pickle.UnpicklingError(
            f"it asks for {module}.{name}, which no checkpoint needs: opening it could run a program"
        )


def _enum_member(kind: Any, name: Any) -> enum.Enum:
    """Stand in for `getattr` in a pickle: up to 3.11.3, Python writes a member of an enumeration as its class and its
    name. This function looks up nothing else.
    """
    if isinstance(kind, type) and issubclass(kind, enum.Enum) and name in kind.__members__:
        return kind[name]
    raise pickle.UnpicklingError(
        f"it asks for the attribute {name!r} of {kind!r}, which is no member of an enumeration"
    )


def write_tags_by_value() -> None:
    """Make pickles write Transformer Engine's tag of a number format, which an FP8 parameter carries, as its class and
    number. Python from 3.11.4 on does this by itself. torch's own reader refuses what earlier ones write
    (`_enum_member`).

    Call it before a save. Without Transformer Engine it does nothing.
    """
    kind = getattr(sys.modules.get("transformer_engine.pytorch.constants"), "DType", None)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        copyreg.pickle(kind, lambda tag: (type(tag), (tag.value,)))


def safe_loads(data: bytes) -> Any:
    """Return the value of a pickle that has only `ALLOWED` names.

    Raises pickle.UnpicklingError for other names, and any exception for a damaged pickle.
    """
    return _Unpickler(io.BytesIO(data)).load()


def read_index(folder: Path) -> Metadata:
    """Return `.metadata` of a `torch_dist` folder, after a check of the types of all entries, and that every file is
    inside the folder.

    Runs no code of the file. Raises CheckpointError.
    """
    _check_format(folder)
    file = folder / ".metadata"
    try:
        index = safe_loads(read_bytes(file))
        problem = _problem_of(index)
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(f"{file} cannot be read: {type(error).__name__}: {error}") from error
    if problem is not None:
        raise CheckpointError(f"{file}: {problem}")
    return index


def refuse_code(folder: Path, share: int = 0, num_shares: int = 1) -> list[str]:
    """Return one line per part of a `torch_dist` folder that Megatron's loader must not read; none if the folder is
    safe.

    This reads the index, the common part, and this share of the byte entries. The ranks' shares together cover all
    entries.
    """
    try:
        index = read_index(folder)
    except CheckpointError as error:
        return [str(error)]
    problems = []
    # Megatron 0.19 writes the common part among the entries, which are all checked below.
    if share == 0 and (folder / "common.pt").exists():
        try:
            with open_regular(folder / "common.pt") as common:
                torch.load(common, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged file can make torch.load raise anything
            problems.append(f"{folder / 'common.pt'} cannot be read: {first_cause(error)}")
    # The loader treats every entry that is not a tensor in the index as bytes.
    tensors = {name for name, kind in index.state_dict_metadata.items() if isinstance(kind, TensorStorageMetadata)}
    entries = sorted(
        (key.fqn, place.relative_path, place.offset, place.length)
        for key, place in index.storage_data.items()
        if key.fqn not in tensors
    )
    for name, relative, offset, length in entries[share::num_shares]:
        try:
            with open_regular(folder / relative) as file:
                file.seek(offset)
                _look_inside(_safe_torch_load(file.read(length)))
        except Exception as error:  # a damaged file can make torch.load raise anything
            problems.append(f"{folder / relative}: {name} cannot be read: {first_cause(error)}")
    return problems


class _Module:
    """The part of a pickle module that `torch.load` uses. torch's own list (`weights_only`) lacks BytesIO."""

    Unpickler = _Unpickler
    UnpicklingError = pickle.UnpicklingError

    @staticmethod
    def load(file: Any, **options: Any) -> Any:
        return _Unpickler(file, **options).load()


def _safe_torch_load(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", pickle_module=_Module, weights_only=False)


def _look_inside(value: Any) -> None:
    """Check nested pickles. Transformer Engine puts one into bytes, or into a tensor of bytes, and loads it
    unchecked.
    """
    if isinstance(value, torch.Tensor) and value.dtype == torch.uint8:
        value = value.contiguous().numpy().tobytes()
    if isinstance(value, io.BytesIO):
        value = value.getvalue()
    if isinstance(value, bytes):
        if value[:2] == b"PK":
            value = _safe_torch_load(value)
        elif value[:1] == _PICKLE:
            value = safe_loads(value)
        else:
            return
        _look_inside(value)
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ():
        _look_inside(part)


def _check_format(folder: Path) -> None:
    try:
        found = read_json_file(folder / "metadata.json")
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder}/metadata.json cannot be read: {type(error).__name__}: {error}") from error
    # For another format, Megatron would choose another loader.
    if not isinstance(found, dict) or {"common_backend": "torch", "common_backend_version": 1} | found != FORMAT:
        raise CheckpointError(f"{folder}/metadata.json: {found}; only format torch_dist, version 1, is supported")


def _problem_of(index: Any) -> str | None:
    if (
        not isinstance(index, Metadata)
        or not isinstance(index.state_dict_metadata, dict)
        or not isinstance(index.storage_data, dict)
    ):
        return "not the index of a checkpoint"
    for name, kind in index.state_dict_metadata.items():
        if not isinstance(name, str) or not isinstance(kind, (TensorStorageMetadata, BytesStorageMetadata)):
            return f"{name!r} is neither a tensor nor bytes"
        if isinstance(kind, TensorStorageMetadata) and not (
            isinstance(kind.properties.dtype, torch.dtype)
            and _are_sizes(kind.size)
            and all(_fits(chunk, kind.size) for chunk in kind.chunks)
        ):
            return f"{name!r} has a chunk that does not lie in it"
    for key, place in index.storage_data.items():
        if (
            not isinstance(key, MetadataIndex)
            or not isinstance(key.fqn, str)
            or not isinstance(place, _StorageInfo)
            or not isinstance(place.relative_path, str)
        ):
            return f"{key!r} is in no file"
        if os.path.basename(place.relative_path) != place.relative_path or place.relative_path in ("", ".", ".."):
            return f"{key.fqn!r} has the file {place.relative_path!r}; it must be the name of a file in the folder"
        if not _are_sizes((place.offset, place.length)) or place.transform_descriptors:
            return f"{key.fqn!r} is stored in a way that is not supported"
    return None


def _fits(chunk: Any, size: Any) -> bool:
    return (
        isinstance(chunk, ChunkStorageMetadata)
        and _are_sizes(chunk.offsets)
        and _are_sizes(chunk.sizes)
        and len(chunk.offsets) == len(chunk.sizes) == len(size)
        and all(o + s <= n for o, s, n in zip(chunk.offsets, chunk.sizes, size))
    )


def _are_sizes(value: Any) -> bool:
    return isinstance(value, tuple) and all(type(size) is int and size >= 0 for size in value)


def first_cause(error: BaseException) -> str:
    """Return the error in one line. A CheckpointException, which is not an Exception, has the errors of all ranks."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]

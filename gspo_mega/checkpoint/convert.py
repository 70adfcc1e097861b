"""Conversion between Hugging Face folders and Megatron's `torch_dist`, streamed: no model is built, no GPU is used.

Files are written one by one to a staging folder. Each is synced and then recorded, so that the same command continues
after an interruption. Then the complete folder is renamed. Peak memory is a few of the largest tensors. `torch_dist.py`
and `tensor_sources.py` know the formats, and `models/tensors.py` the mapping of tensors to parameters.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

import torch

from gspo_mega.base.errors import CheckpointError
from gspo_mega.base.run_folder import atomic_write_json
from gspo_mega.checkpoint.gather import entry_dtype
from gspo_mega.checkpoint.hf_export import DTYPE_NAMES, MANIFEST_NAME, copy_description, sync, tensor_digest
from gspo_mega.checkpoint.hf_folder import INDEX_NAME, SINGLE_NAME
from gspo_mega.checkpoint.mtp_layers import carried_config, carried_modules
from gspo_mega.checkpoint.quantized import PublishedForm
from gspo_mega.checkpoint.tensor_sources import MEGATRON_FOLDER, TensorSource, write_safetensors
from gspo_mega.checkpoint.torch_dist import write_chunks, write_index
from gspo_mega.models.block_fp8 import quantization_config
from gspo_mega.models.parameter_names import by_parameter
from gspo_mega.models.tensors import TensorEntry, parameter_blocks, parameter_shape

FILE_BYTES = 2 * 1024**3
_PART_SUFFIX = ".converting"
_RECORD_NAME = "progress.jsonl"
_FREE_BYTES = 256 * 1024**2  # this much stays free on the disk

# A unit of writing: a name and the tensors in it.
_Item = tuple[str, list[TensorEntry]]
# A function that is called after every tensor with bytes done, bytes in total, and the tensor's name.
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class _Target:
    """What to convert to: the `dtype` of all tensors (None keeps the source's), or a `form` in which some are
    quantised.
    """

    dtype: torch.dtype | None = None
    form: PublishedForm | None = None

    def described(self, source: TensorSource, entry: TensorEntry) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return the names, dtypes and shapes of what is written for a tensor."""
        if self.form is not None:
            return self.form.described(entry)
        dtype = source.dtype(entry) if self.dtype is None else entry_dtype(entry, self.dtype)
        return {entry.name: (dtype, entry.shape)}

    def size(self, source: TensorSource, entry: TensorEntry) -> int:
        return sum(math.prod(shape) * dtype.itemsize for dtype, shape in self.described(source, entry).values())

    def identity(self) -> dict[str, Any]:
        """Return what distinguishes this conversion from others of the same source."""
        if self.form is None or self.form.stored is None:
            return {"dtype": None if self.dtype is None else DTYPE_NAMES[self.dtype]}
        return {
            "dtype": [DTYPE_NAMES[self.form.gathered], DTYPE_NAMES[self.form.plain]],
            "quantization": quantization_config(self.form.stored) | {"rule": self.form.rule},
        }


@dataclass
class _Tally:
    """What has been written, for progress and manifest."""

    source: TensorSource
    target: _Target
    total: int
    progress: Progress
    done: int = 0
    tensors: dict[str, dict[str, Any]] = field(default_factory=dict)

    def read(self, entry: TensorEntry) -> torch.Tensor:
        """Return the whole tensor in the target dtype, and record it for the manifest."""
        dtype = self.target.dtype
        tensor = self.source.read(entry, None if dtype is None else entry_dtype(entry, dtype))
        self.note(entry.name, tensor, entry)
        return tensor

    def written(self, entry: TensorEntry) -> Iterator[torch.Tensor]:
        """Yield what is written for a tensor, as `_Target.described` says, and record it for the manifest."""
        form = self.target.form
        if form is None:
            yield self.read(entry)
            return
        for name, tensor in form.tensors(entry, self.source.read(entry, entry_dtype(entry, form.gathered))):
            self.note(name, tensor, entry)
            yield tensor

    def note(self, name: str, tensor: torch.Tensor, entry: TensorEntry) -> None:
        """Record for the manifest a tensor `name` that is made from `entry`."""
        self.tensors[name] = {
            "shape": list(tensor.shape),
            "dtype": DTYPE_NAMES[tensor.dtype],
            "sha256": tensor_digest(tensor),
            "source": entry.name,
        }
        self.done += tensor.numel() * tensor.element_size()
        self.progress(self.done, self.total, name)

    def skip(self, tensors: dict[str, dict[str, Any]], size: int) -> None:
        """Record tensors that an earlier attempt has written."""
        self.tensors |= tensors
        self.done += size


def to_megatron(
    source: TensorSource,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    progress: Progress,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write `source` to the new folder `out`: Megatron's files under `megatron/`, config and tokenizer, manifest.json.

    Any tensor, pipeline and expert layout can load it. `dtype` is the target, by default the source's. Raises
    CheckpointError, ModelError or OSError. The staging folder then stays, and the same call continues from it.
    """

    def parameters(tally: _Tally, group: list[_Item]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, entries in group:
            yield name, _fused(tally, entries)

    def write(tally: _Tally, path: Path, group: list[_Item]) -> list[dict[str, Any]]:
        return write_chunks(path, source.spec, parameters(tally, group))

    def complete(part: Path, files: list[dict[str, Any]], described: Path, dtype_name: str) -> None:
        write_index(part / MEGATRON_FOLDER, [chunk for file in files for chunk in file["written"]])
        sync(part / MEGATRON_FOLDER)
        copy_description(described, part, dtype_name, edited=source.config_json)

    target = _Target(dtype)
    groups = _groups(source, by_parameter(source.tensors).items(), target, file_bytes)
    names = [f"{MEGATRON_FOLDER}/__{number}_0.distcp" for number in range(len(groups))]
    _convert(source, out, target, progress, "Megatron torch_dist", dict(zip(names, groups)), write, complete)


def to_huggingface(
    source: TensorSource,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    form: PublishedForm | None = None,
    progress: Progress,
    file_bytes: int = FILE_BYTES,
    carries: bool = True,
) -> None:
    """Write `source` to the new Hugging Face folder `out`: safetensors with an index, config, tokenizer, manifest.json.

    Give `form` instead of `dtype` for what servers load, in which some tensors are quantised. `dtype`, errors and
    continuation are as in `to_megatron`. With `carries`, the folder also gets the layers for multi-token prediction
    that the source's description has, never in FP8 blocks.
    """
    target = _Target(dtype, form)
    carried = source.carried() if carries else []
    stored = None if form is None else form.stored
    if stored is not None and carried:
        stored = replace(stored, kept=(*stored.kept, *carried_modules(source.spec)))

    def write(tally: _Tally, path: Path, group: list[_Item]) -> None:
        entries = [entry for _, fused in group for entry in fused]
        described = {name: kind for entry in entries for name, kind in target.described(source, entry).items()}
        write_safetensors(path, described, (tensor for entry in entries for tensor in tally.written(entry)))

    def complete(part: Path, files: list[dict[str, Any]], described: Path, dtype_name: str) -> None:
        if len(files) > 1:
            weight_map = {name: file["file"] for file in files for name in file["tensors"]}
            total = sum((part / file["file"]).stat().st_size for file in files)
            atomic_write_json(part / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})

        def edited(raw: dict[str, Any]) -> dict[str, Any]:
            own = source.config_json(raw)
            return carried_config(source.spec, own) if carried else own

        copy_description(described, part, dtype_name, stored, edited)

    entries = [*source.written, *carried]
    groups = _groups(source, ((entry.name, [entry]) for entry in entries), target, file_bytes)
    count = len(groups)
    names = (
        [SINGLE_NAME]
        if count == 1
        else [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    )
    _convert(source, out, target, progress, "Hugging Face safetensors", dict(zip(names, groups)), write, complete)


def _fused(tally: _Tally, entries: list[TensorEntry]) -> torch.Tensor:
    """Return the whole parameter that the tensors form, as on a single rank. Padding rows are zero."""
    spec, shape = tally.source.spec, parameter_shape(tally.source.spec, entries[0], 1)
    tensor = tally.read(entries[0])
    if len(entries) == 1 and tuple(tensor.shape) == shape:
        return tensor
    parameter = torch.zeros(shape, dtype=tensor.dtype)
    for entry in entries:
        tensor = tensor if entry is entries[0] else tally.read(entry)
        if tensor.dtype != parameter.dtype:
            raise CheckpointError(
                f"{entry.name} is {tensor.dtype}, other tensors of {entry.parameter} are {parameter.dtype}; name one"
                " dtype to convert to"
            )
        for block in parameter_blocks(spec, entry, 1, 0):
            parameter.narrow(block.dim, block.local_start, block.length).copy_(
                tensor.narrow(block.dim, block.start, block.length)
            )
    return parameter


def _groups(source: TensorSource, items: Iterable[_Item], target: _Target, file_bytes: int) -> list[list[_Item]]:
    """Return the consecutive items of each file: about `file_bytes`, and at least one item."""
    groups: list[list[_Item]] = [[]]
    room = file_bytes
    for name, entries in items:
        size = sum(target.size(source, entry) for entry in entries)
        if groups[-1] and size > room:
            groups.append([])
            room = file_bytes
        groups[-1].append((name, entries))
        room -= size
    return groups


def _convert(
    source: TensorSource,
    out: Path,
    target: _Target,
    progress: Progress,
    kind: str,
    files: dict[str, list[_Item]],
    write: Callable[[_Tally, Path, list[_Item]], Any],
    complete: Callable[[Path, list[dict[str, Any]], Path, str], None],
) -> None:
    """Write every file that is not recorded yet with `write`, complete the folder with `complete`, then rename it."""
    if out.exists():
        raise CheckpointError(f"{out} already exists and is not overwritten; name another folder, or remove it")
    entries = [entry for group in files.values() for _, fused in group for entry in fused]
    tally = _Tally(source, target, sum(target.size(source, entry) for entry in entries), progress)
    part = out.with_name(out.name + _PART_SUFFIX)
    identity = {
        "to": kind,
        **target.identity(),
        "files": list(files),
        "config": source.spec.raw,
        "source": [[str(f.absolute()), f.stat().st_size, f.stat().st_mtime_ns] for f in source.files],
    }
    part.mkdir(parents=True, exist_ok=True)
    if not (part / _RECORD_NAME).exists() and any(part.iterdir()):
        raise CheckpointError(
            f"{part} already exists and is not an unfinished conversion; name another folder than {out.name}, or move"
            " it away"
        )
    with (part / _RECORD_NAME).open("a+", encoding="utf-8") as record:
        try:
            fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"{part}: another process runs this conversion") from None
        finished = _resume(part, record, identity)
        remaining, free = tally.total - sum(file["bytes"] for file in finished.values()), shutil.disk_usage(part).free
        if remaining + _FREE_BYTES > free:
            raise CheckpointError(f"{part}: the conversion needs {remaining} bytes there, and {free} are free")
        if record.tell() == 0:
            _append(record, identity)
        for name, group in files.items():
            if name in finished:
                tally.skip(finished[name]["tensors"], finished[name]["bytes"])
                continue
            before_bytes, before = tally.done, set(tally.tensors)
            (part / name).parent.mkdir(exist_ok=True)
            try:
                written = write(tally, part / name, group)
            except OSError:
                # It would be written anew in any case. On a full disk, this makes room for the report of the error.
                (part / name).unlink(missing_ok=True)
                raise
            tensors = {tensor: noted for tensor, noted in tally.tensors.items() if tensor not in before}
            finished[name] = {"file": name, "bytes": tally.done - before_bytes, "tensors": tensors, "written": written}
            _append(record, finished[name] | {"file_bytes": (part / name).stat().st_size})
        in_order = [finished[name] for name in files]
        if target.form is not None:
            dtypes = {DTYPE_NAMES[target.form.plain]}
        else:
            dtypes = {tally.tensors[entry.name]["dtype"] for entry in entries if not entry.is_buffer}
        # For a mixture, config.json names the widest dtype, which loses nothing.
        complete(part, in_order, source.description, "float32" if "float32" in dtypes else min(dtypes))
        placed = {
            tensor: noted | {"file": file["file"]} for file in in_order for tensor, noted in file["tensors"].items()
        }
        atomic_write_json(
            part / MANIFEST_NAME,
            {"format": kind, "source": [str(f.absolute()) for f in source.files], "tensors": placed},
        )
        (part / _RECORD_NAME).unlink()
        sync(part)
        os.rename(part, out)
        sync(out.parent)


def _append(record: TextIO, value: dict[str, Any]) -> None:
    record.write(json.dumps(value) + "\n")
    record.flush()
    os.fsync(record.fileno())


def _resume(part: Path, record: TextIO, identity: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the finished files of an earlier attempt at the same conversion. Raises CheckpointError if the folder
    belongs to another conversion.
    """
    record.seek(0)
    lines = record.read().splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]
    if len(whole) < len(lines):  # the last line is incomplete, so its file is written again
        record.truncate(sum(len(line.encode()) for line in whole))
        record.seek(0, os.SEEK_END)
    if not whole:  # stopped before anything was recorded
        for leftover in part.iterdir():
            if leftover.is_dir():
                shutil.rmtree(leftover)
            elif leftover.name != _RECORD_NAME:
                leftover.unlink()
        return {}
    recorded, *files = map(json.loads, whole)
    if recorded != identity:
        raise CheckpointError(
            f"{part} belongs to another conversion, or its source has changed; remove it to start over"
        )
    finished = {}
    for entry in files:
        size = entry.pop("file_bytes")
        if not (part / entry["file"]).is_file() or (part / entry["file"]).stat().st_size != size:
            raise CheckpointError(f"{part / entry['file']}: differs from its record; remove {part} to start over")
        finished[entry["file"]] = entry
    return finished

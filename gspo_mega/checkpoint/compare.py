"""The differences between two checkpoints of any two formats, and a description of one checkpoint.

Checkpoints are compared as Hugging Face tensors, bit for bit, so that a conversion is judged by the tensors that it
would give back. Nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from gspo_mega.base.errors import CheckpointError
from gspo_mega.base.run_folder import read_json
from gspo_mega.checkpoint.hf_export import DTYPE_NAMES
from gspo_mega.checkpoint.tensor_sources import MEGATRON_FOLDER, HuggingFaceSource, TensorSource, open_checkpoint
from gspo_mega.checkpoint.torch_dist import TorchDistFolder
from gspo_mega.models.spec import shape_differences
from gspo_mega.models.tensors import count_parameters


def differences(one: TensorSource, other: TensorSource, progress: Callable[[int, int, str], None]) -> Iterator[str]:
    """Yield one line per difference as it is found: between the models, or else between tensors in table order.

    Raises CheckpointError for files that cannot be read.
    """
    shapes = shape_differences(one.spec, other.spec)
    if shapes:
        yield f"the models differ: {', '.join(shapes)}"
        return
    if names := sorted({entry.name for entry in one.tensors} ^ {entry.name for entry in other.tensors}):
        yield f"the models differ: one is a policy and the other a critic ({', '.join(names)})"
        return
    entries = one.tensors
    if carried := one.carried():
        # Megatron's files have no such layers. A conversion from them takes the layers of the folder that describes it.
        if {entry.name for entry in other.carried()} == {entry.name for entry in carried}:
            entries = [*entries, *carried]
        elif other.carried():
            yield "the models differ: their layers for multi-token prediction have other tensors"
            return
    sizes = [entry.num_elements * one.dtype(entry).itemsize for entry in entries]
    total, done = sum(sizes), 0
    for entry, size in zip(entries, sizes, strict=True):
        a, b = one.read(entry), other.read(entry)
        if a.dtype != b.dtype:
            narrow = min(a.dtype, b.dtype, key=lambda dtype: dtype.itemsize)
            values = "the same values after rounding" if a.to(narrow).equal(b.to(narrow)) else "and other values"
            yield f"{entry.name}: {DTYPE_NAMES[a.dtype]} instead of {DTYPE_NAMES[b.dtype]}, {values}"
        elif not _same_bytes(a, b):
            apart = a != b
            largest = float((a.double() - b.double()).abs().max())
            yield f"{entry.name}: {int(apart.sum())} of {a.numel()} numbers differ, by {largest:.3g} at most"
        done += size
        progress(done, total, entry.name)


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the bytes are equal. So NaN equals itself, and 0 differs from -0."""
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def describe(folder: Path, description: Path | None = None) -> list[str]:
    """Return lines about a checkpoint: format, model, sizes, a run's counters, and every tensor with shape and dtype.

    For a Megatron checkpoint without config.json, the lines name its stored tensors. Raises CheckpointError or
    ModelError.
    """
    lines = _run_lines(folder)
    megatron = folder / MEGATRON_FOLDER if (folder / MEGATRON_FOLDER).is_dir() else folder
    if description is None and (megatron / ".metadata").is_file() and not (folder / "config.json").is_file():
        stored = TorchDistFolder(megatron).tensors
        lines += ["format      Megatron torch_dist, without config.json", f"stored      {len(stored)} tensors"]
        return lines + [
            f"  {key}  {list(value.size)}  {str(value.properties.dtype).removeprefix('torch.')}"
            for key, value in stored.items()
        ]
    source = open_checkpoint(folder, description)
    entries, counts = source.tensors, count_parameters(source.spec)
    size = sum(entry.num_elements * source.dtype(entry).itemsize for entry in entries)
    dtypes = sorted({DTYPE_NAMES[source.dtype(entry)] for entry in entries})
    lines += [
        f"format      {source.kind}, {len(source.files)} files",
        (
            f"model       {source.spec.family}: {source.spec.num_layers} layers, hidden {source.spec.hidden_size},"
            f" vocabulary {source.spec.vocab_size}"
        ),
        f"parameters  {counts.total} ({counts.active} used per token)",
    ]
    if isinstance(source, HuggingFaceSource) and (source.spec.stored is not None or source.spec.stored_fp4):
        return lines + _quantized_lines(source, len(entries), size, dtypes)
    lines.append(f"tensors     {len(entries)}, {size} bytes, {', '.join(dtypes)}")
    return lines + [f"  {entry.name}  {list(entry.shape)}  {DTYPE_NAMES[source.dtype(entry)]}" for entry in entries]


def _quantized_lines(source: HuggingFaceSource, num_tensors: int, size: int, dtypes: list[str]) -> list[str]:
    """Return lines about what the files of a quantised folder contain, and what it is read as."""
    stored = source.stored()
    by_kind: dict[str, int] = {}
    for one in stored.values():
        kind = _kind_of(one.dtype)
        by_kind[kind] = by_kind.get(kind, 0) + one.end - one.start
    how = "MXFP4" if source.spec.stored is None else f"FP8 in blocks of {'x'.join(map(str, source.spec.stored.block))}"
    parts = ", ".join(f"{kind} {count}" for kind, count in sorted(by_kind.items()))
    return [
        f"stored      {how}: {len(stored)} tensors with their scales, {sum(by_kind.values())} bytes ({parts})",
        f"read as     {num_tensors} tensors, {size} bytes, {', '.join(dtypes)}",
        *(f"  {name}  {list(one.shape)}  {_kind_of(one.dtype)}" for name, one in stored.items()),
    ]


def _kind_of(dtype: torch.dtype) -> str:
    return DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))


def _run_lines(folder: Path) -> list[str]:
    try:
        record = read_json(folder / "state.json")
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    if not isinstance(record, dict):
        return []
    counters = record.get("state", {})
    layout = ", ".join(f"{name} {size}" for name, size in record.get("layout", {}).items())
    return [
        (
            f"run         step {counters.get('step')}, {counters.get('num_optimizer_steps')} optimizer steps, weight"
            f" version {counters.get('weight_version')}"
        ),
        f"saved by    {layout}",
    ]

"""Safetensors files with plain reads and writes, so that only one tensor at a time is in memory.

The libraries memory-map a file for reading (its pages then count as this process's memory) and need all tensors of a
file at once for writing. Owns the byte layout: 8 bytes of header length, little-endian; a JSON header; the tensors'
bytes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gspo_mega.base.errors import CheckpointError
from gspo_mega.base.guarded_files import open_regular
from gspo_mega.checkpoint.hf_export import tensor_bytes

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


@dataclass(frozen=True)
class Placed:
    """A tensor in a file: `start` and `end` are byte positions in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsFile:
    """One file with its header; tensors are read on request. Raises CheckpointError for another format or a cut
    file. `packed`: some tensors are bytes, with several elements each, which `read` returns as bytes.
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
        """The whole tensor in the file's shape and dtype, on the host. Raises CheckpointError."""
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
    """Write a file of whole tensors; durable on return.

    `described` has their dtype and shape by name; `tensors` yields them in that order, local to this process. Raises
    CheckpointError for a tensor that differs from its description, OSError.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, (dtype, shape) in described.items():
        size = torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin aligned
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

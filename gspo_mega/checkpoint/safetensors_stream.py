"""Safetensors files one tensor at a time: plain reads and writes, so that no more than a tensor is in memory.

The libraries map a file for reading (its pages then count as this process's memory) and want all of a file's tensors at
once for writing. Owns the byte layout: 8 bytes of header length, little-endian; a JSON header; the tensors' bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from gspo_mega.errors import CheckpointError
from gspo_mega.weights.hf_export import tensor_bytes

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LENGTH_BYTES = 8
_LONGEST_HEADER = 100_000_000  # what the format's own library accepts


@dataclass(frozen=True)
class Placed:
    """A tensor in a file: `start` and `end` are byte positions in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsFile:
    """One file, its header read; tensors are read when asked for. Raises CheckpointError when it is not such a file, or cut short."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
                if not 0 < length <= min(size - _LENGTH_BYTES, _LONGEST_HEADER):
                    raise CheckpointError(f"{path}: not a safetensors file: a header of {length} bytes in a file of {size}")
                header = json.loads(file.read(length))
            self.tensors = {n: self._placed(t, _LENGTH_BYTES + length) for n, t in header.items() if n != "__metadata__"}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path}: cannot be read as safetensors: {type(error).__name__}: {error}") from error
        end = max((t.end for t in self.tensors.values()), default=0)
        if end > size:
            raise CheckpointError(f"{path}: cut short: {size} bytes, its header promises {end}")

    def _placed(self, said: dict, base: int) -> Placed:
        if said["dtype"] not in DTYPES:
            raise CheckpointError(f"{self.path}: dtype {said['dtype']} is not supported; supported: {', '.join(DTYPES)}")
        start, end = said["data_offsets"]
        return Placed(DTYPES[said["dtype"]], tuple(said["shape"]), base + start, base + end)

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor in the file's dtype. Raises CheckpointError."""
        placed = self.tensors[name]
        flat = torch.empty(placed.end - placed.start, dtype=torch.uint8)
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(placed.start)
                _read_into(file, memoryview(flat.numpy()))
        except (OSError, EOFError) as error:
            raise CheckpointError(f"{self.path}: {name} cannot be read: {error}") from error
        return flat.view(placed.dtype).reshape(placed.shape)


def _read_into(file, target: memoryview) -> None:
    while target:
        count = file.readinto(target)
        if not count:
            raise EOFError("the file ends early")
        target = target[count:]


def write_safetensors(path: Path, described: dict[str, tuple[torch.dtype, tuple[int, ...]]], tensors: Iterator[torch.Tensor]) -> None:
    """Write a file of the tensors in `described` (dtype and shape by name), which `tensors` brings in that order; durable on return.

    Raises CheckpointError for a tensor other than described, OSError.
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
                raise CheckpointError(f"{path}: {name} came as {tensor.dtype} {list(tensor.shape)}, {dtype} {list(shape)} was announced")
            file.write(memoryview(tensor_bytes(tensor)))
        file.flush()
        os.fsync(file.fileno())

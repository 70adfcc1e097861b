"""Messages between ranks as bytes: JSON values with numpy arrays in them, both ways.

A message is a JSON header followed by the raw bytes of its arrays; nothing is pickled, so nothing in a
message can run code. Uses no process group.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

_ARRAY = "__array__"


def encode(value: Any) -> bytes:
    """`value`: JSON types with numpy arrays anywhere in place of a value. Raises TypeError for anything else."""
    buffers: list[bytes] = []

    def strip(item: Any) -> Any:
        if isinstance(item, np.ndarray):
            buffers.append(np.ascontiguousarray(item).tobytes())
            return {
                _ARRAY: len(buffers) - 1,
                "dtype": item.dtype.str,
                "shape": list(item.shape),
                "bytes": len(buffers[-1]),
            }
        if isinstance(item, dict):
            return {str(key): strip(entry) for key, entry in item.items()}
        if isinstance(item, (list, tuple)):
            return [strip(entry) for entry in item]
        if isinstance(item, np.generic):
            return item.item()
        return item

    header = json.dumps(strip(value)).encode()
    return b"".join([len(header).to_bytes(8, "little"), header, *buffers])


def decode(message: bytes) -> Any:
    """The value given to `encode`; tuples come back as lists, arrays are writable copies."""
    size = int.from_bytes(message[:8], "little")
    header = json.loads(message[8 : 8 + size])
    offsets: dict[int, int] = {}

    def survey(item: Any) -> None:
        if isinstance(item, dict):
            if _ARRAY in item:
                offsets[item[_ARRAY]] = item["bytes"]
            else:
                for entry in item.values():
                    survey(entry)
        elif isinstance(item, list):
            for entry in item:
                survey(entry)

    survey(header)
    starts, position = {}, 8 + size
    for index in sorted(offsets):
        starts[index] = position
        position += offsets[index]

    def restore(item: Any) -> Any:
        if isinstance(item, dict):
            if _ARRAY in item:
                start = starts[item[_ARRAY]]
                raw = message[start : start + item["bytes"]]
                return np.frombuffer(raw, dtype=np.dtype(item["dtype"])).reshape(item["shape"]).copy()
            return {key: restore(entry) for key, entry in item.items()}
        if isinstance(item, list):
            return [restore(entry) for entry in item]
        return item

    return restore(header)

"""Messages between ranks as bytes: JSON values with numpy arrays in them, both ways.

A message is a JSON header followed by the raw bytes of its arrays; nothing is pickled, so nothing in a message can run
code. Arrays are copied once on their way in, and not at all on their way out. Uses no process group.

    message  length of the header (uint64, little-endian), header, arrays, each at a multiple of 64 bytes
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import numpy as np

_ARRAY = "__array__"
_ALIGNED = 64


class Encoded(NamedTuple):
    """A value that was encoded before."""

    message: np.ndarray


def encode(value: Any) -> np.ndarray:
    """[bytes] uint8. `value`: JSON types with numpy arrays anywhere in place of a value, or `Encoded`. Raises TypeError
    for anything else.
    """
    if isinstance(value, Encoded):
        return value.message
    arrays: list[tuple[int, np.ndarray]] = []
    size = 0

    def strip(item: Any) -> Any:
        nonlocal size
        if isinstance(item, np.ndarray):
            start, size = size, _aligned(size + item.nbytes)
            arrays.append((start, item))
            return {_ARRAY: start, "dtype": item.dtype.str, "shape": list(item.shape)}
        if isinstance(item, dict):
            return {str(key): strip(entry) for key, entry in item.items()}
        if isinstance(item, (list, tuple)):
            return [strip(entry) for entry in item]
        if isinstance(item, np.generic):
            return item.item()
        return item

    header = json.dumps(strip(value)).encode()
    begin = _aligned(8 + len(header))
    message = np.zeros(begin + size, np.uint8)
    message[: 8 + len(header)] = np.frombuffer(len(header).to_bytes(8, "little") + header, np.uint8)
    for start, array in arrays:
        _array(message, begin + start, array.dtype, array.shape)[...] = array
    return message


def decode(message: np.ndarray) -> Any:
    """The value given to `encode`; tuples come back as lists, arrays are views of `message`."""
    size = int.from_bytes(message[:8].tobytes(), "little")
    begin = _aligned(8 + size)

    def restore(item: Any) -> Any:
        if isinstance(item, dict):
            if _ARRAY in item:
                return _array(message, begin + item[_ARRAY], np.dtype(item["dtype"]), item["shape"])
            return {key: restore(entry) for key, entry in item.items()}
        if isinstance(item, list):
            return [restore(entry) for entry in item]
        return item

    return restore(json.loads(message[8 : 8 + size].tobytes()))


def _array(message: np.ndarray, start: int, dtype: np.dtype, shape: Any) -> np.ndarray:
    """A view."""
    return np.ndarray(shape, dtype, message, start)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED

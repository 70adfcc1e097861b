"""The journal's file format: records with length and checksum, one after another; records are only appended.

    file    8 bytes `GSPOJRN1`, then frames
    frame   length of the payload (uint32), CRC-32 of the payload (uint32), payload         all little-endian
    payload length of its JSON (uint32), JSON (UTF-8), then the raw bytes of its arrays, in order; the JSON's `arrays`
            has {name: [dtype, shape]}

A killed process, or a full disk, leaves at most one torn frame, the last. A reader stops at the first frame that is
short or has a wrong checksum, and says how many bytes it left unread.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gspo_mega import beats
from gspo_mega.errors import JournalError

MAGIC = b"GSPOJRN1"
_FRAME = struct.Struct("<II")
_LENGTH = struct.Struct("<I")


def encode_frame(values: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None) -> bytes:
    """One frame of JSON values and arrays, which keep any shape and numeric dtype. Raises ValueError for a NaN among
    the values, TypeError for other types.
    """
    arrays = {name: np.ascontiguousarray(array) for name, array in (arrays or {}).items()}
    layout = {name: [array.dtype.newbyteorder("<").str, list(array.shape)] for name, array in arrays.items()}
    text = json.dumps({**values, "arrays": layout}, allow_nan=False).encode()
    parts = [array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes() for array in arrays.values()]
    payload = b"".join([_LENGTH.pack(len(text)), text, *parts])
    return _FRAME.pack(len(payload), zlib.crc32(payload)) + payload


def checksum_of(frame: bytes) -> int:
    """The CRC-32 that a frame carries."""
    return _FRAME.unpack_from(frame)[1]


class FrameFile:
    """Reads one file. `num_torn_bytes`: bytes at its end that are no whole frame, known once `frames()` is exhausted.
    `checksum`: of the frame that `frames()` yielded last.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_torn_bytes = 0
        self.checksum = 0

    def frames(self) -> Iterator[tuple[dict[str, Any], dict[str, np.ndarray]]]:
        """(JSON values, arrays) of every whole frame; arrays have the shape and dtype they were written with, in
        little-endian order. Raises JournalError for a file that is no journal's, or
        unreadable.
        """
        try:
            size = self.path.stat().st_size
            with self.path.open("rb") as file:
                if file.read(len(MAGIC)) != MAGIC:
                    raise JournalError(f"{self.path}: not a file of a rollout journal")
                while True:
                    start = file.tell()
                    payload = _whole_payload(file, size - start)
                    if payload is None:
                        self.num_torn_bytes = size - start
                        return
                    self.checksum = zlib.crc32(payload)
                    beats.beat()  # with routed experts, reading a step's file can take minutes
                    yield _decode(payload)
        except OSError as error:
            raise JournalError(f"{self.path}: cannot be read: {error.strerror}") from error


def _whole_payload(file: Any, num_left: int) -> bytes | None:
    head = file.read(_FRAME.size)
    if len(head) < _FRAME.size:
        return None
    length, checksum = _FRAME.unpack(head)
    if length < _LENGTH.size or length > num_left - _FRAME.size:
        return None  # the length itself may be damaged and must not make us read without end
    payload = file.read(length)
    return payload if len(payload) == length and zlib.crc32(payload) == checksum else None


def _decode(payload: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    (length,) = _LENGTH.unpack_from(payload)
    offset = _LENGTH.size + length
    values = json.loads(payload[_LENGTH.size : offset])
    arrays = {}
    for name, (dtype, shape) in values.pop("arrays").items():
        count = math.prod(shape)
        arrays[name] = np.frombuffer(payload, np.dtype(dtype), count, offset).reshape(shape).copy()
        offset += arrays[name].nbytes
    return values, arrays

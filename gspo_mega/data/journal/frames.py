"""The journal's file format: records with length and checksum, one after another; records are only appended.

    file    8 bytes `GSPOJRN1`, then frames
    frame   length of the payload (uint32), CRC-32 of the payload (uint32), payload         all little-endian
    payload length of its JSON (uint32), JSON (UTF-8), then the raw bytes of its arrays, in order; the JSON's `arrays`
            has {name: [dtype, shape]}

A killed process, or a full disk, leaves at most one torn frame, the last: it begins as a frame does and ends with the
file before it is whole. A reader stops there, and says how many bytes it left unread. Everything else that is no frame
is damage, which is an error with its place. Whoever only shows a file may read on past it, at the next place where a
frame's checksum holds.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from gspo_mega.base import beats
from gspo_mega.base.errors import JournalError
from gspo_mega.base.guarded_files import open_regular

MAGIC = b"GSPOJRN1"
_FRAME = struct.Struct("<II")
_LENGTH = struct.Struct("<I")
# What a frame's JSON begins with, and how far into the frame that is.
_JSON_BEGIN = b'{"'
_LARGE_FRAME = 2**30  # larger than any with which a crash leaves only a few bytes
_LONGEST_WORD = 12  # of JSON outside of strings: the end of the text may cut an escape, a number or a name
_JSON_PLACE = _FRAME.size + _LENGTH.size
Frame = tuple[dict[str, Any], dict[str, np.ndarray]]


@dataclass(frozen=True)
class Damage:
    """Bytes `offset` to `end` of a file that are no frames. `frame`: the number of the first damaged frame, from 1.
    `what`: what is wrong with it. `follows`: an intact frame begins at `end`.
    """

    offset: int
    end: int
    frame: int
    what: str
    follows: bool

    def __str__(self) -> str:
        then = f"intact records follow at byte {self.end}" if self.follows else "nothing intact follows"
        return f"damaged at byte {self.offset}, in frame {self.frame}: {self.what}; {then}"


class JournalDamage(JournalError):
    """A file of the journal is damaged: not cut short by a crash, but other than it was written."""

    def __init__(self, path: Path, damage: Damage) -> None:
        super().__init__(
            f"{path}: {damage}. Nothing at or after that place is used. `gspo-mega inspect RUN --step N` shows what is"
            " intact. Restore the file from a copy; or move it out of the folder, and a run that goes on samples the"
            " step again"
        )
        self.damage = damage


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
    `checksum`: of the frame that `frames()` yielded last. `damages`: what was passed over.
    """

    def __init__(self, path: Path, past_damage: bool = False) -> None:
        """`past_damage`: go on after damage, at the next intact frame, instead of raising."""
        self.path, self._past_damage = path, past_damage
        self.num_torn_bytes = 0
        self.checksum = 0
        self.damages: list[Damage] = []

    def frames(self) -> Iterator[Frame]:
        """(JSON values, arrays) of every whole frame; arrays have the shape and dtype they were written with, in
        little-endian order. Raises JournalError for a file that is no journal's, or unreadable, and JournalDamage.
        """
        try:
            with open_regular(self.path) as file:
                size = file.seek(0, 2)
                file.seek(0)
                begin = file.read(len(MAGIC))
                if begin != MAGIC:
                    if size < len(MAGIC) and MAGIC.startswith(begin):
                        self.num_torn_bytes = size
                        return
                    if not self._past_damage:
                        raise JournalError(f"{self.path}: not a file of a rollout journal (byte 0)")
                    end, follows = _next_intact(file, size, 0)
                    self._note(Damage(0, end, 1, "the file does not begin as a journal's", follows))
                    file.seek(end)
                yield from self._all(file, size)
        except OSError as error:
            raise JournalError(f"{self.path}: cannot be read: {error.strerror or error}") from error

    def _all(self, file: BinaryIO, size: int) -> Iterator[Frame]:
        number = 0
        while (start := file.tell()) < size:
            number += 1
            found = _read_frame(file, size - start)
            if isinstance(found, bytes):
                try:
                    decoded = _decode(found)
                except (ValueError, KeyError, TypeError, AttributeError, struct.error, RecursionError) as error:
                    found = f"its checksum holds, and its content is no record ({type(error).__name__}: {error})"
                else:
                    self.checksum = zlib.crc32(found)
                    beats.beat()  # with routed experts, reading a step's file can take minutes
                    yield decoded
                    continue
            end, follows = _next_intact(file, size, start + 1)
            if found is None and not follows:
                self.num_torn_bytes = size - start
                return
            self._note(Damage(start, end, number, found or "its length points past the frames that follow", follows))
            file.seek(end)

    def _note(self, damage: Damage) -> None:
        if not self._past_damage:
            raise JournalDamage(self.path, damage)
        self.damages.append(damage)


def _read_frame(file: BinaryIO, num_left: int) -> bytes | str | None:
    """The payload of the frame here; what is wrong with it; or None where it is the beginning of a frame that was cut
    off. `num_left`: bytes to the file's end.
    """
    head = file.read(_FRAME.size)
    if len(head) < _FRAME.size:
        return None
    length, checksum = _FRAME.unpack(head)
    if length < _LENGTH.size:
        return f"it says that it has {length} bytes"
    num_left -= _FRAME.size
    payload = file.read(min(length, num_left))
    if length <= num_left:
        return payload if zlib.crc32(payload) == checksum else "its checksum does not hold"
    if zlib.crc32(payload) == checksum:
        return f"it says that it has {length} bytes, and has {num_left}"
    return _of_cut_frame(payload, length)


def _of_cut_frame(payload: bytes, length: int) -> str | None:
    """What is wrong with the first bytes of a frame of `length` bytes; None where nothing is but that it ends early."""
    text = payload[_LENGTH.size :]
    if len(text) < len(_JSON_BEGIN) and length > _LARGE_FRAME:
        return f"it says that it has {length} bytes"
    if len(payload) < _LENGTH.size:
        return None
    (num_text,) = _LENGTH.unpack_from(payload)
    if num_text > length - _LENGTH.size or not _JSON_BEGIN.startswith(text[: len(_JSON_BEGIN)]):
        return "it does not begin as a record"
    if len(text) < num_text:
        return _of_cut_text(text)
    try:
        layout = json.loads(text[:num_text])["arrays"]
        own = sum(np.dtype(dtype).itemsize * math.prod(shape) for dtype, shape in layout.values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return "its JSON is none"
    own += _LENGTH.size + num_text
    return None if own == length else f"it says that it has {length} bytes, and its content needs {own}"


def _of_cut_text(text: bytes) -> str | None:
    """The same of the JSON's first bytes."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        is_cut = error.msg.startswith("Unterminated string") or error.pos >= len(text) - _LONGEST_WORD
        return None if is_cut else "its JSON is none"
    except (ValueError, RecursionError):
        return "its JSON is none"
    return "its JSON ends early"


def _next_intact(file: BinaryIO, size: int, start: int) -> tuple[int, bool]:
    """(the place of the first frame from byte `start` on whose checksum holds, True), or (`size`, False)."""
    if start >= size:
        return size, False
    with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as data:
        place = start + _JSON_PLACE
        while (place := data.find(_JSON_BEGIN, place)) >= 0:
            beats.beat()
            frame = place - _JSON_PLACE
            length, checksum = _FRAME.unpack_from(data, frame)
            (num_text,) = _LENGTH.unpack_from(data, frame + _FRAME.size)
            end = frame + _FRAME.size + length
            if num_text + _LENGTH.size <= length and end <= size:
                with memoryview(data) as view, view[frame + _FRAME.size : end] as payload:
                    holds = zlib.crc32(payload) == checksum
                if holds:
                    return frame, True
            place += 1
    return size, False


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

"""The experts that a server sent each token to: out of an answer's base64, into the type they are kept in.

Owns the wire form of routes: base64 of little-endian int32. They are nearly all of an answer (four fifths of a megabyte
for 300 tokens of a model with 94 layers), so they never pass through the JSON parser, and they are decoded in threads
beside the event loop, which goes on reading meanwhile: decoder and numpy release the interpreter's lock.
"""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import pybase64

from gspo_mega.base.records import route_type

_KEY = b'"routed_experts":'
# Characters that are decoded at once: they and their numbers fit into a core's cache. A multiple of 16, which are three
# numbers.
_BLOCK = 16 * 2**14


class EncodedRoutes:
    """The base64 of an answer's routes, which its JSON had at `meta_info.routed_experts`."""

    def __init__(self, text: memoryview) -> None:
        self.text = text

    def put_into(self, report: Any) -> None:
        """Take the place of the empty string that `cut_routes` left."""
        meta = report.get("meta_info") if isinstance(report, dict) else None
        if isinstance(meta, dict) and meta.get("routed_experts") == "":
            meta["routed_experts"] = self


def cut_routes(event: bytes | bytearray) -> tuple[bytes | bytearray, EncodedRoutes | None]:
    """A report's JSON with an empty string in place of its routes, and these; unchanged where it has none.

    A quote inside of a JSON string is escaped, so the key is found in no text. The string ends at the next quote:
    base64 has none.
    """
    start = event.find(_KEY)
    if start < 0:
        return event, None
    start += len(_KEY)
    while event[start : start + 1] == b" ":
        start += 1
    end = event.find(b'"', start + 1)
    if event[start : start + 1] != b'"' or end < 0:
        return event, None
    return event[: start + 1] + event[end:], EncodedRoutes(memoryview(event)[start + 1 : end])


def decode_routes(text: str | bytes | memoryview, num_experts: int) -> np.ndarray:
    """All numbers of base64 of int32, in one dimension, as `route_type(num_experts)`. Raises ValueError saying what is
    wrong with them.
    """
    characters = memoryview(text.encode() if isinstance(text, str) else text)
    padding = bytes(characters[-2:]).count(b"=")
    count, rest = divmod(len(characters) // 4 * 3 - padding, 4)
    if len(characters) % 4 or rest:
        raise ValueError(f"routed_experts is not base64 of int32: {len(characters)} characters")
    routes = np.empty(count, route_type(num_experts))
    done = 0
    for start in range(0, len(characters), _BLOCK):
        try:
            data = pybase64.b64decode_as_bytearray(characters[start : start + _BLOCK], validate=True)
            numbers = np.frombuffer(data, "<u4")
            routes[done : done + len(numbers)] = numbers
        except ValueError as error:  # binascii.Error, too
            raise ValueError(f"routed_experts is not base64 of int32: {error}") from error
        if numbers.size and numbers.max() >= num_experts:
            signed = numbers.view("<i4")
            raise ValueError(f"routed experts from {signed.min()} to {signed.max()}; 0 to {num_experts - 1} exist")
        done += len(numbers)
    if done != count:
        raise ValueError(f"routed_experts is not base64 of int32: {done} numbers in {len(characters)} characters")
    return routes


async def decode_routes_of(report: Any, num_experts: int) -> None:
    """Put the numbers in the place of the base64 that `cut_routes` took out of this report. Raises ValueError."""
    meta = report.get("meta_info") if isinstance(report, dict) else None
    if isinstance(meta, dict) and isinstance(encoded := meta.get("routed_experts"), EncodedRoutes):
        decoding = asyncio.get_running_loop().run_in_executor(_decoders(), decode_routes, encoded.text, num_experts)
        meta["routed_experts"] = await decoding


@cache
def _decoders() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0)), thread_name_prefix="routes")

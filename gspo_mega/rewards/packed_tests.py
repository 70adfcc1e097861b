"""The tests of LiveCodeBench's rows: texts of JSON, or compressed ones, and the function that starter code names.

Owns how such texts are read: compressed tests are a pickled text, which is read without running anything.
"""

from __future__ import annotations

import ast
import base64
import binascii
import json
import pickletools
import zlib
from typing import Any

KEYS = ("public_test_cases", "private_test_cases")
# What LiveCodeBench's own harness runs before a program: the names of these modules, their functions and classes, and a
# higher bound on recursion. Its starter code uses `List` without importing it.
_MODULES = (
    "string re datetime collections heapq bisect copy math random statistics itertools functools operator io sys json"
)
PRELUDE = (
    "".join(f"from {name} import *\n" for name in [*_MODULES.split(), "builtins", "typing"])
    + "".join(f"import {name}\n" for name in _MODULES.split())
    + "sys.setrecursionlimit(50000)\n"
)
_MOST_BYTES = 1024**3
# What a pickle of one text is made of, beside the text.
_AROUND = {"PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT", "STOP"}


def unpacked(row: dict[str, Any]) -> tuple[list[Any], str | None]:
    """The tests of a row's public and private test cases, and the function that functional ones call. Raises ValueError
    with what is wrong.
    """
    tests = [test for key in KEYS if row.get(key) for test in _tests(key, row[key])]
    return tests, _function_of(row.get("metadata"), row.get("starter_code"))


def _tests(key: str, value: Any) -> list[Any]:
    if isinstance(value, str):
        text = value if value.lstrip()[:1] == "[" else _decompressed(key, value)
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            raise ValueError(f"`{key}` is no JSON: {text[:60]!r}") from None
    if not isinstance(value, list):
        raise ValueError(f"`{key}` is {type(value).__name__}, no list of tests")
    return value


def _decompressed(key: str, packed: str) -> str:
    """base64 of zlib of a pickled text."""
    try:
        stream = zlib.decompressobj()
        content = stream.decompress(base64.b64decode(packed, validate=True), _MOST_BYTES)
    except (binascii.Error, zlib.error, ValueError) as error:
        raise ValueError(f"`{key}` is neither JSON nor base64 of compressed tests: {error}") from None
    if stream.unconsumed_tail:
        raise ValueError(f"`{key}` has more than {_MOST_BYTES} bytes of tests")
    texts = []
    try:
        for operation, argument, _ in pickletools.genops(content):
            if "UNICODE" in operation.name:
                texts.append(argument)
            elif operation.name not in _AROUND:
                raise ValueError(f"it holds {operation.name}")
    except Exception as error:  # pickletools raises several kinds for bytes that are no pickle
        raise ValueError(f"`{key}` is no pickled text: {error}") from None
    if len(texts) != 1:
        raise ValueError(f"`{key}` is no pickled text: it holds {len(texts)}")
    return texts[0]


def _function_of(metadata: Any, starter: Any) -> str | None:
    """The name that `metadata` gives (func_name), or that of the last function which the starter code begins."""
    if isinstance(metadata, str):
        try:
            metadata = json.loads(metadata)
        except ValueError:
            metadata = None
    if isinstance(metadata, dict) and isinstance(metadata.get("func_name"), str):
        return metadata["func_name"]
    if not isinstance(starter, str):
        return None
    for body in ("pass", "    pass", "        pass"):  # its last function has none
        try:
            tree = ast.parse(f"{starter.rstrip()}\n{body}\n")
        except (SyntaxError, ValueError):
            continue
        names = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        names = [name for name in names if not name.startswith("__")]
        return names[-1] if names else None
    return None

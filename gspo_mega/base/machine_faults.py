"""Tell what a machine or its network did to a process from errors that a defect of the program raises as well.

torch, gloo, NCCL and the C++ library have no types of their own for most of it: they raise RuntimeError or a subclass,
and only the text says what happened.
"""

from __future__ import annotations

import errno
import re

RAN_OUT_OF_MEMORY = "it ran out of memory"
_UNREACHABLE = "another rank cannot be reached"
# The last is oneDNN's, which has no memory for the code of a product; of a product that it does not know it says
# "could not create a primitive descriptor".
_NO_MEMORY = re.compile(
    r"(?:can't|cannot|could not) allocate memory|not enough memory|out of memory|bad_alloc|failed to map segment"
    r"|could not create a primitive$",
    re.I,
)
_NO_PEER = re.compile(
    r"gloo.*(?:(?:reset|closed) by peer|broken pipe|timed out|timeout|unreachable|refused|aborted)"
    r"|ncclRemoteError|ncclSystemError|NCCL.*(?:remote process exited|network error|timeout)",
    re.I,
)
_MOST_CHARACTERS = 300


def machine_fault(error: BaseException) -> str | None:
    """Return what the machine or its network did, in words, if `error` or what caused it says so; else None."""
    one: BaseException | None = error
    while one is not None:
        text = " ".join(str(one).split())
        said = f": {text[:_MOST_CHARACTERS]}{'...' * (len(text) > _MOST_CHARACTERS)}" if text else ""
        kind = type(one).__name__
        is_memory = isinstance(one, MemoryError) or kind == "OutOfMemoryError"
        if is_memory or (isinstance(one, OSError) and one.errno == errno.ENOMEM):
            return RAN_OUT_OF_MEMORY + said
        if isinstance(one, (RuntimeError, ImportError)) and _NO_MEMORY.search(text):
            return RAN_OUT_OF_MEMORY + said
        if isinstance(one, RuntimeError) and (kind == "DistNetworkError" or _NO_PEER.search(text)):
            return _UNREACHABLE + said
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
    return None

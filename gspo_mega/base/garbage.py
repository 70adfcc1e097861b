"""Fewer runs of Python's garbage collector where they cost much time, and freed memory that a process keeps.

A large import makes hundreds of thousands of objects that live until the process ends. Python's collector walks all of
them again and again during the import, which is a quarter to a third of the time of importing torch with Megatron or
SGLang. Use `uncollected` there.

While the records of a batch pile up, Python walks all of them whenever they have grown by a quarter. It walks each
record of a large batch five times, which took half of the time of 20 000 short responses. Records have no cycles, so
they are freed without the collector. Inside `RareCollections`, garbage with cycles (from a user's episodes) is looked
for only when everything has doubled.

glibc takes each tensor of over 32 MiB from the kernel and gives it back when it is freed, so that the kernel fills
every page with zeros again in the next step. `keep_freed_memory` ends that where tensors are in the host's memory.

Standard library only, so that every room may import it.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Self

# A threshold that no count reaches.
_NEVER = 2**31 - 1
# mallopt's parameters M_TRIM_THRESHOLD and M_MMAP_THRESHOLD. Larger values save no more time and take more memory: with
# 2 GiB for both a rank of SmolLM2 grew from 5.8 to 7.8 GB, with these to 6.0 GB.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT_BYTES, _MAPPED_BYTES = 2**30, 2**27
# The first full collection comes after this many collections of younger objects: about 1.5 million objects stayed then.
_FIRST = 200


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect no garbage inside the block, and never look again at the objects made in it. Nested blocks are one block.

    Use it around imports, whose objects stay. A cycle of garbage that is made in the block is freed only at exit.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        # Python's last collection frees these objects too. Compiled libraries would report what is left then.
        atexit.unregister(gc.unfreeze)
        atexit.register(gc.unfreeze)


def keep_freed_memory(variables: Mapping[str, str]) -> None:
    """Have this process keep freed memory, up to 1 GiB, for later tensors instead of returning it to the kernel:
    allocations under 128 MiB come from glibc's heap. Does nothing with another C library, or where GLIBC_TUNABLES or
    MALLOC_* decide in `variables`, the process's environment.
    """
    chosen = "glibc.malloc" in variables.get("GLIBC_TUNABLES", "")
    if chosen or any(name.startswith("MALLOC_") for name in variables):
        return
    with suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, _MAPPED_BYTES)
        mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)


class RareCollections:
    """A context manager in which only `collect_if_doubled` runs full collections. Do not nest it."""

    def __init__(self) -> None:
        self._thresholds = gc.get_threshold()
        self._due = _FIRST

    def __enter__(self) -> Self:
        gc.set_threshold(*self._thresholds[:2], _NEVER)
        return self

    def __exit__(self, *_: object) -> None:
        gc.set_threshold(*self._thresholds)

    def collect_if_doubled(self) -> None:
        """Run a full collection if the number of objects has doubled. Call it from time to time."""
        if gc.isenabled() and gc.get_count()[2] >= self._due:
            gc.collect()
            self._due *= 2

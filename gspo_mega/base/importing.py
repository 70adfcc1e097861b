"""Imports without garbage collection in between.

A large import makes hundreds of thousands of objects that live until the process ends, and Python's collector walks
all of them again and again meanwhile: a quarter to a third of what importing torch with Megatron or SGLang takes.
Standard library only, so that every layer may import it.
"""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect no garbage inside the block, and never again look at what was made in it. Nested blocks are one block.

    Use it around imports, whose objects stay: a cycle of garbage that is made in the block is freed at exit alone.
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
        # Python's last collection frees these objects, too: compiled libraries report what is left then.
        atexit.unregister(gc.unfreeze)
        atexit.register(gc.unfreeze)

"""How often Python's garbage collector walks everything while the records of a batch pile up.

It does so whenever they have grown by a quarter: each record of a large batch is walked five times, which took half of
the time of 20 000 short responses. Records have no cycles and are freed without it. Owns the rule: while the trainer
waits for a batch, garbage with cycles (of a user's episodes) is looked for when everything has doubled.

Imports without garbage collection in between.

A large import makes hundreds of thousands of objects that live until the process ends, and Python's collector walks
all of them again and again meanwhile: a quarter to a third of what importing torch with Megatron or SGLang takes.
Standard library only, so that every layer may import it.
"""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self


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


_NEVER = 2**31 - 1
# Collections of younger objects before the first of everything: about 1.5 million objects that stayed.
_FIRST = 200


class RareCollections:
    """A context manager, in which everything is collected by `look` alone. Not to be nested."""

    def __init__(self) -> None:
        self._thresholds = gc.get_threshold()
        self._due = _FIRST

    def __enter__(self) -> Self:
        gc.set_threshold(*self._thresholds[:2], _NEVER)
        return self

    def __exit__(self, *_: object) -> None:
        gc.set_threshold(*self._thresholds)

    def look(self) -> None:
        """Collect everything if it has doubled. To be called now and then."""
        if gc.isenabled() and gc.get_count()[2] >= self._due:
            gc.collect()
            self._due *= 2

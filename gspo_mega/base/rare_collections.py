"""How often Python's garbage collector walks everything while the records of a batch pile up.

It does so whenever they have grown by a quarter: each record of a large batch is walked five times, which took half of
the time of 20 000 short responses. Records have no cycles and are freed without it. Owns the rule: while the trainer
waits for a batch, garbage with cycles (of a user's episodes) is looked for when everything has doubled.
"""

from __future__ import annotations

import gc
from typing import Self

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

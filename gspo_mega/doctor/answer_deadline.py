"""How long a doctor may take in all. Standard library alone."""

from __future__ import annotations

import time

# A first import of torch by many nodes from one shared folder takes minutes; ranks wait as long for each other at their
# start.
DEADLINE_SECONDS = 600.0
# An import beyond this is told, though nothing is wrong: every start of every rank and server takes it too.
SLOW_SECONDS = 60.0
_LEAST_SECONDS = 1.0


class AnswerDeadline:
    """One bound for all checks of a machine, in order: what one leaves, the next ones have."""

    def __init__(self, seconds: float = DEADLINE_SECONDS) -> None:
        self.seconds = seconds
        self._deadline = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds, never none: a check whose answer is there at once is not refused for those before it."""
        return max(_LEAST_SECONDS, self._deadline - time.monotonic())

"""One deadline for all checks of a machine. Standard library alone."""

from __future__ import annotations

import time

# When many nodes import torch for the first time from one shared folder, it takes minutes. Ranks wait for each other
# this long at their start.
DEADLINE_SECONDS = 600.0
# A slower import is reported, although nothing is wrong: every start of every rank and server takes as long.
SLOW_SECONDS = 60.0
_LEAST_SECONDS = 1.0


class AnswerDeadline:
    """One time limit for all checks of a machine, in order: each check gets the time that those before it left."""

    def __init__(self, seconds: float = DEADLINE_SECONDS) -> None:
        self.seconds = seconds
        self._deadline = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds left, at least one: a quick check still runs after slow ones."""
        return max(_LEAST_SECONDS, self._deadline - time.monotonic())

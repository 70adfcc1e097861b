"""Bridge the time in which Slurm's controller does not answer: ranks and servers need it only to start and to end.

Owns the time limit, one for all questions of a job. The questions themselves are in `scontrol.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from gspo_mega.launcher.slurm.scontrol import NoAnswerError

_T = TypeVar("_T")
# How long a run continues without an answer: the controller may be restarted or moved.
NO_ANSWER_SECONDS = 600.0
ASK_AGAIN_SECONDS = 5.0


class Answers:
    """The answers of Slurm's controller. `say` shows a line in the job's log."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._missing_since: float | None = None

    @property
    def are_missing(self) -> bool:
        """Whether the last question had no answer."""
        return self._missing_since is not None

    @contextmanager
    def or_later(self) -> Iterator[None]:
        """Wrap questions that are repeated later: without an answer the block ends, with one warning for all of them.
        Raises NoAnswerError when Slurm has not answered for `NO_ANSWER_SECONDS`.
        """
        try:
            yield
        except NoAnswerError as error:
            now = time.monotonic()
            if self._missing_since is None:
                self._missing_since = now
                self._say(
                    f"warning  Slurm does not answer; the run continues without it for {NO_ANSWER_SECONDS / 60:.0f} min"
                    f" ({error})"
                )
            elif now - self._missing_since > NO_ANSWER_SECONDS:
                raise
        else:
            if self._missing_since is not None:
                self._missing_since = None
                self._say("Slurm answers again.")

    def demand(self, question: Callable[[], _T]) -> _T:
        """Ask until there is an answer. Raises NoAnswerError as `or_later` does."""
        while True:
            with self.or_later():
                return question()
            time.sleep(ASK_AGAIN_SECONDS)

    def insist(self, question: Callable[[], _T], unless: Callable[[], bool]) -> _T | None:
        """As `demand`; None once `unless` is true. Raises NoAnswerError as `or_later` does."""
        while not unless():
            with self.or_later():
                return question()
            time.sleep(ASK_AGAIN_SECONDS)
        return None

"""How long a run does without Slurm's answer: ranks and servers need its controller only to be started and to be ended.

Owns that patience, of all questions of a job together. What is asked is `scontrol.py`'s.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from gspo_mega.launcher.slurm.scontrol import NoAnswerError

_T = TypeVar("_T")
# So long a run goes on without an answer: the controller may be restarted or moved.
NO_ANSWER_SECONDS = 600.0
ASK_AGAIN_SECONDS = 5.0


class Answers:
    """`say` shows a line in the job's log."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._missing_since: float | None = None

    @property
    def are_missing(self) -> bool:
        """Whether the last question had no answer."""
        return self._missing_since is not None

    @contextmanager
    def or_later(self) -> Iterator[None]:
        """Around questions that are asked again later: without an answer the block is left, with one warning for all of
        them. Raises NoAnswerError when Slurm has not answered for `NO_ANSWER_SECONDS`.
        """
        try:
            yield
        except NoAnswerError as error:
            now = time.monotonic()
            if self._missing_since is None:
                self._missing_since = now
                self._say(
                    f"warning  Slurm does not answer; the run goes on for {NO_ANSWER_SECONDS / 60:.0f} min without"
                    f" ({error})"
                )
            elif now - self._missing_since > NO_ANSWER_SECONDS:
                raise
        else:
            if self._missing_since is not None:
                self._missing_since = None
                self._say("Slurm answers again.")

    def demand(self, question: Callable[[], _T]) -> _T:
        """The answer, however often it has to be asked for. Raises NoAnswerError as `or_later` does."""
        while True:
            with self.or_later():
                return question()
            time.sleep(ASK_AGAIN_SECONDS)

    def insist(self, question: Callable[[], _T], unless: Callable[[], bool]) -> _T | None:
        """The same; None once `unless`. Raises NoAnswerError as `or_later` does."""
        while not unless():
            with self.or_later():
                return question()
            time.sleep(ASK_AGAIN_SECONDS)
        return None

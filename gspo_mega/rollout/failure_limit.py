"""How many failures of one sort a batch may have: those of its episodes, and those of its scorings.

Owns the limit and its message. What failed, and what follows for a group, is `sampled_groups.py`'s.
"""

from __future__ import annotations

from gspo_mega.base.errors import GspoMegaError

_SHOWN = 5


class FailureLimit:
    """Failures of one batch. One of several is always allowed where any is: of few, one is no measure of a share.

    Attributes: num, how many so far; num_done, of how many that ended.
    """

    def __init__(
        self,
        what: str,
        section: str,
        fraction: float,
        most_done: float,
        least_done: int,
        error: type[GspoMegaError],
    ) -> None:
        """`what` fails, in words. `fraction`: `section.max_failed_fraction`, of `most_done` at the end of the largest
        batch; more end it at once with `error`. `least_done`: a batch counts as so many, where fewer of them ended
        since the batch before.
        """
        self._least = least_done
        self.begin()
        self._what, self._section, self._fraction, self._error = what, section, fraction, error
        self._most = self._allowed(most_done)

    def begin(self) -> None:
        """The next batch begins."""
        self.num = self.num_done = 0
        self._first: list[str] = []

    def add(self, failure: str | None) -> None:
        """Count what ended: with this failure, or None."""
        self.num_done += 1
        if failure is not None:
            self.num += 1
            if len(self._first) < _SHOWN:
                self._first.append(failure)

    def check(self) -> None:
        """Raise the error as soon as it is certain that too many fail."""
        if self.num > self._most:
            raise self._too_many()

    def check_end(self) -> None:
        """Raise the error at the end of the batch if too many failed."""
        if self.num > self._allowed(max(self.num_done, self._least)):
            raise self._too_many()

    def _allowed(self, num_done: float) -> float:
        share = self._fraction * num_done
        return max(share, 1.0) if self._fraction > 0 and num_done > 1 else share

    def _too_many(self) -> GspoMegaError:
        return self._error(
            f"{self}, more than {self._section}.max_failed_fraction {self._fraction:g} allows in a step. The"
            f" first:{self.shown()}"
        )

    def __str__(self) -> str:
        return f"{self.num} of {self.num_done} {self._what} failed"

    def shown(self) -> str:
        """The first failures, a line each."""
        return "".join(f"\n  {line}" for line in self._first)

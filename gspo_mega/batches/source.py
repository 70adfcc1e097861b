"""Where rollout batches come from: the protocols that `live.py`, `recorded.py` and `journalled.py` implement.

A run has one line of calls: the loop asks `JournalledSource.take`, which asks the source that it wraps for the groups
that the journal does not have. Owns no code that samples or reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from gspo_mega.records import Group, Prompt, RolloutBatch, Trajectory


def keep_nothing(trajectory: Trajectory) -> None:
    """The `keep` of a caller that needs no trajectory before its batch is complete."""


class Source(Protocol):
    """Rollout batches by step, and the position in the prompts that they come from. Rank 0 only."""

    def take(self, step: int, weight_version: int, on_wait: Callable[[], None]) -> RolloutBatch:
        """The complete, scored batch of `step`, for a policy of `weight_version`.

        Calls `on_wait` again and again while it waits. What `on_wait` raises ends the batch; its prompts are then the
        next ones again.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """The position in the prompts, as JSON types."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position that `state_dict` returned. Raises DataError where the prompts have changed."""
        ...

    def describe(self) -> list[str]:
        """Lines for the user about the data."""
        ...


class ContinuableSource(Source, Protocol):
    """A source that can complete a batch, some groups of which exist already."""

    def take(
        self,
        step: int,
        weight_version: int,
        on_wait: Callable[[], None],
        known: Mapping[int, Group] = ...,
        keep: Callable[[Trajectory], None] = ...,
    ) -> RolloutBatch:
        """As `Source.take`. `known`: groups that exist already, by their number in the batch. `keep` is called for
        every other trajectory as it completes; what it raises ends the batch as well.
        """
        ...

    def made_by(self, step: int) -> dict[str, str]:
        """Fingerprints of everything that determines the groups of `step`, apart from the weights."""
        ...

    def upcoming(self, step: int, count: int) -> list[Prompt]:
        """The prompts of groups 0 to `count` - 1 of `step`. The position in the prompts does not change."""
        ...

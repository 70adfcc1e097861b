"""Where rollout batches come from: the protocols that `live.py`, `recorded.py` and `journalled.py` implement.

A run has one line of calls: the loop asks `JournalledSource.take`, which asks the source that it wraps for the groups
that the journal does not have. Owns no code that samples or reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from gspo_mega.base.episode_records import Episode
from gspo_mega.base.records import Prompt
from gspo_mega.base.rollout_batch import Group, RolloutBatch


def keep_nothing(episode: Episode) -> None:
    """The `keep` of a caller that needs no episode before its batch is complete."""


def admit_nothing(number: int, prompt: Prompt, weight_version: int) -> None:
    """The `admit` of a caller that need not know when the sampling of a group begins."""


def open_numbers(position: Mapping[str, Any], numbers: Iterable[int]) -> set[int]:
    """Which of the group numbers `numbers` later steps may consume, at a position that `Source.state_dict` returned."""
    tickets = position.get("tickets", {"first": 0, "done": []})
    done = set(tickets["done"])
    return {number for number in numbers if number >= tickets["first"] and number not in done}


class Source(Protocol):
    """Rollout batches by step, and the position in the prompts that they come from. Rank 0 only."""

    def take(self, step: int, weight_version: int, on_wait: Callable[[], None]) -> RolloutBatch:
        """The complete, scored batch of `step`, for a policy of `weight_version`.

        Calls `on_wait` again and again while it waits. What `on_wait` raises ends the batch; its prompts are then the
        next ones again.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """The position in the prompts behind the batch that was taken last, as JSON types.

        Where groups of later batches may have been sampled already, it is that of the first such group, and its key
        `tickets` has that group's number, `first`, and `done`: the numbers behind it that are consumed or dropped.
        Without the key, the groups of each batch are numbered from 0.
        """
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position that `state_dict` returned. Raises DataError where the prompts have changed."""
        ...

    def describe(self) -> list[str]:
        """Lines for the user about the data."""
        ...


class ContinuableSource(Source, Protocol):
    """A source that can complete a batch, some groups of which exist already."""

    def on_ready(self, call: Callable[[int, list[Group]], None]) -> None:
        """Have `call` get a step and its groups, from any thread, where these are complete before the step is asked
        for. The batch may still be of others: `call` is then called again, or nobody knew.
        """
        ...

    def take(
        self,
        step: int,
        weight_version: int,
        on_wait: Callable[[], None],
        known: Mapping[int, Group] = ...,
        keep: Callable[[Episode], None] = ...,
        admit: Callable[[int, Prompt, int], None] = ...,
    ) -> RolloutBatch:
        """As `Source.take`. `known`: groups that exist already, by their number, in the order in which they completed;
        they may lack episodes. `keep` is called for every other episode as it completes, `admit` with number, prompt
        and weight version when the sampling of a group begins. A source that samples ahead calls them from its own
        thread, between two batches as well; what they raise ends the sampling.
        """
        ...

    def made_by(self, step: int) -> dict[str, str]:
        """Fingerprints of everything that determines the groups of `step`, apart from the weights."""
        ...

    def due(self, step: int, numbers: Iterable[int]) -> dict[int, Prompt]:
        """The prompts of the groups of these numbers, as `step` would sample them, by number; a group that is not due
        is left out. The position in the prompts does not change.
        """
        ...

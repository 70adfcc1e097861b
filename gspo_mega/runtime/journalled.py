"""Rollout batches by way of the journal: what is there already is taken, what is missing is sampled and written down.

Owns which of the recorded groups of a step may stand for new ones. Sampling, or reading another run's record, is given to
it; the files are `gspo_mega.journal`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from gspo_mega import kill_points
from gspo_mega.journal.journal import Journal, StepRecord
from gspo_mega.records import Group, Prompt, RolloutBatch, Trajectory


class Order(Protocol):
    """Where the run is in its prompts."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class BatchSource(Protocol):
    """Where new groups come from: servers, or another run's journal."""

    def upcoming(self, step: int, count: int) -> list[Prompt]:
        """The next `count` prompts that groups 0, 1, ... of `step` will be about; draws nothing."""
        ...

    def sample(
        self, step: int, known: Mapping[int, Group], keep: Callable[[Trajectory], None], on_wait: Callable[[], None]
    ) -> RolloutBatch:
        """The batch of `step`, in which the groups `known` are already there. Calls `keep` for every other trajectory as
        it completes. What `on_wait` or `keep` raises ends the batch; its prompts are then the next ones again."""
        ...


class JournalledBatches:
    """`take(step)` of a run. `keep_last`: how many steps' files are kept, None for all."""

    def __init__(self, journal: Journal, order: Order, source: BatchSource, group_size: int, keep_last: int | None) -> None:
        self._journal, self._order, self._source = journal, order, source
        self._group_size, self._keep_last = group_size, keep_last

    def take(self, step: int, weight_version: int, on_wait: Callable[[], None], say: Callable[[str], None]) -> RolloutBatch:
        """The rollout batch of `step`, sampled from `weight_version`. In the journal, whole and on disk, when this returns.

        A complete recorded batch is returned as it was. Records of another weight version, or about other prompts than are
        due, are not used, and `say` tells. Raises JournalError where the journal cannot be written.
        """
        record = self._usable(step, weight_version, say)
        if record is not None and record.batch is not None and record.prompts is not None:
            self._order.load_state_dict(record.prompts)
            say(f"step {step + 1}: its {len(record.batch.trajectories)} trajectories are in the journal and are not sampled again")
            self._prune()
            return record.batch
        # A failed scoring says nothing about the response, and what made it fail may have been mended: such a group is sampled again.
        known = {} if record is None else {n: g for n, g in record.complete_groups().items() if len(g.scored) == len(g.trajectories)}
        if record is not None:
            lost = sum(len(group.trajectories) for number, group in record.groups.items() if number not in known)
            torn = f", {record.num_torn_bytes} torn bytes cut off" if record.num_torn_bytes else ""
            say(f"step {step + 1}: {len(known)} complete groups of the journal are taken over; {lost} trajectories of others are sampled again{torn}")
        with self._journal.write(step, weight_version, self._group_size, known) as writer:

            def keep(trajectory: Trajectory) -> None:
                kill_points.reached("rollout.trajectory")
                writer.add(trajectory)

            batch = self._source.sample(step, known, keep, on_wait)
            writer.finish(batch, self._order.state_dict())
        self._prune()
        return batch

    def _prune(self) -> None:
        if self._keep_last is not None:
            self._journal.prune(self._keep_last)

    def _usable(self, step: int, weight_version: int, say: Callable[[str], None]) -> StepRecord | None:
        record = self._journal.read(step)
        if record is None:
            return None
        reason = None
        if record.weight_version != weight_version:
            reason = f"weight version {record.weight_version} sampled them, and the run holds {weight_version}"
        elif record.group_size != self._group_size:
            reason = f"their groups are of {record.group_size} samples, the run's of {self._group_size}"
        elif record.groups:
            due = self._source.upcoming(step, max(record.groups) + 1)
            if any(due[number].token_ids != group.prompt.token_ids for number, group in record.groups.items()):
                reason = "they are about other prompts than those that are due"
        if reason is None:
            return record
        say(f"notice   step {step + 1}: the journal's trajectories are not used: {reason}")
        return None

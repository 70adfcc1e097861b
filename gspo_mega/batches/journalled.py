"""Rollout batches through the run's journal: recorded groups are used again, missing groups come from another source.

Owns which of the recorded groups of a step may stand for new ones: those that were made by what would make the new ones
(weights, rewards, settings; `provenance.py`), for the prompts that are due. Others are moved aside, and the user is
shown why. New groups come from the wrapped source; the files are `gspo_mega.journal`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo_mega import kill_points
from gspo_mega.batches.provenance import REASONS, first_weights, next_history
from gspo_mega.batches.source import ContinuableSource
from gspo_mega.checkpoint.folders import step_of
from gspo_mega.config.schema import Config
from gspo_mega.journal.journal import Journal, StepRecord
from gspo_mega.records import Group, RolloutBatch, Trajectory
from gspo_mega.rollout.freshness import Freshness

if TYPE_CHECKING:
    from gspo_mega.checkpoint.train_state import TrainState


def journalled_source(
    config: Config, journal: Journal, source: ContinuableSource, say: Callable[[str], None]
) -> JournalledSource:
    """`source` with the run's journal around it. `say` shows a line to the user."""
    return JournalledSource(
        journal,
        source,
        config.batch.group_size,
        say=say,
        freshness=Freshness(config.rollout.max_staleness),
        keep_last=config.journal.keep_last,
        prune_routes=config.journal.prune_routes and config.rollout.return_routed_experts,
        needs_routes=config.moe.routing_replay == "R3",
        trains=config.train is None or not config.train.rollouts_only,
        first_weights=lambda: first_weights(config),
    )


class JournalledSource:
    """The `Source` that a run trains on, and the part of the run's state that a checkpoint keeps of it.

    Attributes:
        history: the fingerprint of the weights that the next step is sampled from.
    """

    def __init__(
        self,
        journal: Journal,
        source: ContinuableSource,
        group_size: int,
        *,
        say: Callable[[str], None],
        freshness: Freshness,
        keep_last: int | None = None,
        prune_routes: bool = False,
        needs_routes: bool = False,
        trains: bool = True,
        first_weights: Callable[[], str] = lambda: "",
    ) -> None:
        """`freshness`: which weight versions a record may come from. `keep_last`: how many steps' files are kept, None
        for all. `prune_routes`: remove routed experts once a checkpoint contains the training on them. `needs_routes`:
        a record without its routed experts is not used. `trains`: each batch changes the weights. `first_weights`: the
        fingerprint of what a fresh run starts from.
        """
        self._journal, self._source, self._say, self._freshness = journal, source, say, freshness
        self._group_size, self._keep_last, self._prune_routes = group_size, keep_last, prune_routes
        self._needs_routes, self._trains, self._first_weights = needs_routes, trains, first_weights
        self.history = ""

    def restore(self, state: TrainState) -> None:
        """Continue from a checkpoint's state, or from a fresh one. Raises DataError where the prompts are others than
        those it had.
        """
        if state.prompts:
            self._source.load_state_dict(state.prompts)
        self.history = state.history or self._first_weights()

    def note(self, state: TrainState) -> None:
        """Put the position in the prompts and the history of the weights into `state`, for a checkpoint."""
        state.prompts, state.history = self._source.state_dict(), self.history

    def is_durable(self, checkpoint: Path) -> None:
        """A checkpoint is on disk: the routed experts of the steps before it are not needed to continue the run."""
        if self._prune_routes:
            self._journal.prune_routes(step_of(checkpoint))

    def state_dict(self) -> dict[str, Any]:
        return self._source.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._source.load_state_dict(state)

    def describe(self) -> list[str]:
        return self._source.describe()

    def take(self, step: int, weight_version: int, on_wait: Callable[[], None]) -> RolloutBatch:
        """The rollout batch of `step`, sampled from `weight_version`. The journal has all of it on disk when this
        returns.

        A complete recorded batch is returned as it was. Records of other weights, rewards or settings, or about other
        prompts than are due, are moved aside and not used, and the user is shown why. Raises JournalError where the
        journal cannot be written.
        """
        made_by = {**self._source.made_by(step), "weights": self.history}
        record = self._usable(step, weight_version, made_by)
        if record is not None and record.batch is not None and record.prompts is not None:
            self._source.load_state_dict(record.prompts)
            self._say(
                f"step {step + 1}: its {len(record.batch.trajectories)} trajectories are in the journal and are not"
                " sampled again"
            )
            self._advance(record.batch, record.checksums)
            return record.batch
        known = {} if record is None else _scored_groups(record)
        if record is not None:
            lost = sum(len(group.trajectories) for number, group in record.groups.items() if number not in known)
            torn = f", {record.num_torn_bytes} torn bytes cut off" if record.num_torn_bytes else ""
            self._say(
                f"step {step + 1}: {len(known)} complete groups of the journal are taken over; {lost} trajectories of"
                f" others are sampled again{torn}"
            )
        with self._journal.write(step, weight_version, self._group_size, known, made_by) as writer:

            def keep(trajectory: Trajectory) -> None:
                kill_points.reached("rollout.trajectory")
                writer.add(trajectory)

            batch = self._source.take(step, weight_version, on_wait, known, keep)
            writer.finish(batch, self._source.state_dict())
        self._advance(batch, writer.checksums)
        return batch

    def _advance(self, batch: RolloutBatch, checksums: Mapping[str, int]) -> None:
        if self._trains:
            self.history = next_history(self.history, batch, checksums)
        if self._keep_last is not None:
            self._journal.prune(self._keep_last)

    def _usable(self, step: int, weight_version: int, made_by: dict[str, str]) -> StepRecord | None:
        """The usable part of the step's record, if there is any; the rest is moved aside."""
        record = self._journal.read(step)
        if record is None:
            return None
        reason = self._reason_against(record, weight_version, made_by)
        if reason is not None:
            count = sum(len(group.trajectories) for group in record.groups.values())
            where = self._journal.put_aside(step)
            self._say(
                f"notice   step {step + 1}: the journal's {count} trajectories are not used: {reason}; they are moved"
                f" to {where.name}, and others sampled"
            )
            return None
        due = self._source.upcoming(step, max(record.groups) + 1) if record.groups else []
        others = [number for number, group in record.groups.items() if due[number] != group.prompt]
        if others:
            count = sum(len(record.groups.pop(number).trajectories) for number in others)
            where = self._journal.put_aside(step)
            record.batch = None
            self._say(
                f"notice   step {step + 1}: {count} of the journal's trajectories are not used: they are about other"
                " prompts than those that are due (or their answers have changed); the record is moved to"
                f" {where.name}, and these are sampled again"
            )
        return record

    def _reason_against(self, record: StepRecord, weight_version: int, made_by: dict[str, str]) -> str | None:
        if not self._freshness.admits(record.weight_version, weight_version):
            return f"weight version {record.weight_version} sampled them, and the run holds {weight_version}"
        if record.group_size != self._group_size:
            return f"their groups are of {record.group_size} samples, the run's of {self._group_size}"
        if not record.made_by:
            return "an earlier release recorded them without saying what made them"
        reasons = [
            REASONS.get(kind, f"another {kind} made them")
            for kind in made_by
            if record.made_by.get(kind) != made_by[kind]
        ]
        if self._needs_routes and record.routes_pruned:
            reasons.append(
                "their routed experts were pruned (journal.prune_routes), and moe.routing_replay R3 needs them"
            )
        return "; ".join(reasons) or None


def _scored_groups(record: StepRecord) -> dict[int, Group]:
    """The complete groups of `record` in which every trajectory has a reward, by number. A failed scoring says nothing
    about the response, and its cause may have been mended: such a group is sampled again.
    """
    return {n: g for n, g in record.complete_groups().items() if len(g.scored) == len(g.trajectories)}

"""Rank 0's side of a run that trains on another run's record: no server, no sampling, no scoring.

Stands in for `rollouts.RolloutSide` where `train.from_rollouts` names a run folder. What it hands out goes through the
run's own journal as well, so the folder holds what was trained on and a restarted step is the very same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gspo_mega.batches.journalled import batches_of
from gspo_mega.batches.provenance import next_history
from gspo_mega.config.schema import Config
from gspo_mega.errors import JournalError
from gspo_mega.journal.journal import Journal, StepRecord
from gspo_mega.records import Group, Prompt, RolloutBatch, Trajectory
from gspo_mega.run_folder import Attempt, RunFolder


class RecordedOrder:
    """The prompt order's state as the recording run left it, step by step."""

    def __init__(self) -> None:
        self._state: dict[str, Any] = {"sources": {}}

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state = state


class ReplaySide:
    """The recorded batches of the run folder `train.from_rollouts`. A context manager, as RolloutSide is."""

    def __init__(self, config: Config, attempt: Attempt) -> None:
        assert config.train is not None and config.train.from_rollouts is not None
        self.recorded = Journal(RunFolder(config.train.from_rollouts).journal_dir)
        self.prompts = RecordedOrder()
        self._last: StepRecord | None = None
        journal = Journal(attempt.run_folder.journal_dir)
        self.batches = batches_of(config, journal, self.prompts, self)

    def data_report(self) -> list[str]:
        return [
            f"data     the recorded rollouts of {self.recorded.folder.parent}; no server, no publish, no held-out"
            " evaluation"
        ]

    def take(
        self, step: int, weight_version: int, on_wait: Callable[[], None], say: Callable[[str], None]
    ) -> RolloutBatch:
        """The recorded batch of `step`. Raises JournalError where the record has none."""
        return self.batches.take(step, weight_version, on_wait, say)

    def made_by(self, step: int) -> dict[str, str]:
        checksums = self._read(step).checksums
        return {"recorded rollouts": next_history("", self._batch_of(step), checksums)}

    def upcoming(self, step: int, count: int) -> list[Prompt]:
        groups = self._read(step).groups
        nothing = Prompt("", "", (), "")
        return [groups[number].prompt if number in groups else nothing for number in range(count)]

    def sample(
        self, step: int, known: Mapping[int, Group], keep: Callable[[Trajectory], None], on_wait: Callable[[], None]
    ) -> RolloutBatch:
        record, batch = self._read(step), self._batch_of(step)
        assert record.prompts is not None
        for group in batch.groups:
            on_wait()
            for trajectory in group.trajectories if group.group_id not in known else ():
                keep(trajectory)
        self.prompts.load_state_dict(record.prompts)
        return batch

    def _batch_of(self, step: int) -> RolloutBatch:
        batch = self._read(step).batch
        assert batch is not None
        return batch

    def _read(self, step: int) -> StepRecord:
        if self._last is None or self._last.step != step:
            self._last = self.recorded.read(step)
        if self._last is None or self._last.batch is None:
            raise JournalError(
                f"train.from_rollouts: {self.recorded.folder.parent} has no complete rollout batch of step {step + 1}; "
                f"lower train.num_steps to {step} to train on what is there"
            )
        return self._last

    def __enter__(self) -> ReplaySide:
        return self

    def __exit__(self, *_: Any) -> None:
        self._last = None

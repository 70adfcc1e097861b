"""Rollout batches of another run's journal: no server, no sampling, no scoring.

Owns reading that journal (`train.from_rollouts`) step by step. The batches go through the run's own journal as well
(`journalled.py`), so the run folder holds what was trained on and a restarted step is the very same.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from gspo_mega.base import background
from gspo_mega.base.episode_records import Episode
from gspo_mega.base.errors import JournalError
from gspo_mega.base.records import Prompt
from gspo_mega.base.rollout_batch import Group, RolloutBatch
from gspo_mega.data.journal.journal import Journal
from gspo_mega.data.journal.step_record import StepRecord
from gspo_mega.train.provenance import next_history
from gspo_mega.train.source import admit_nothing, keep_nothing


class RecordedSource:
    """A `ContinuableSource` whose groups are those of the journal in the folder `journal_dir`. While a step trains, it
    reads the next one's batch.
    """

    def __init__(self, journal_dir: Path) -> None:
        self._recorded = Journal(journal_dir)
        self._position: dict[str, Any] = {"sources": {}}
        self._last: StepRecord | None = None
        self._next: tuple[int, concurrent.futures.Future[StepRecord | None]] | None = None
        self._on_ready: Callable[[int, list[Group]], None] = lambda step, groups: None

    def on_ready(self, call: Callable[[int, list[Group]], None]) -> None:
        self._on_ready = call

    def take(
        self,
        step: int,
        weight_version: int,
        on_wait: Callable[[], None],
        known: Mapping[int, Group] | None = None,
        keep: Callable[[Episode], None] = keep_nothing,
        admit: Callable[[int, Prompt, int], None] = admit_nothing,
    ) -> RolloutBatch:
        """The recorded batch of `step`, whatever `weight_version` is: the recording run's weights sampled it.

        Raises JournalError where the record has none.
        """
        record, batch = self._read(step)
        assert record.prompts is not None
        for group in batch.groups:
            on_wait()
            have = known[group.group_id].episodes if known is not None and group.group_id in known else []
            names = {episode.episode_id for episode in have}
            for episode in group.episodes:
                if episode.episode_id not in names:
                    keep(episode)
        self._position = record.prompts
        self._next = step + 1, background.begin("recorded rollouts", lambda: self._read_ahead(step + 1))
        return batch

    def _read_ahead(self, step: int) -> StepRecord | None:
        record = self._recorded.read(step)
        if record is not None and record.batch is not None:
            self._on_ready(step, record.batch.groups)
        return record

    def state_dict(self) -> dict[str, Any]:
        """The prompt order's state as the recording run left it after the last step that was taken."""
        return self._position

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._position = state

    def describe(self) -> list[str]:
        return [
            f"data     the recorded rollouts of {self._recorded.folder.parent}; no server, no publish, no held-out"
            " evaluation"
        ]

    def made_by(self, step: int) -> dict[str, str]:
        record, batch = self._read(step)
        return {"recorded rollouts": next_history("", batch, record.checksums)}

    def due(self, step: int, numbers: Iterable[int]) -> dict[int, Prompt]:
        recorded = {group.group_id: group.prompt for group in self._read(step)[1].groups}
        return {number: recorded[number] for number in numbers if number in recorded}

    def _read(self, step: int) -> tuple[StepRecord, RolloutBatch]:
        if self._last is None or self._last.step != step:
            ahead, self._next = self._next, None
            is_ahead = ahead is not None and ahead[0] == step
            self._last = ahead[1].result() if ahead is not None and is_ahead else self._recorded.read(step)
        if self._last is None or self._last.batch is None:
            raise JournalError(
                f"train.from_rollouts: {self._recorded.folder.parent} has no complete rollout batch of step {step + 1};"
                f" lower train.num_steps to {step} to train on the batches before it"
            )
        return self._last, self._last.batch

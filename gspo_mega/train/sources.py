"""Where the rollout batches of a run come from. Rank 0 only.

`JournalledSource` is what the loop asks. It passes every batch through the run's journal: recorded episodes are used
again, and missing ones come from the source that it wraps. At its start, a run takes what is recorded of its next step
and of groups that were sampled ahead. From then on everything is sampled and recorded. `reusable_records.py` decides
which records may be used again, and `gspo_mega.data.journal` reads and writes the files.

The wrapped source is a `LiveSource`, which samples from the servers of the run, or a `RecordedSource`, which reads the
journal of another run (`train.from_rollouts`) and needs no server, sampling or scoring. Its batches go through the
run's own journal as well, so the run folder holds what was trained on, and a restarted step is the very same.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo_mega.base import failpoints, processes
from gspo_mega.base.episodes import Episode, Group, RolloutBatch
from gspo_mega.base.errors import JournalError, RolloutError
from gspo_mega.base.records import Prompt, distinct_values
from gspo_mega.checkpoint.folders import step_of
from gspo_mega.config.derived import has_sampling_masks, num_served_top
from gspo_mega.config.schema import Config
from gspo_mega.data.journal.episode_log import EpisodeLog, FileBegin
from gspo_mega.data.journal.journal import Journal, RoutePruning
from gspo_mega.data.journal.steps import StepRecord
from gspo_mega.rollout.arrival_order import Freshness
from gspo_mega.rollout.scheduler import ResumePoint
from gspo_mega.train.reusable_records import RecordRequirements, ReusableRecords, first_weights, next_history
from gspo_mega.train.rollouts import ContinuableSource, Rollouts, admit_nothing, keep_nothing, open_numbers

if TYPE_CHECKING:
    from gspo_mega.checkpoint.load import TrainState


def journalled_source(
    config: Config, journal: Journal, source: ContinuableSource, say: Callable[[str], None]
) -> JournalledSource:
    """`source` with the run's journal around it, as `config` says. `say` shows a line to the user."""
    return JournalledSource(
        journal,
        source,
        config.batch.group_size,
        say=say,
        freshness=Freshness(config.rollout.max_staleness),
        keep_last=config.journal.keep_last,
        prune_routes=config.journal.prune_routes
        and (
            config.rollout.return_routed_experts
            or has_sampling_masks(config.rollout)
            or num_served_top(config.teacher) > 0
        ),
        needs_routes=config.moe.routing_replay == "R3",
        needs_masks=has_sampling_masks(config.rollout),
        needs_top=num_served_top(config.teacher) > 0,
        trains=config.train is None or not config.train.rollouts_only,
        first_weights=lambda: first_weights(config.model),
    )


class JournalledSource:
    """The `BatchSource` that a run trains on, and the part of the run's state that a checkpoint keeps of it.

    Attributes:
        history: the fingerprint of the weights that the next step is sampled with.
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
        needs_masks: bool = False,
        needs_top: bool = False,
        trains: bool = True,
        first_weights: Callable[[], str] = lambda: "",
    ) -> None:
        """`say`: shows a line to the user. `freshness`: which weight versions a record may come from. `keep_last`: how
        many steps' files are kept; None keeps all. `prune_routes`: remove routed experts, sampling masks and a
        teacher's most likely tokens once a checkpoint contains the training on them. `needs_routes`: do not use a
        record without its routed experts; `needs_masks`: nor one without its sampling masks; `needs_top`: nor one
        without a teacher's most likely tokens. `trains`: each batch changes the weights. `first_weights`: returns the
        fingerprint of the weights that a fresh run starts from.
        """
        self._journal, self._source, self._say = journal, source, say
        self._most_ahead = freshness.max_staleness
        required = RecordRequirements(group_size, freshness, needs_routes, needs_masks, needs_top)
        self._records = ReusableRecords(journal, required, say)
        self._log = EpisodeLog(journal, group_size)
        self._keep_last = keep_last
        self._pruning = RoutePruning(journal) if prune_routes else None
        self._trains, self._first_weights = trains, first_weights
        self._position: dict[str, Any] | None = None
        self._histories: dict[int, str] = {}
        self._samples = False
        self.history = ""

    def on_ready(self, call: Callable[[int, list[Group]], None]) -> None:
        """As `ContinuableSource.on_ready`."""
        self._source.on_ready(call)

    def restore(self, state: TrainState) -> None:
        """Continue from a checkpoint's state, or from a fresh state. Raises DataError if the prompts are not those of
        the checkpoint.
        """
        if state.prompts:
            self.load_state_dict(state.prompts)
        self.history = state.history or self._first_weights()

    def save_position(self, state: TrainState) -> None:
        """Write the position in the prompts and the fingerprint of the weights into `state`, for a checkpoint."""
        state.prompts, state.history = self.state_dict(), self.history

    def on_checkpoint_saved(self, checkpoint: Path) -> None:
        """Call this when a checkpoint is on disk. The routed experts of the steps before it are then not needed to
        continue the run, unless a later step may consume groups of their files.

        With `prune_routes` they are removed while the run goes on. Raises JournalError if those of an earlier step
        could not be removed.
        """
        if self._pruning is not None:
            self._pruning.begin(step_of(checkpoint) - self._most_ahead)

    def state_dict(self) -> dict[str, Any]:
        """The state of the wrapped source. If groups were sampled ahead, it also has the step of the first file with
        records of them (`tickets.since`) and the fingerprints of the weights that sampled from there on
        (`tickets.weights`).
        """
        return self._source.state_dict() if self._position is None else self._position

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._source.load_state_dict(state)
        self._position = state

    def describe(self) -> list[str]:
        return self._source.describe()

    def close(self) -> None:
        """Call this when the source has ended sampling. It waits until the routed experts that were to be removed are
        gone, or tells the user why they are not.
        """
        self._log.close()
        if self._pruning is not None:
            try:
                self._pruning.wait()
            except JournalError as error:
                self._say(f"notice   journal.prune_routes: routed experts stay until the next start: {error}")

    def take(self, step: int, weight_version: int, on_wait: Callable[[], None]) -> RolloutBatch:
        """Returns the rollout batch of `step`, sampled with `weight_version`. The journal has all of it on disk when
        this returns.

        A complete recorded batch is returned as it was recorded. Records of other weights, rewards or settings, or
        about other prompts than are due, are moved aside and not used, and the user is told why. Raises JournalError if
        the journal cannot be written.
        """
        begin = FileBegin(step, weight_version, {**self._source.made_by(step), "weights": self.history})
        known: dict[int, Group] = {}
        if self._samples:
            self._log.ready(begin)
        else:
            record = self._records.of_step(begin, self._source.due)
            if record is not None and record.batch is not None and record.prompts is not None:
                self.load_state_dict(record.prompts)
                self._say(
                    f"step {step + 1}: its {len(record.batch.episodes)} trajectories are in the journal and are not"
                    " sampled again"
                )
                self._advance(step, next_history(self.history, record.batch, record.checksums))
                return record.batch
            tickets = self.state_dict().get("tickets", {})
            known, admitted = self._records.open_groups(begin, record, tickets, self._source.due)
            self._histories = {int(number): history for number, history in tickets.get("weights", {}).items()}
            self._log.begin(begin, known, admitted)
            self._samples = True
        self._histories[step] = self.history
        try:
            batch = self._source.take(step, weight_version, on_wait, known, self._keep, self._admit)
            self._consume(batch, begin)
        except BaseException:
            self._samples = False
            self._log.close()
            raise
        return batch

    def _admit(self, number: int, prompt: Prompt, weight_version: int) -> None:
        failpoints.reached("rollout.admitted")
        self._log.admit(number, prompt, weight_version)

    def _keep(self, episode: Episode) -> None:
        failpoints.reached("rollout.trajectory")
        self._log.complete(episode)

    def _consume(self, batch: RolloutBatch, begin: FileBegin) -> None:
        """Record that the step trains on `batch`, and where its prompts end."""
        after = next_history(self.history, batch, self._log.checksums) if self._trains else self.history
        with self._log.lock:  # a group admitted between these lines would count as consumed
            position, step = self._source.state_dict(), batch.step
            still_open: set[int] = set()
            if "tickets" in position:
                still_open = open_numbers(position, self._log.numbers())
                since = self._log.oldest_open(still_open, otherwise=step + 1)
                self._histories = {number: one for number, one in self._histories.items() if number >= since}
                weights = {str(number): one for number, one in self._histories.items()}
                position = {**position, "tickets": {**position["tickets"], "since": since, "weights": weights}}
            then = FileBegin(step + 1, begin.weight_version + self._trains, {**begin.made_by, "weights": after})
            ended = self._log.consume(batch, still_open, then)
        ended.write(batch, position)
        self._position = position
        self._advance(step, after)

    def _advance(self, step: int, history: str) -> None:
        """Go on to the next step. `history`: the fingerprint of the weights after `step`. The file of a later step may
        be open already.
        """
        if self._trains:
            self.history = history
        if self._keep_last is not None:
            self._journal.prune(step + 1 - self._keep_last - self._most_ahead)


class LiveSource:
    """A `ContinuableSource` that samples and scores its groups now. `fingerprints`: of `reusable_records.made_by`."""

    def __init__(self, rollouts: Rollouts, fingerprints: dict[str, str]) -> None:
        self._rollouts, self._prompts, self._fingerprints = rollouts, rollouts.prompts, fingerprints
        self._position: ResumePoint | None = None

    def take(
        self,
        step: int,
        weight_version: int,
        on_wait: Callable[[], None],
        known: Mapping[int, Group] | None = None,
        keep: Callable[[Episode], None] = keep_nothing,
        admit: Callable[[int, Prompt, int], None] = admit_nothing,
    ) -> RolloutBatch:
        """Returns the batch of `step`. The groups `known` are not sampled; they count for the first batch only. If
        `rollout.max_staleness` allows it, sampling began before this call and goes on after it.

        Raises RolloutError, RewardError as the collector does. The position is then the one after the last batch.
        """
        pool, collector = self._rollouts.pool, self._rollouts.collector
        assert pool.committed_version == weight_version, f"{pool.committed_version} is committed, not {weight_version}"
        before = self.state_dict()
        try:
            collector.start(step, known or {}, keep, admit)
            batch = collector.take(step, on_wait)
        except BaseException:
            self.load_state_dict(before)
            raise
        self._check_fresh(batch, weight_version)
        self._position = collector.position
        return batch

    def on_ready(self, call: Callable[[int, list[Group]], None]) -> None:
        self._rollouts.collector.on_ready = call

    def _check_fresh(self, batch: RolloutBatch, weight_version: int) -> None:
        """Raises RolloutError if a token is staler than allowed. Admission excludes that, so it would be a defect."""
        freshness = self._rollouts.pool.freshness
        for episode in batch.episodes:
            versions = {version for node in episode.turns for version in distinct_values(node.weight_versions)}
            if not freshness.admits_all(versions, weight_version):
                raise RolloutError(
                    f"{episode.episode_id}: tokens of weight versions {sorted(versions)};"
                    f" {freshness.describe(weight_version)}"
                )

    def state_dict(self) -> dict[str, Any]:
        """As `BatchSource.state_dict`: the state of the prompt order before it gave the first group that is outstanding
        after the last batch. If groups are outstanding, it has the key `tickets`, the position in their numbers.
        """
        if self._position is None:
            return self._prompts.state_dict()
        tickets = self._position.tickets
        return self._position.prompts | ({} if tickets is None else {"tickets": tickets})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        prompts = {name: value for name, value in state.items() if name != "tickets"}
        collector = self._rollouts.collector
        collector.close()
        # On the collector's own thread, after the collector has ended, so nothing draws prompts at the same time.
        self._rollouts.pool.loop.run(self._load_prompts(prompts))
        self._position = ResumePoint(prompts, state.get("tickets"))
        collector.continue_from(self._position)

    async def _load_prompts(self, state: dict[str, Any]) -> None:
        self._prompts.load_state_dict(state)

    def describe(self) -> list[str]:
        return self._rollouts.describe()

    def made_by(self, step: int) -> dict[str, str]:
        return self._fingerprints

    def due(self, step: int, numbers: Iterable[int]) -> dict[int, Prompt]:
        position, before = self.state_dict(), self._prompts.state_dict()
        wanted = open_numbers(position, numbers)
        first = position.get("tickets", {"first": 0})["first"]
        try:
            prompts = {number: self._prompts.next() for number in range(first, max(wanted, default=-1) + 1)}
        finally:
            self._prompts.load_state_dict(before)
        return {number: prompts[number] for number in wanted}


class RecordedSource:
    """A `ContinuableSource` that gives the groups of the journal in the folder `journal_dir`. While a step trains, it
    reads the batch of the next one.
    """

    def __init__(self, journal_dir: Path, fingerprints: Mapping[str, str] | None = None) -> None:
        """`fingerprints`: further ones, of what decides the weights after a step (`reusable_records`)."""
        self._recorded, self._fingerprints = Journal(journal_dir), dict(fingerprints or {})
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
        """Returns the recorded batch of `step`. `weight_version` has no effect, because the recording run's weights
        sampled the batch.

        Raises JournalError if the record has no complete batch of the step.
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
        self._next = step + 1, processes.run_in_thread("recorded rollouts", lambda: self._read_ahead(step + 1))
        return batch

    def _read_ahead(self, step: int) -> StepRecord | None:
        record = self._recorded.read(step)
        if record is not None and record.batch is not None:
            self._on_ready(step, record.batch.groups)
        return record

    def state_dict(self) -> dict[str, Any]:
        """The state of the prompt order as the recording run left it after the last step that was taken."""
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
        return {"recorded rollouts": next_history("", batch, record.checksums), **self._fingerprints}

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

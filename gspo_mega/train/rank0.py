"""What rank 0 has and no other rank: the source of batches, the console, the metrics and the stop request.

`session.lead` is a `Rank0` on rank 0 and None on every other rank, so code tests it to find out whether it runs on
rank 0. `Rank0` starts these parts and closes them. What all ranks do together is in `session.py`.

`Prefetch` prepares the next step's work while the current one trains: advantages, packs and messages, in a thread.
Prepared work is used only for the very batch that it was made from. So a step gets, to the bit, what it would get
without it. `batches.py` makes the packs and `scatter.py` the messages.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gspo_mega.base import processes
from gspo_mega.base.episodes import Group, RolloutBatch
from gspo_mega.base.errors import FolderError
from gspo_mega.base.run_folder import Attempt, RunFolder
from gspo_mega.checkpoint.load import TrainState
from gspo_mega.config.derived import hooks_of, least_of_group
from gspo_mega.config.prompt_sources import HeldOutSet
from gspo_mega.config.schema import Config
from gspo_mega.data.held_out_responses import drop_responses, write_responses_of
from gspo_mega.data.journal.journal import Journal
from gspo_mega.data.packing import ExpertRoutes
from gspo_mega.metrics.prometheus import PrometheusEndpoint
from gspo_mega.metrics.sink_loading import sink_makers
from gspo_mega.metrics.sinks import SampleRow, Sinks
from gspo_mega.metrics.writer import MetricsWriter
from gspo_mega.models.end_tokens import planned_end_tokens
from gspo_mega.models.spec import ModelSpec
from gspo_mega.plan.layout import Layout
from gspo_mega.rollout.sampler import SamplingServers
from gspo_mega.train.async_eval import DUE
from gspo_mega.train.batches import assemble, fill_advantages, scored_batch
from gspo_mega.train.context import StopRequest, WorkerContext
from gspo_mega.train.held_out import Evaluation, kept_responses
from gspo_mega.train.reusable_records import hook_fingerprints, made_by
from gspo_mega.train.rollouts import Rollouts
from gspo_mega.train.scatter import Parcels
from gspo_mega.train.sources import LiveSource, RecordedSource, journalled_source

_MOST_SAMPLES = 8


class Rank0:
    """The parts of rank 0; a context manager.

    `recorded_dir`: train on the journal of this run folder instead of sampling. `needs_answers`: as for `Rollouts`.

    The constructor reads the data and starts the scoring processes. Raises DataError, RewardError.
    """

    def __init__(
        self, context: WorkerContext, spec: ModelSpec, recorded_dir: str | None, needs_answers: bool = True
    ) -> None:
        config = context.config
        self.attempt = Attempt(context.attempt_dir)
        self.run_folder = self.attempt.run_folder
        self.console = context.console
        self.shown_responses: list[str] = []  # lines of the final table: responses of the last step
        self.num_restarts = self.run_folder.num_restarts()
        self.num_standby_ranks: int | None = None  # without standbys the metric has no meaning
        if config.train is not None and config.train.standby_processes:
            self.num_standby_ranks = self.attempt.num_standby_ranks()
        self.keeps_servers = config.train is not None and config.train.keep_servers
        self.stop_request = StopRequest(context.attempt_dir)
        self._samples_every = config.metrics.samples_every_steps
        self._sinks = Sinks(
            self.run_folder,
            sink_makers(config.metrics),
            config.model_dump(mode="json", exclude={"alerts"}),
            context.console,
        )
        self._rollouts: Rollouts | None = None
        folder = Path(config.model.path)
        self._planned_ends = planned_end_tokens(folder, spec.eos_token_ids, spec.vocab_size).ids
        self._cleanup = contextlib.ExitStack()
        self.writer = MetricsWriter(self.run_folder.path, self._sinks, self._prometheus_endpoint(context))
        if recorded_dir is not None:
            new_groups = RecordedSource(
                RunFolder(recorded_dir).journal_dir, hook_fingerprints(hooks_of(config), sampled=False)
            )
        else:
            fingerprints = made_by(config)
            rollouts = Rollouts(config, spec, self.attempt, needs_answers, teaches=needs_answers)
            self._rollouts = self._cleanup.enter_context(rollouts)
            self._rollouts.pool.tell = context.console
            if self._rollouts.teachers is not None:
                self._rollouts.teachers.tell = context.console
            new_groups = LiveSource(self._rollouts, fingerprints)
        self.source = journalled_source(config, Journal(self.run_folder.journal_dir), new_groups, self.console)
        self._cleanup.enter_context(self.writer)

    def _prometheus_endpoint(self, context: WorkerContext) -> PrometheusEndpoint | None:
        settings, name = context.config.metrics.prometheus, context.config.run.name
        if settings is None:
            return None
        endpoint = PrometheusEndpoint(settings.host, settings.port, name, self.attempt.number, context.console)
        return self._cleanup.enter_context(endpoint)

    def __enter__(self) -> Rank0:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._cleanup.close()
        finally:
            self.source.close()  # only now has all sampling ended

    @property
    def rollouts(self) -> Rollouts:
        """Servers, prompts and rewards. A run that trains on a record has none and must not use this."""
        assert self._rollouts is not None, "a run that trains on a record samples nothing"
        return self._rollouts

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a response. In a run that trains on a record they are those of the model's files."""
        return self._planned_ends if self._rollouts is None else self._rollouts.end_tokens.ids

    def resume(self, state: TrainState) -> None:
        """Continue the source and the metrics from a checkpoint's state, or from a fresh state. Raises DataError if the
        prompts or the metrics do not fit it.
        """
        self.source.restore(state)
        # A run that begins again from step 0 also evaluates its start again, and writes that line again.
        last = state.step if state.step > 0 else -1
        self.writer.resume_from(last)
        drop_responses(self.run_folder, last, [one["step"] for one in state.summary.get(DUE, ())])

    def evaluate(
        self, step: int, on_wait: Callable[[], None], names: Collection[str], servers: SamplingServers | None = None
    ) -> dict[str, Evaluation]:
        """`Rollouts.evaluate` of the weights of `step`. Some of the responses are kept in the run folder."""
        kept: list[dict[str, Any]] = []

        def keep(asked: HeldOutSet, groups: list[Group]) -> None:
            kept.extend(kept_responses(asked, groups))

        found = self.rollouts.evaluate(on_wait, names, keep, servers)
        self.check_newest_attempt()
        write_responses_of(self.run_folder, step, kept)
        return found

    def keep_samples(self, step: int, batch: RolloutBatch) -> None:
        """Give the sinks a few responses of a trained batch, one of each group, at the steps that
        `metrics.samples_every_steps` divides. Call it before the step's metrics are written.
        """
        if self._samples_every is None or step % self._samples_every:
            return
        rows = [group.trajectories[place % len(group.trajectories)] for place, group in enumerate(batch.groups)]
        shown = [SampleRow(row.prompt.text, row.response_text, row.reward, row.advantage) for row in rows]
        self._sinks.keep_samples(step, shown[:_MOST_SAMPLES])

    def check_stop(self) -> None:
        """Raises StopRequested if a stop was requested."""
        self.stop_request.raise_if_made()

    def check_newest_attempt(self) -> None:
        """Raises FolderError if the run has been started again elsewhere. Call it before anything of the run is
        overwritten.
        """
        latest = self.run_folder.latest_attempt()
        if latest is not None and not self.attempt.is_newest():
            raise FolderError(
                f"{self.run_folder.path} was taken over by a later start of the run, attempt"
                f" {latest.number}; this one, attempt {self.attempt.number}, ends and writes"
                " nothing more"
            )


@dataclass
class _Prepared:
    """Work that is prepared before its step is due. `dropped`: set if it is not needed any more. `seconds`: how long it
    took, once it is done.
    """

    step: int
    weight_version: int
    groups: list[Group]
    dropped: threading.Event = field(default_factory=threading.Event)
    future: concurrent.futures.Future[tuple[RolloutBatch, Parcels] | None] | None = None
    seconds: float = 0.0

    def is_made_from(self, batch: RolloutBatch, step: int, weight_version: int) -> bool:
        """Whether it was made from these very episodes. Nobody changes episodes once their groups are complete."""
        if (self.step, self.weight_version, len(self.groups)) != (step, weight_version, len(batch.groups)):
            return False
        return all(
            mine.group_id == due.group_id
            and len(mine.episodes) == len(due.episodes)
            and all(one is other for one, other in zip(mine.episodes, due.episodes, strict=True))
            for mine, due in zip(self.groups, batch.groups, strict=True)
        )


class Prefetch:
    """Prepares the work of coming steps; one object per run, on rank 0.

    Attributes:
        ahead_seconds: seconds of work on what `take` returned last that were done before `take` was called.
    """

    def __init__(self, config: Config, spec: ModelSpec, layout: Layout) -> None:
        self._config, self._spec, self._layout = config, spec, layout
        self._lock = threading.Lock()
        self._versions_ahead = 0
        self._prepared: dict[int, _Prepared] = {}  # by step: a later step may begin before an earlier one is taken
        self._is_closed = False
        self.ahead_seconds = 0.0

    def expect(self, step: int, weight_version: int) -> None:
        """Set the weight version that `step` trains. Each later step trains the version that follows."""
        self._versions_ahead = weight_version - step

    def begin(self, step: int, groups: list[Group]) -> None:
        """Begin to prepare `step`, which would train on these complete groups if it were due now.

        May be called from any thread and returns at once. Called again for the same step, it drops what it has.
        """
        ahead = _Prepared(step, step + self._versions_ahead, list(groups))
        with self._lock:
            if self._is_closed:
                return
            if (before := self._prepared.get(step)) is not None:
                before.dropped.set()
            self._prepared[step] = ahead
            ahead.future = processes.run_in_thread("preparation", lambda: self._build_ahead(ahead))

    def take(self, batch: RolloutBatch, step: int, weight_version: int) -> tuple[RolloutBatch, Parcels]:
        """Returns the part of the step's batch that is trained on, with its advantages, and the parcels for the ranks.

        They are the prepared ones if they were made from this batch, and are made now otherwise. Raises RewardError,
        RolloutError, PlanError.
        """
        with self._lock:
            ahead = self._prepared.pop(step, None)
        self.ahead_seconds = 0.0
        if ahead is not None and ahead.is_made_from(batch, step, weight_version):
            made = self._wait(ahead)
            if made is not None:
                return replace(
                    made[0], counts=batch.counts, phase_seconds=batch.phase_seconds, sampled=batch.sampled
                ), made[1]
        elif ahead is not None:
            ahead.dropped.set()
        return self._build(batch, step, weight_version)

    def close(self) -> None:
        """Drop what is being prepared, and prepare nothing more."""
        with self._lock:
            self._is_closed = True
            dropped, self._prepared = list(self._prepared.values()), {}
        for ahead in dropped:
            ahead.dropped.set()
        concurrent.futures.wait([ahead.future for ahead in dropped if ahead.future is not None])

    def _wait(self, ahead: _Prepared) -> tuple[RolloutBatch, Parcels] | None:
        """Wait for prepared work. Returns None if it failed; the caller then builds it again, and gets the error if
        there is one again.
        """
        asked_at = time.monotonic()
        assert ahead.future is not None
        concurrent.futures.wait([ahead.future])
        waited = time.monotonic() - asked_at
        if ahead.future.exception() is not None:
            return None
        self.ahead_seconds = max(0.0, ahead.seconds - waited)
        return ahead.future.result()

    def _build_ahead(self, ahead: _Prepared) -> tuple[RolloutBatch, Parcels] | None:
        began = time.monotonic()
        batch, parcels = self._build(RolloutBatch(ahead.step, ahead.groups), ahead.step, ahead.weight_version)
        if not parcels.encode_all(lambda: not ahead.dropped.is_set()):
            return None
        ahead.seconds = time.monotonic() - began
        return batch, parcels

    def _build(self, batch: RolloutBatch, step: int, weight_version: int) -> tuple[RolloutBatch, Parcels]:
        config = self._config
        batch = scored_batch(batch, least_of_group(config), config.objective.scope)
        fill_advantages(batch, config, step)
        routes = ExpertRoutes.of(batch.trajectories, self._spec, to_replay=config.moe.routing_replay == "R3")
        shards = assemble(batch, config, self._layout, step, weight_version=weight_version)
        return batch, Parcels(shards, routes, self._layout)

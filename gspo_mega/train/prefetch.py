"""Prepares the next step's work while the current one trains: advantages, packs and messages, in a thread of rank 0.

Prepared work is used only for the very batch that it was made from. So a step gets, to the bit, what it would get
without this file. `batches.py` makes the packs and `scatter.py` the messages.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
from dataclasses import dataclass, field, replace

from gspo_mega.base import processes
from gspo_mega.base.episodes import Group, RolloutBatch
from gspo_mega.config.derived import least_of_group
from gspo_mega.config.schema import Config
from gspo_mega.data.packing import ExpertRoutes
from gspo_mega.models.spec import ModelSpec
from gspo_mega.plan.layout import Layout
from gspo_mega.train.batches import assemble, fill_advantages, scored_batch
from gspo_mega.train.scatter import Parcels


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

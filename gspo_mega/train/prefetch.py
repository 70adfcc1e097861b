"""The next step's hand-out, made while this one trains: advantages, packs and messages, in a thread of rank 0.

Owns when it is made, and that it is used for the very batch that it was made of, and for no other: whatever is due is
then what would have been made without it, to the bit. What a hand-out is made of is `batches.py`'s and `scatter.py`'s.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
from dataclasses import dataclass, field, replace

from gspo_mega.base import processes
from gspo_mega.base.episodes import Group, RolloutBatch
from gspo_mega.config.schema import Config
from gspo_mega.data.packing import ExpertRoutes
from gspo_mega.models.spec import ModelSpec
from gspo_mega.plan.layout import Layout
from gspo_mega.train.batches import assemble, fill_advantages, scored_batch
from gspo_mega.train.scatter import Parcels


@dataclass
class _Ahead:
    """A hand-out that is made before its step is due. `seconds`: how long that took, once it is done."""

    step: int
    weight_version: int
    groups: list[Group]
    dropped: threading.Event = field(default_factory=threading.Event)
    future: concurrent.futures.Future[tuple[RolloutBatch, Parcels] | None] | None = None
    seconds: float = 0.0

    def is_of(self, batch: RolloutBatch, step: int, weight_version: int) -> bool:
        """Whether it is of these very episodes, which nobody changes once their groups are complete."""
        if (self.step, self.weight_version, len(self.groups)) != (step, weight_version, len(batch.groups)):
            return False
        return all(
            mine.group_id == due.group_id
            and len(mine.episodes) == len(due.episodes)
            and all(one is other for one, other in zip(mine.episodes, due.episodes, strict=True))
            for mine, due in zip(self.groups, batch.groups, strict=True)
        )


class Prefetch:
    """One per run, on rank 0.

    Attributes:
        ahead_seconds: work on the hand-out that `take` returned last, done before it was asked for.
    """

    def __init__(self, config: Config, spec: ModelSpec, layout: Layout) -> None:
        self._config, self._spec, self._layout = config, spec, layout
        self._lock = threading.Lock()
        self._versions_ahead = 0
        self._ahead: dict[int, _Ahead] = {}  # by step: a later one may begin before one is taken
        self._is_closed = False
        self.ahead_seconds = 0.0

    def expect(self, step: int, weight_version: int) -> None:
        """`step` trains the weights of this version, and each later step a version more."""
        self._versions_ahead = weight_version - step

    def begin(self, step: int, groups: list[Group]) -> None:
        """Begin on `step`, which would train on these complete groups if it were due now. Any thread; returns at once.
        Called again with other groups of the step, it drops what it has.
        """
        ahead = _Ahead(step, step + self._versions_ahead, list(groups))
        with self._lock:
            if self._is_closed:
                return
            if (before := self._ahead.get(step)) is not None:
                before.dropped.set()
            self._ahead[step] = ahead
            ahead.future = processes.run_in_thread("preparation", lambda: self._make_ahead(ahead))

    def take(self, batch: RolloutBatch, step: int, weight_version: int) -> tuple[RolloutBatch, Parcels]:
        """What is trained of the batch of `step`, with advantages, and its hand-out: that which was begun, or one made
        from the beginning. Raises RewardError, RolloutError, PlanError.
        """
        with self._lock:
            ahead = self._ahead.pop(step, None)
        self.ahead_seconds = 0.0
        if ahead is not None and ahead.is_of(batch, step, weight_version):
            made = self._wait(ahead)
            if made is not None:
                return replace(
                    made[0], counts=batch.counts, phase_seconds=batch.phase_seconds, sampled=batch.sampled
                ), made[1]
        elif ahead is not None:
            ahead.dropped.set()
        return self._made(batch, step, weight_version)

    def close(self) -> None:
        """Nothing is made any more."""
        with self._lock:
            self._is_closed = True
            dropped, self._ahead = list(self._ahead.values()), {}
        for ahead in dropped:
            ahead.dropped.set()
        concurrent.futures.wait([ahead.future for ahead in dropped if ahead.future is not None])

    def _wait(self, ahead: _Ahead) -> tuple[RolloutBatch, Parcels] | None:
        """None where it failed: it fails once more, or does not, where the caller makes it anew."""
        asked_at = time.monotonic()
        assert ahead.future is not None
        concurrent.futures.wait([ahead.future])
        waited = time.monotonic() - asked_at
        if ahead.future.exception() is not None:
            return None
        self.ahead_seconds = max(0.0, ahead.seconds - waited)
        return ahead.future.result()

    def _make_ahead(self, ahead: _Ahead) -> tuple[RolloutBatch, Parcels] | None:
        began = time.monotonic()
        batch, parcels = self._made(RolloutBatch(ahead.step, ahead.groups), ahead.step, ahead.weight_version)
        if not parcels.make(lambda: not ahead.dropped.is_set()):
            return None
        ahead.seconds = time.monotonic() - began
        return batch, parcels

    def _made(self, batch: RolloutBatch, step: int, weight_version: int) -> tuple[RolloutBatch, Parcels]:
        config = self._config
        batch = scored_batch(batch, config)
        fill_advantages(batch, config, step)
        routes = ExpertRoutes.of(batch.trajectories, self._spec, to_replay=config.moe.routing_replay == "R3")
        shards = assemble(batch, config, self._layout, step, weight_version=weight_version)
        return batch, Parcels(shards, routes, self._layout)

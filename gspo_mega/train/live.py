"""Rollout batches sampled from the servers of the run.

Owns the position in the prompts behind the last batch that was taken. Sampling is the collector's, its parts are in
`rollouts.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gspo_mega.base.episode_records import Episode
from gspo_mega.base.errors import RolloutError
from gspo_mega.base.records import Prompt
from gspo_mega.base.rollout_batch import Group, RolloutBatch
from gspo_mega.base.token_columns import distinct
from gspo_mega.rollout.continuous import Position
from gspo_mega.train.rollouts import Rollouts
from gspo_mega.train.source import admit_nothing, keep_nothing, open_numbers


class LiveSource:
    """A `ContinuableSource` whose groups are sampled and scored now. `fingerprints`: of `provenance.made_by`."""

    def __init__(self, rollouts: Rollouts, fingerprints: dict[str, str]) -> None:
        self._rollouts, self._prompts, self._fingerprints = rollouts, rollouts.prompts, fingerprints
        self._position: Position | None = None

    def take(
        self,
        step: int,
        weight_version: int,
        on_wait: Callable[[], None],
        known: Mapping[int, Group] | None = None,
        keep: Callable[[Episode], None] = keep_nothing,
        admit: Callable[[int, Prompt, int], None] = admit_nothing,
    ) -> RolloutBatch:
        """The batch of `step`, except the groups `known`, which count at the first batch only. Sampling was under way
        already where `rollout.max_staleness` allows it, and goes on after this returns.

        Raises RolloutError, RewardError as the collector does; the position is then the one behind the last batch.
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
        """Admission keeps every trajectory within the bound; a batch that is not is a defect, and is not trained."""
        freshness = self._rollouts.pool.freshness
        for episode in batch.episodes:
            versions = {version for node in episode.turns for version in distinct(node.weight_versions)}
            if not freshness.admits_all(versions, weight_version):
                raise RolloutError(
                    f"{episode.episode_id}: tokens of weight versions {sorted(versions)};"
                    f" {freshness.describe(weight_version)}"
                )

    def state_dict(self) -> dict[str, Any]:
        """As `Source.state_dict`: the order as it was before it gave the first group that is outstanding behind the
        last batch. Where groups are outstanding it has the key `tickets`, the position in their numbers.
        """
        if self._position is None:
            return self._prompts.state_dict()
        tickets = self._position.tickets
        return self._position.prompts | ({} if tickets is None else {"tickets": tickets})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        prompts = {name: value for name, value in state.items() if name != "tickets"}
        collector = self._rollouts.collector
        collector.close()
        # On the collector's own thread, after its end: nothing draws prompts after this.
        self._rollouts.pool.loop.run(self._return_to(prompts))
        self._position = Position(prompts, state.get("tickets"))
        collector.go_on_from(self._position)

    async def _return_to(self, state: dict[str, Any]) -> None:
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

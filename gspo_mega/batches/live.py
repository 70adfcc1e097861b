"""Rollout batches sampled from the servers of the run.

Owns the position in the prompts around one batch. Sampling is the collector's, its parts are in `rollouts.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gspo_mega.batches.rollouts import Rollouts
from gspo_mega.batches.source import keep_nothing
from gspo_mega.records import Group, Prompt, RolloutBatch, Trajectory


class LiveSource:
    """A `ContinuableSource` whose groups are sampled and scored now. `fingerprints`: of `provenance.made_by`."""

    def __init__(self, rollouts: Rollouts, fingerprints: dict[str, str]) -> None:
        self._rollouts, self._prompts, self._fingerprints = rollouts, rollouts.prompts, fingerprints

    def take(
        self,
        step: int,
        weight_version: int,
        on_wait: Callable[[], None],
        known: Mapping[int, Group] | None = None,
        keep: Callable[[Trajectory], None] = keep_nothing,
    ) -> RolloutBatch:
        """Sample the batch of `step`, except the groups `known`, from the committed weights.

        Raises RolloutError, RewardError as the collector does.
        """
        pool, collector = self._rollouts.pool, self._rollouts.collector
        assert pool.committed_version == weight_version, f"{pool.committed_version} is committed, not {weight_version}"
        before = self._prompts.state_dict()
        collector.start(step, known or {}, keep)
        try:
            return collector.take(step, on_wait)
        except BaseException:
            # On the collector's own thread, after its cancellation: nothing draws prompts after this.
            pool.loop.run(self._return_to(before))
            raise

    async def _return_to(self, state: dict[str, Any]) -> None:
        self._prompts.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        return self._prompts.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._prompts.load_state_dict(state)

    def describe(self) -> list[str]:
        return self._rollouts.describe()

    def made_by(self, step: int) -> dict[str, str]:
        return self._fingerprints

    def upcoming(self, step: int, count: int) -> list[Prompt]:
        before = self._prompts.state_dict()
        try:
            return [self._prompts.next() for _ in range(count)]
        finally:
            self._prompts.load_state_dict(before)

"""The groups of one batch while they are sampled: each sample's id, request and score, and what they add up to.

Owns the counts of a batch and the limit on failed scorings. The collector decides which groups a batch needs;
`sampling.py` gets each single response.
"""

from __future__ import annotations

import asyncio
import collections
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from gspo_mega.config.schema import Rollout
from gspo_mega.errors import RewardError
from gspo_mega.records import Group, Prompt, Trajectory
from gspo_mega.rollout.client.completion import SamplingParams
from gspo_mega.rollout.sampling import Sampler, make_trajectory
from gspo_mega.rollout.server_pool import ServerPool

_FAILURES_SHOWN = 5


class TaskGroup(asyncio.TaskGroup):
    """A TaskGroup that raises its first error as it is, not inside an ExceptionGroup."""

    async def __aexit__(self, *exception):
        try:
            return await super().__aexit__(*exception)
        except BaseExceptionGroup as group:
            first = group.exceptions[0]
            raise first from first.__cause__


@dataclass(frozen=True)
class Judge:
    """How a response becomes a scored trajectory: `decode` makes its text, `score` fills the trajectory's reward."""

    score: Callable[[Trajectory], Awaitable[None]]
    decode: Callable[[list[int]], str]


class SampledGroups:
    """Samples and scores the groups of one batch, on the pool's loop.

    Attributes:
        last_generated: the clock's time when the last response so far was complete.
    """

    def __init__(
        self,
        settings: Rollout,
        pool: ServerPool,
        judge: Judge,
        name: str,
        group_size: int,
        params: SamplingParams,
        *,
        keep: Callable[[Trajectory], None] = lambda trajectory: None,
        max_failed_fraction: float = 1.0,
        most_failures: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`name` is the prefix of the trajectory ids. `keep` gets every sampled trajectory as soon as it is scored.
        More than `most_failures` failed scorings end the batch; `max_failed_fraction` is the setting that they follow
        from.
        """
        self._sampler = Sampler(settings, pool)
        self._pool = pool
        self._judge = judge
        self._name = name
        self._group_size = group_size
        self._params = params
        self._keep = keep
        self._max_failed_fraction = max_failed_fraction
        self._most_failures = most_failures
        self._clock = clock
        self._first_failures: list[str] = []
        self._own: collections.Counter[str] = collections.Counter()
        self._registration_errors = pool.num_registration_errors
        self.last_generated = clock()

    async def sample(self, group_id: int, prompt: Prompt) -> Group:
        """All samples of one prompt: each is a request of its own, and is scored as soon as it is complete."""
        group = Group(group_id, prompt, [])
        async with TaskGroup() as tasks:
            samples = [tasks.create_task(self._one(group, index)) for index in range(self._group_size)]
        group.trajectories.extend(task.result() for task in samples)
        return group

    async def take_over(self, group: Group) -> Group:
        """A group that exists already, counted as if it were sampled now."""
        for trajectory in group.trajectories:
            self._count(trajectory)
            self._own["num_generated_tokens"] += trajectory.num_response_tokens
        return group

    async def _one(self, group: Group, index: int) -> Trajectory:
        request_id = f"{self._name}-g{group.group_id:05d}-s{index:03d}"
        completion = await self._sampler.sample(group.prompt, self._params, request_id)
        self.last_generated = self._clock()
        text_ids = completion.token_ids
        if completion.finish_reason == "stop":
            text_ids = text_ids[:-1]  # the end token is sampled and trained on, and is no part of the text
        trajectory = make_trajectory(group, request_id, completion, self._judge.decode(text_ids))
        await self._judge.score(trajectory)
        if trajectory.reward is None and trajectory.reward_error is None:
            raise RuntimeError(f"the scorer left trajectory {request_id} without a reward")
        self._count(trajectory)
        self._keep(trajectory)
        if self._own["num_reward_failures"] > self._most_failures:
            raise self._too_many_failures()
        return trajectory

    def _count(self, trajectory: Trajectory) -> None:
        self._own["num_trajectories"] += 1
        if not trajectory.is_scored:
            self._own["num_reward_failures"] += 1
            if len(self._first_failures) < _FAILURES_SHOWN:
                self._first_failures.append(
                    f"{trajectory.trajectory_id} ({trajectory.prompt.prompt_id}): {trajectory.reward_error}"
                )
        self._own["num_truncated"] += trajectory.finish_reason == "length"

    def check_failures(self, anything_left: bool) -> None:
        """Raise RewardError at the end of the batch if too many scorings failed, or if no group is left."""
        num_failed, num_scored = self._own["num_reward_failures"], self._own["num_trajectories"]
        if num_failed > self._max_failed_fraction * num_scored:
            raise self._too_many_failures()
        if not anything_left:
            raise RewardError(
                f"no group of the batch has two rewards; {num_failed} of {num_scored} scorings failed. The"
                f" first:{self._shown_failures()}"
            )

    def _too_many_failures(self) -> RewardError:
        return RewardError(
            f"{self._own['num_reward_failures']} of {self._own['num_trajectories']} scorings failed, more than"
            f" reward.max_failed_fraction {self._max_failed_fraction:g} allows in a step. The"
            f" first:{self._shown_failures()}"
        )

    def _shown_failures(self) -> str:
        return "".join(f"\n  {line}" for line in self._first_failures)

    def counts(self) -> dict[str, float]:
        """The batch's counts so far, by metric name."""
        names = (
            "num_trajectories",
            "num_reward_failures",
            "num_truncated",
            "num_retries",
            "num_request_failures",
            "num_aborted_requests",
            "num_moved_responses",
            "num_continued_requests",
            "num_discarded_tokens",
            "num_generated_tokens",
            "num_registration_errors",
        )
        self._own["num_registration_errors"] = self._pool.num_registration_errors - self._registration_errors
        counted = self._own + self._sampler.counts
        return {name: float(value) for name, value in {**dict.fromkeys(names, 0), **counted}.items()}

"""Collects rollout batches: prompts in, complete scored groups out, on the pool's thread while the trainer waits.

Owns which prompts are sampled for a step, groups and their refill, and the batch's counts and times. Trying again is
`sampling.py`'s, choosing servers the pool's, judging responses the scorer's.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from gspo_mega.config.schema import Config
from gspo_mega.errors import RewardError
from gspo_mega.records import Group, Prompt, RolloutBatch, Trajectory
from gspo_mega.rollout.client.completion import SamplingParams
from gspo_mega.rollout.sampling import Sampler, make_trajectory
from gspo_mega.rollout.server_pool import ServerPool

_POLL_SECONDS = 0.05
_LEAST_RUNNING = 64
_FAILURES_SHOWN = 5


class Prompts(Protocol):
    """An endless stream of prompts, as `data.stream.PromptStream` is."""

    def next(self) -> Prompt: ...


class Collector:
    """`start(step)` begins a rollout batch, `take(step)` waits for it. One batch at a time.

    `score` fills a trajectory's reward fields in place and is called on the pool's thread as each response completes,
    so it must not block. `decode` turns token ids into text for it. Anything they raise ends the batch and comes out of
    `take`; a reward that merely failed is the scorer's to record. More failures in a batch than
    `reward.max_failed_fraction` raise RewardError as soon as that is certain, and so does a batch without any group of
    two rewards. A group with fewer than two is not among the batch's: nothing is left to compare.
    """

    def __init__(
        self,
        config: Config,
        pool: ServerPool,
        prompts: Prompts,
        score: Callable[[Trajectory], Awaitable[None]],
        decode: Callable[[list[int]], str],
        eos_token_ids: Sequence[int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._pool = pool
        self._prompts = prompts
        self._score = score
        self._decode = decode
        self._eos_token_ids = tuple(eos_token_ids)
        self._clock = clock
        self._running: tuple[int, concurrent.futures.Future] | None = None

    def start(
        self,
        step: int,
        known: Mapping[int, Group] | None = None,
        keep: Callable[[Trajectory], None] = lambda trajectory: None,
    ) -> None:
        """Begin sampling the batch of `step` from the committed weights. Returns at once.

        `known`: groups of this batch that are there already, by their number among its prompts; their prompts are drawn
        and not sampled. `keep` is called on the pool's thread for every other trajectory as soon as it is scored.
        """
        if self._running is not None:
            raise RuntimeError(f"the batch of step {self._running[0]} was started and not taken")
        self._running = (step, self._pool.loop.submit(self._collect(step, known or {}, keep)))

    def take(self, step: int, on_wait: Callable[[], None] = lambda: None) -> RolloutBatch:
        """The batch of `step`, started now if it was not. `on_wait` is called about every 50 ms meanwhile, on this
        thread; what it raises ends the batch. Raises RolloutError if a sample cannot be had.
        """
        if self._running is None:
            self.start(step)
        started, future = self._running
        if started != step:
            raise RuntimeError(f"step {step} asked for, step {started} was started")
        try:
            return self._wait(future, on_wait)
        finally:
            self._running = None

    def sample(
        self,
        prompts: Sequence[Prompt],
        samples_per_prompt: int,
        temperature: float,
        *,
        name: str = "eval",
        on_wait: Callable[[], None] = lambda: None,
    ) -> list[Group]:
        """Scored groups of these prompts, in their order, from the committed weights: evaluation through the same
        machinery.

        `temperature` 0 is greedy; else top_p and top_k are not applied. `name` begins the trajectories' ids.
        """
        params = self._params(temperature, top_p=1.0, top_k=-1)
        future = self._pool.loop.submit(self._sample_all(prompts, samples_per_prompt, params, name))
        return self._wait(future, on_wait)

    def close(self) -> None:
        """Drop the batch that is running, if any."""
        if self._running is not None:
            self._drop(self._running[1])
            self._running = None

    def _wait(self, future: concurrent.futures.Future, on_wait: Callable[[], None]) -> Any:
        """The batch's result. What ends the pool's own work ends the batch, too: it might wait for ever."""
        try:
            while True:
                try:
                    return future.result(timeout=_POLL_SECONDS)
                except concurrent.futures.TimeoutError:
                    if future.done():
                        raise  # the batch itself raised it
                    self._pool.check()
                    on_wait()
        finally:
            if not future.done():
                self._drop(future)

    def _drop(self, future: concurrent.futures.Future) -> None:
        future.cancel()
        while not concurrent.futures.wait([future], timeout=_POLL_SECONDS).done:
            self._pool.loop.check()

    def _params(self, temperature: float, top_p: float, top_k: int) -> SamplingParams:
        return SamplingParams(self._config.rollout.max_new_tokens, temperature, top_p, top_k, self._eos_token_ids)

    # From here on: on the pool's loop.

    async def _sample_all(self, prompts, samples_per_prompt, params, name) -> list[Group]:
        batch = _Batch(self, name, samples_per_prompt, params)
        async with _TaskGroup() as tasks:
            running = [tasks.create_task(batch.group(index, prompt)) for index, prompt in enumerate(prompts)]
        return [task.result() for task in running]

    async def _collect(self, step: int, known: Mapping[int, Group], keep: Callable[[Trajectory], None]) -> RolloutBatch:
        rollout = self._config.rollout
        wanted = self._config.batch.prompts_per_step
        allowed = int(wanted * rollout.max_oversampling) if rollout.filter_constant_groups else wanted
        params = self._params(rollout.temperature, rollout.top_p, rollout.top_k)
        most_failures = self._config.reward.max_failed_fraction * allowed * self._config.batch.group_size
        batch = _Batch(self, f"step{step:06d}", self._config.batch.group_size, params, keep, most_failures)
        started = self._clock()
        kept: list[Group] = []
        constant: list[Group] = []
        unscored: list[Group] = []
        num_sampled = 0
        # Groups come through a queue: a wait for the first of all that run costs as much as there are, once for each of
        # them.
        done: asyncio.Queue[asyncio.Task[Group]] = asyncio.Queue()
        num_running = 0
        async with _TaskGroup() as tasks:
            while True:
                # Groups that could only wait for a server are not started yet: the garbage collector looks at
                # everything that waits.
                most = max(_LEAST_RUNNING, 2 * self._pool.capacity // self._config.batch.group_size)
                while len(kept) + num_running < wanted and num_sampled < allowed and num_running < most:
                    prompt = self._prompts.next()
                    there = known.get(num_sampled)
                    task = tasks.create_task(batch.group(num_sampled, prompt) if there is None else batch.known(there))
                    task.add_done_callback(done.put_nowait)
                    num_sampled += 1
                    num_running += 1
                if not num_running:
                    break
                group = (await done.get()).result()
                num_running -= 1
                if len(group.scored) < 2:
                    unscored.append(group)
                elif rollout.filter_constant_groups and group.is_constant:
                    constant.append(group)
                else:
                    kept.append(group)
        finished = self._clock()
        counts = batch.counts()
        counts["num_prompts_sampled"] = num_sampled
        batch.check_failures(self._config.reward.max_failed_fraction, anything_left=bool(kept or constant))
        counts["num_groups_filtered"] = len(constant)
        counts["num_groups_unscored"] = len(unscored)
        counts["num_groups_missing"] = wanted - len(kept)
        # A step in which no group carries a signal still needs a batch: its advantages, and so its gradient, are zero.
        groups = sorted(kept or constant[:wanted], key=lambda group: group.group_id)
        return RolloutBatch(
            step=step,
            groups=groups,
            counts={name: float(value) for name, value in counts.items()},
            phase_seconds={
                "generate": batch.last_generated - started,
                "score": finished - batch.last_generated,
            },
        )


class _Batch:
    """The samples of one batch, their ids and what they add up to."""

    def __init__(
        self,
        collector: Collector,
        name: str,
        group_size: int,
        params: SamplingParams,
        keep: Callable[[Trajectory], None] = lambda trajectory: None,
        most_failures: float = math.inf,
    ) -> None:
        self._sampler = Sampler(collector._config.rollout, collector._pool)
        self._collector = collector
        self._name = name
        self._group_size = group_size
        self._params = params
        self._keep = keep
        self._most_failures = most_failures
        self._first_failures: list[str] = []
        self._own: collections.Counter[str] = collections.Counter()
        self._registration_errors = collector._pool.num_registration_errors
        self.last_generated = collector._clock()

    async def group(self, group_id: int, prompt: Prompt) -> Group:
        """All samples of one prompt, each its own request, each scored as soon as it is there."""
        group = Group(group_id, prompt, [])
        async with _TaskGroup() as tasks:
            samples = [tasks.create_task(self._one(group, index)) for index in range(self._group_size)]
        group.trajectories.extend(task.result() for task in samples)
        return group

    async def known(self, group: Group) -> Group:
        """A group that is there already; counted as if it had been sampled now."""
        for trajectory in group.trajectories:
            self._count(trajectory)
            self._own["num_generated_tokens"] += trajectory.num_response_tokens
        return group

    async def _one(self, group: Group, index: int) -> Trajectory:
        collector = self._collector
        request_id = f"{self._name}-g{group.group_id:05d}-s{index:03d}"
        completion = await self._sampler.sample(group.prompt, self._params, request_id)
        self.last_generated = collector._clock()
        text_ids = completion.token_ids
        if completion.finish_reason == "stop":
            text_ids = text_ids[:-1]  # the end token is sampled and trained on, and is no part of the text
        trajectory = make_trajectory(group, request_id, completion, collector._decode(text_ids))
        await collector._score(trajectory)
        if trajectory.reward is None and trajectory.reward_error is None:
            raise RuntimeError(f"the scorer left trajectory {request_id} without a reward")
        self._count(trajectory)
        self._keep(trajectory)
        if self._own["num_reward_failures"] > self._most_failures:
            raise self._too_many_failures(self._collector._config.reward.max_failed_fraction)
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

    def check_failures(self, most_fraction: float, anything_left: bool) -> None:
        """At the end of the batch. Raises RewardError: too many scorings failed, or all that counts."""
        num_failed, num_scored = self._own["num_reward_failures"], self._own["num_trajectories"]
        if num_failed > most_fraction * num_scored:
            raise self._too_many_failures(most_fraction)
        if not anything_left:
            raise RewardError(
                f"no group of the batch has two rewards; {num_failed} of {num_scored} scorings failed. The"
                f" first:{self._shown_failures()}"
            )

    def _too_many_failures(self, most_fraction: float) -> RewardError:
        return RewardError(
            f"{self._own['num_reward_failures']} of {self._own['num_trajectories']} scorings failed, more than"
            f" reward.max_failed_fraction {most_fraction:g} allows in a step. The first:{self._shown_failures()}"
        )

    def _shown_failures(self) -> str:
        return "".join(f"\n  {line}" for line in self._first_failures)

    def counts(self) -> dict[str, float]:
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
        self._own["num_registration_errors"] = self._collector._pool.num_registration_errors - self._registration_errors
        counted = self._own + self._sampler.counts
        return dict.fromkeys(names, 0) | dict(counted)


class _TaskGroup(asyncio.TaskGroup):
    """A TaskGroup that raises its first error as it is, not inside an ExceptionGroup."""

    async def __aexit__(self, *exception):
        try:
            return await super().__aexit__(*exception)
        except BaseExceptionGroup as group:
            first = group.exceptions[0]
            raise first from first.__cause__

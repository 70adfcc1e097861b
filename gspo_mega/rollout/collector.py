"""Collects rollout batches: prompts in, complete scored groups out, on the pool's thread while the trainer waits.

Owns which prompts are sampled for a step, groups and their refill, and the batch's counts and times. `sampling.py`
retries requests, the pool chooses servers, and the scorer judges responses.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gspo_mega.config.schema import Batch, Reward, Rollout
from gspo_mega.records import Group, Prompt, RolloutBatch, Trajectory
from gspo_mega.rollout.client.completion import SamplingParams
from gspo_mega.rollout.sampled_groups import Judge, SampledGroups, TaskGroup
from gspo_mega.rollout.server_pool import ServerPool

_POLL_SECONDS = 0.05
_LEAST_RUNNING = 64


class Prompts(Protocol):
    """An endless stream of prompts, as `data.stream.PromptStream` is."""

    def next(self) -> Prompt: ...


class Collector:
    """`start(step)` begins a rollout batch, `take(step)` waits for it. One batch at a time.

    `score` fills a trajectory's reward fields in place. It is called on the pool's thread as each response completes,
    so it must not block. `decode` turns token ids into text for it. Anything they raise ends the batch, and `take`
    raises it; the scorer records a reward that merely failed. More failures in a batch than
    `reward.max_failed_fraction` raise RewardError as soon as that is certain, and so does a batch without any group of
    two rewards. A group with fewer than two rewards is left out of the batch: it has nothing to compare.
    """

    def __init__(
        self,
        rollout: Rollout,
        batch: Batch,
        reward: Reward,
        pool: ServerPool,
        prompts: Prompts,
        score: Callable[[Trajectory], Awaitable[None]],
        decode: Callable[[list[int]], str],
        eos_token_ids: Sequence[int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rollout, self._batch, self._reward = rollout, batch, reward
        self._pool = pool
        self._prompts = prompts
        self._judge = Judge(score, decode)
        self._eos_token_ids = tuple(eos_token_ids)
        self._clock = clock
        self._running: _Running | None = None

    def start(
        self,
        step: int,
        known: Mapping[int, Group] | None = None,
        keep: Callable[[Trajectory], None] = lambda trajectory: None,
    ) -> None:
        """Begin sampling the batch of `step` from the committed weights. Returns at once.

        `known`: groups of this batch that exist already, by their number among its prompts; their prompts are drawn
        and not sampled. `keep` is called on the pool's thread for every other trajectory as soon as it is scored.
        """
        if self._running is not None:
            raise RuntimeError(f"the batch of step {self._running.step} was started and not taken")
        self._running = self._start(step, known or {}, keep)

    def take(self, step: int, on_wait: Callable[[], None] = lambda: None) -> RolloutBatch:
        """The batch of `step`, started now if `start` was not called. `on_wait` is called about every 50 ms meanwhile,
        on this thread; what it raises ends the batch. Raises RolloutError if a sample cannot be completed.
        """
        running = self._running or self._start(step, {}, lambda trajectory: None)
        if running.step != step:
            raise RuntimeError(f"step {step} asked for, step {running.step} was started")
        self._running = running
        try:
            return self._wait(running.batch, on_wait)
        finally:
            self._running = None

    def sample(
        self,
        prompts: Sequence[Prompt],
        samples_per_prompt: int,
        temperature: float,
        *,
        top_p: float = 1.0,
        top_k: int = -1,
        name: str = "eval",
        on_wait: Callable[[], None] = lambda: None,
    ) -> list[Group]:
        """Scored groups of these prompts, in their order, from the committed weights, outside training.

        `temperature` 0 is greedy; top_p and top_k are not those of training unless given. `name` is the prefix of the
        trajectory ids.
        """
        params = self._params(temperature, top_p, top_k)
        future = self._pool.loop.submit(self._sample_all(prompts, samples_per_prompt, params, name))
        return self._wait(future, on_wait)

    def close(self) -> None:
        """Drop the batch that is running, if any."""
        if self._running is not None:
            self._drop(self._running.batch)
            self._running = None

    def _start(self, step: int, known: Mapping[int, Group], keep: Callable[[Trajectory], None]) -> _Running:
        return _Running(step, self._pool.loop.submit(self._collect(step, known, keep)))

    def _wait(self, future: concurrent.futures.Future, on_wait: Callable[[], None]) -> Any:
        """The batch's result. An error that ended the pool's watch ends the batch, too: it could wait for ever."""
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
        return SamplingParams(self._rollout.max_new_tokens, temperature, top_p, top_k, self._eos_token_ids)

    # The methods below run on the pool's loop.

    async def _sample_all(
        self, prompts: Sequence[Prompt], samples_per_prompt: int, params: SamplingParams, name: str
    ) -> list[Group]:
        groups = SampledGroups(self._rollout, self._pool, self._judge, name, samples_per_prompt, params)
        async with TaskGroup() as tasks:
            running = [tasks.create_task(groups.sample(index, prompt)) for index, prompt in enumerate(prompts)]
        return [task.result() for task in running]

    async def _collect(self, step: int, known: Mapping[int, Group], keep: Callable[[Trajectory], None]) -> RolloutBatch:
        rollout, group_size = self._rollout, self._batch.group_size
        wanted = self._batch.prompts_per_step
        allowed = int(wanted * rollout.max_oversampling) if rollout.filter_constant_groups else wanted
        sampled = SampledGroups(
            rollout,
            self._pool,
            self._judge,
            f"step{step:06d}",
            group_size,
            self._params(rollout.temperature, rollout.top_p, rollout.top_k),
            keep=keep,
            max_failed_fraction=self._reward.max_failed_fraction,
            most_failures=self._reward.max_failed_fraction * allowed * group_size,
            clock=self._clock,
        )
        started = self._clock()
        kept: list[Group] = []
        constant: list[Group] = []
        unscored: list[Group] = []
        num_sampled = 0
        # Groups come through a queue: asyncio.wait for the first of N tasks would cost N each time.
        done: asyncio.Queue[asyncio.Task[Group]] = asyncio.Queue()
        num_running = 0
        async with TaskGroup() as tasks:
            while True:
                # Groups that could only wait for a server are not started yet: Python's garbage collector visits every
                # task that waits.
                most = max(_LEAST_RUNNING, 2 * self._pool.capacity // group_size)
                while len(kept) + num_running < wanted and num_sampled < allowed and num_running < most:
                    prompt = self._prompts.next()
                    group = known.get(num_sampled)
                    task = tasks.create_task(
                        sampled.sample(num_sampled, prompt) if group is None else sampled.take_over(group)
                    )
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
        counts = sampled.counts()
        counts["num_prompts_sampled"] = num_sampled
        sampled.check_failures(anything_left=bool(kept or constant))
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
                "generate": sampled.last_generated - started,
                "score": finished - sampled.last_generated,
            },
        )


@dataclass(frozen=True)
class _Running:
    """A batch that was started and not taken yet."""

    step: int
    batch: concurrent.futures.Future

"""Collects rollout batches: prompts in, complete scored groups out, while the trainer waits on its own thread.

Owns the trainer's side: asking for batches, waiting for them, ending what runs. Which groups are sampled and when, on
the pool's thread, is `scheduler.py`'s; the driver runs episodes, and the scorer judges them.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gspo_mega.agents.driver import EpisodeDriver
from gspo_mega.base.episodes import Episode, Group, RolloutBatch
from gspo_mega.base.errors import RolloutError
from gspo_mega.base.garbage import RareCollections
from gspo_mega.base.records import Prompt
from gspo_mega.config.schema import Config
from gspo_mega.rollout.client.completion import SamplingParams
from gspo_mega.rollout.groups import Acting, SampledGroups, TaskGroup
from gspo_mega.rollout.pool import ServerPool
from gspo_mega.rollout.sampler import SamplingServers
from gspo_mega.rollout.scheduler import BatchRequest, GroupScheduler, Prompts, ResumePoint

_POLL_SECONDS = 0.05


class Collector:
    """`start(step)` begins a rollout batch, `take(step)` waits for it. One batch at a time.

    `driver` runs an episode, and `score` fills its reward fields in place. Both are called on the pool's thread, so
    they must not block. Anything they raise ends the batch, and `take` raises it; an episode or a reward that merely
    failed is recorded. More failures in a batch than `episodes.max_failed_fraction` or `reward.max_failed_fraction`
    raise EpisodeError or RewardError as soon as that is certain; a batch without any group of two rewards raises
    RewardError. A group with fewer than two rewards is left out of the batch: it has nothing to compare.

    With `rollout.max_staleness` > 0 sampling goes on after a batch was taken, for the next ones. An error ends it, and
    is raised by the `take` that waits or by the next one; the batch after that begins anew from `position`.

    Attributes:
        position: where a run would go on: behind the last batch that was taken.
        on_ready: gets the next step and its groups, on the pool's thread, where they are complete before it is asked
            for.
    """

    def __init__(
        self,
        config: Config,
        pool: ServerPool,
        prompts: Prompts,
        driver: EpisodeDriver,
        score: Callable[[Episode], Awaitable[None]],
        eos_token_ids: Sequence[int],
        clock: Callable[[], float] = time.monotonic,
        snapshot: Callable[[], Any] = lambda: None,
    ) -> None:
        """`snapshot`: the present position in `prompts`."""
        self._config = config
        self._pool = pool
        self._prompts = prompts
        self._acting = Acting(driver, score)
        self._eos_token_ids = tuple(eos_token_ids)
        self._clock = clock
        self._snapshot = snapshot
        self._collection: GroupScheduler | None = None
        self._running: tuple[int, concurrent.futures.Future] | None = None
        self.position = ResumePoint()
        self.on_ready: Callable[[int, list[Group]], None] = lambda step, groups: None

    def start(
        self,
        step: int,
        known: Mapping[int, Group] | None = None,
        keep: Callable[[Episode], None] | None = None,
        admit: Callable[[int, Prompt, int], None] | None = None,
    ) -> None:
        """Begin sampling the batch of `step` from the committed weights. Returns at once.

        `known`: groups that exist already, by number; their prompts are drawn and only samples that they lack are
        sampled. It counts for the first batch of a collector alone. `keep` is called on the pool's thread for every
        other episode as soon as it is scored, `admit` for every group before it is sampled, until the next batch is
        asked for.
        """
        if self._running is not None:
            raise RuntimeError(f"the batch of step {self._running[0]} was started and not taken")
        asked = BatchRequest(step, known or {})
        asked = replace(asked, keep=keep or asked.keep, admit=admit or asked.admit)
        self._running = step, self._pool.loop.submit(self._take(asked))

    def take(self, step: int, on_wait: Callable[[], None] = lambda: None) -> RolloutBatch:
        """The batch of `step`, started now if `start` was not called. `on_wait` is called at once and then about every
        50 ms, on this thread; what it raises ends all sampling. Raises RolloutError if a sample cannot be completed.
        """
        if self._running is None:
            self.start(step)
        assert self._running is not None
        started, future = self._running
        if started != step:
            raise RuntimeError(f"step {step} asked for, step {started} was started")
        try:
            on_wait()
            batch, self.position = self._wait(future, on_wait)
            return batch
        except BaseException:
            self.close()
            raise
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
        max_new_tokens: int | None = None,
        on_wait: Callable[[], None] = lambda: None,
        servers: SamplingServers | None = None,
    ) -> list[Group]:
        """Scored groups of these prompts, in their order, from the committed weights, outside training.

        `temperature` 0 is greedy; top_p and top_k are not those of training unless given, `max_new_tokens` is. `name`
        is the prefix of the episode ids. `servers`: those that are asked, with their own weights, beside training and
        from any thread; by default all that serve training.
        """
        params = self._params(temperature, top_p, top_k)
        if max_new_tokens is not None:
            params = params.at_most(max_new_tokens)
        asked = self._sample_all(prompts, samples_per_prompt, params, name, servers or self._pool)
        future = self._pool.loop.submit(asked)
        return self._wait(future, on_wait) if servers is None else self._wait_beside(future, on_wait)

    def close(self) -> None:
        """End all sampling. What was sampled and not taken is dropped."""
        if self._running is not None:
            self._drop(self._running[1])
            self._running = None
        if self._collection is not None:
            collection, self._collection = self._collection, None
            self._drop_all(collection)

    def go_on_from(self, position: ResumePoint) -> None:
        """Begin anew: the next batch that is asked for comes behind `position`."""
        self.close()
        self.position = position

    def _wait(self, future: concurrent.futures.Future, on_wait: Callable[[], None]) -> Any:
        """The batch's result. An error that ended the pool's watch ends the batch, too: it could wait for ever."""
        self._pool.trainer_waits = True
        try:
            return self._result(future, on_wait)
        finally:
            self._pool.trainer_waits = False
            if not future.done():
                self._drop(future)

    def _wait_beside(self, future: concurrent.futures.Future, on_wait: Callable[[], None]) -> Any:
        """The result of what nobody who trains waits for."""
        try:
            return self._polled(future, on_wait)
        finally:
            if not future.done():
                self._drop(future)

    def _result(self, future: concurrent.futures.Future, on_wait: Callable[[], None]) -> Any:
        with RareCollections() as collections:
            return self._polled(future, on_wait, collections.collect_if_doubled)

    def _polled(self, future: concurrent.futures.Future, *on_wait: Callable[[], None]) -> Any:
        while True:
            try:
                return future.result(timeout=_POLL_SECONDS)
            except concurrent.futures.TimeoutError:
                if future.done():
                    raise  # the batch itself raised it
                self._pool.check()
                for call in on_wait:
                    call()

    def _drop(self, future: concurrent.futures.Future) -> None:
        future.cancel()
        while not concurrent.futures.wait([future], timeout=_POLL_SECONDS).done:
            self._pool.loop.check()

    def _drop_all(self, collection: GroupScheduler) -> None:
        with contextlib.suppress(RolloutError):  # its thread has ended, and was reported
            self._pool.loop.run(collection.close())

    def _params(self, temperature: float, top_p: float, top_k: int) -> SamplingParams:
        return SamplingParams(self._config.rollout.max_new_tokens, temperature, top_p, top_k, self._eos_token_ids)

    # The methods below run on the pool's loop.

    async def _sample_all(
        self,
        prompts: Sequence[Prompt],
        samples_per_prompt: int,
        params: SamplingParams,
        name: str,
        servers: SamplingServers,
    ) -> list[Group]:
        groups = SampledGroups(self._config, servers, self._acting, samples_per_prompt, params)
        async with TaskGroup() as tasks:
            running = [tasks.create_task(groups.sample(index, prompt, name)) for index, prompt in enumerate(prompts)]
        return [task.result() for task in running]

    async def _take(self, asked: BatchRequest) -> tuple[RolloutBatch, ResumePoint]:
        if self._collection is None:
            self._collection = self._new_collection()
        return await self._collection.take(asked)

    def _new_collection(self) -> GroupScheduler:
        config, rollout, batch = self._config, self._config.rollout, self._config.batch
        allowed = batch.prompts_per_step * (rollout.max_oversampling if rollout.filter_constant_groups else 1)
        sampled = SampledGroups(
            config,
            self._pool,
            self._acting,
            batch.group_size,
            self._params(rollout.temperature, rollout.top_p, rollout.top_k),
            least_episodes=batch.prompts_per_step * batch.group_size,
            most_episodes=int(allowed) * batch.group_size * (1 + rollout.max_staleness),
            clock=self._clock,
        )
        tickets = self.position.tickets
        return GroupScheduler(
            config, self._pool, self._prompts, sampled, tickets, self._snapshot, self._clock, on_ready=self.on_ready
        )

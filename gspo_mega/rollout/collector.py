"""Collects rollout batches: prompts in, complete scored groups out, while the trainer waits on its own thread.

`Collector` is the trainer's side: it asks for batches, waits for them, and ends what runs. `scheduler.py` decides, on
the pool's thread, which groups are sampled and when. The driver runs episodes, and the scorer judges them.
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
from gspo_mega.config.derived import filters_groups
from gspo_mega.config.schema import Config
from gspo_mega.rollout.client.completion import SamplingParams
from gspo_mega.rollout.groups import EpisodeMaker, SampledGroups, TaskGroup
from gspo_mega.rollout.pool import ServerPool
from gspo_mega.rollout.sampler import SamplingServers
from gspo_mega.rollout.scheduler import BatchRequest, GroupScheduler, Prompts, ResumePoint

_POLL_SECONDS = 0.05


class Collector:
    """`start(step)` begins a rollout batch, `take(step)` waits for it. One batch at a time.

    `driver` runs an episode, and `score` fills its reward fields in place. Both are called on the pool's thread, so
    they must not block. Anything that they raise ends the batch, and `take` raises it. An episode or a reward that only
    failed is recorded. If more of a batch fail than `episodes.max_failed_fraction` or `reward.max_failed_fraction`
    allows, EpisodeError or RewardError is raised as soon as that is certain. A group with fewer rewards than its
    advantages need (two, or one with a critic or a batch baseline) is left out of the batch; a batch without any other
    group raises RewardError.

    With `rollout.max_staleness` > 0 sampling continues for the next batches after one was taken. An error ends it; the
    `take` that waits raises it, or else the next one. The batch after that starts again from `position`.

    Attributes:
        position: where a run would continue, which is after the last batch that was taken.
        on_ready: gets the next step and its groups, on the pool's thread, if they are complete before the step is asked
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
        teach: Callable[[Episode], Awaitable[None]] | None = None,
    ) -> None:
        """`snapshot` returns the present position in `prompts`. `teach` gets each episode to train on once it is
        scored, as `score` before it.
        """
        self._config = config
        self._pool = pool
        self._prompts = prompts
        self._maker = EpisodeMaker(driver, score)
        self._teach = teach
        self._eos_token_ids = tuple(eos_token_ids)
        self._clock = clock
        self._snapshot = snapshot
        self._scheduler: GroupScheduler | None = None
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
        """Begin sampling the batch of `step` from the committed weights. Return at once.

        `known` holds groups that exist already, by number. Their prompts are drawn, and only the samples that they lack
        are sampled. It counts only for the first batch of a collector. Until the next batch is asked for, `keep` is
        called on the pool's thread for every other episode as soon as it is scored, and `admit` for every group before
        it is sampled. Raises RuntimeError if another batch was started and not taken.
        """
        if self._running is not None:
            raise RuntimeError(f"the batch of step {self._running[0]} was started and not taken")
        asked = BatchRequest(step, known or {})
        asked = replace(asked, keep=keep or asked.keep, admit=admit or asked.admit)
        self._running = step, self._pool.loop.submit(self._take(asked))

    def take(self, step: int, on_wait: Callable[[], None] = lambda: None) -> RolloutBatch:
        """Return the batch of `step`; start it now if `start` was not called.

        `on_wait` is called on this thread at once, and then about every 50 ms; what it raises ends all sampling. Raises
        RolloutError if a sample cannot be completed, and RuntimeError if another step was started.
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
        """Sample and score groups outside training, from the committed weights. Return them in the order of `prompts`.

        `temperature` 0 is greedy. `max_new_tokens` is by default that of training; top_p and top_k are not. `name` is
        the prefix of the episode ids. The default for `servers` is all that serve training. With servers of their own,
        which have their own weights, this can run at the same time as training and on any thread.
        """
        params = self._params(temperature, top_p, top_k)
        if max_new_tokens is not None:
            params = params.at_most(max_new_tokens)
        asked = self._sample_all(prompts, samples_per_prompt, params, name, servers or self._pool)
        future = self._pool.loop.submit(asked)
        return self._wait(future, on_wait) if servers is None else self._wait_during_training(future, on_wait)

    def close(self) -> None:
        """End all sampling. Groups that were sampled and not taken are dropped."""
        if self._running is not None:
            self._drop(self._running[1])
            self._running = None
        if self._scheduler is not None:
            scheduler, self._scheduler = self._scheduler, None
            self._drop_all(scheduler)

    def continue_from(self, position: ResumePoint) -> None:
        """End all sampling. The next batch that is asked for comes after `position`."""
        self.close()
        self.position = position

    def _wait(self, future: concurrent.futures.Future, on_wait: Callable[[], None]) -> Any:
        """Wait for a result while the trainer waits, and return it."""
        self._pool.trainer_waits = True
        try:
            with RareCollections() as collections:
                return self._poll(future, on_wait, collections.collect_if_doubled)
        finally:
            self._pool.trainer_waits = False
            if not future.done():
                self._drop(future)

    def _wait_during_training(self, future: concurrent.futures.Future, on_wait: Callable[[], None]) -> Any:
        """Wait for a result that the trainer does not wait for, and return it."""
        try:
            return self._poll(future, on_wait)
        finally:
            if not future.done():
                self._drop(future)

    def _poll(self, future: concurrent.futures.Future, *on_wait: Callable[[], None]) -> Any:
        """Wait for a result and return it. Raise the error that ended the pool's watch, without which the result might
        never come.
        """
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

    def _drop_all(self, scheduler: GroupScheduler) -> None:
        with contextlib.suppress(RolloutError):  # its thread has ended, and was reported
            self._pool.loop.run(scheduler.close())

    def _params(self, temperature: float, top_p: float, top_k: int, min_p: float = 0.0) -> SamplingParams:
        most = self._config.rollout.max_new_tokens
        return SamplingParams(most, temperature, top_p, top_k, self._eos_token_ids, min_p)

    # The methods below run on the pool's loop.

    async def _sample_all(
        self,
        prompts: Sequence[Prompt],
        samples_per_prompt: int,
        params: SamplingParams,
        name: str,
        servers: SamplingServers,
    ) -> list[Group]:
        groups = SampledGroups(self._config, servers, self._maker, samples_per_prompt, params)
        async with TaskGroup() as tasks:
            running = [tasks.create_task(groups.sample(index, prompt, name)) for index, prompt in enumerate(prompts)]
        return [task.result() for task in running]

    async def _take(self, asked: BatchRequest) -> tuple[RolloutBatch, ResumePoint]:
        if self._scheduler is None:
            self._scheduler = self._new_scheduler()
        return await self._scheduler.take(asked)

    async def _score_and_teach(self, episode: Episode) -> None:
        assert self._teach is not None
        await self._maker.score(episode)
        await self._teach(episode)

    def _new_scheduler(self) -> GroupScheduler:
        config, rollout, batch = self._config, self._config.rollout, self._config.batch
        allowed = batch.prompts_per_step * (rollout.max_oversampling if filters_groups(rollout) else 1)
        maker = self._maker if self._teach is None else EpisodeMaker(self._maker.driver, self._score_and_teach)
        sampled = SampledGroups(
            config,
            self._pool,
            maker,
            batch.group_size,
            self._params(rollout.temperature, rollout.top_p, rollout.top_k, rollout.min_p),
            least_episodes=batch.prompts_per_step * batch.group_size,
            most_episodes=int(allowed) * batch.group_size * (1 + rollout.max_staleness),
            clock=self._clock,
        )
        tickets = self.position.tickets
        return GroupScheduler(
            config, self._pool, self._prompts, sampled, tickets, self._snapshot, self._clock, on_ready=self.on_ready
        )

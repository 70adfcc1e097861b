"""Groups while they are sampled: each episode's id and score, and what they add up to from batch to batch.

`SampledGroups` samples and scores the episodes of a group, counts all that ended since the last batch, and enforces the
limits on failed episodes and failed scorings (`FailureLimit`). `scheduler.py` decides which groups a batch needs, and
the driver (`agents/driver.py`) runs each single episode.
"""

from __future__ import annotations

import asyncio
import collections
import math
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from gspo_mega.agents.driver import EpisodeDriver
from gspo_mega.agents.session import EPISODE_COUNTS, counts_of
from gspo_mega.agents.turn import lost_by_infrastructure
from gspo_mega.base.episodes import Episode, Group
from gspo_mega.base.errors import EpisodeError, GspoMegaError, RewardError
from gspo_mega.base.records import Prompt
from gspo_mega.config.derived import REWARDS_NEEDED, least_of_group
from gspo_mega.config.schema import Config
from gspo_mega.rollout.client.completion import SamplingParams
from gspo_mega.rollout.sampler import Sampler, SamplingServers

_SHOWN = 5


_BACKOFF_SECONDS = 0.1

_MAX_BACKOFF_SECONDS = 10.0


class TaskGroup(asyncio.TaskGroup):
    """A TaskGroup that raises its first error itself, not inside an ExceptionGroup."""

    async def __aexit__(self, *exception):
        try:
            return await super().__aexit__(*exception)
        except BaseExceptionGroup as group:
            first = group.exceptions[0]
            raise first from first.__cause__


@dataclass(frozen=True)
class EpisodeMaker:
    """Makes scored episodes: `driver` runs one, and `score` fills in its reward."""

    driver: EpisodeDriver
    score: Callable[[Episode], Awaitable[None]]


class SampledGroups:
    """Samples and scores groups, on the pool's loop.

    Attributes:
        last_generated: the clock's time, in seconds, at which the last episode so far was complete.
    """

    def __init__(
        self,
        config: Config,
        pool: SamplingServers,
        maker: EpisodeMaker,
        group_size: int,
        params: SamplingParams,
        *,
        least_episodes: int = 0,
        most_episodes: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`most_episodes` is how many episodes may end in one batch: once more have failed than the configuration
        allows of so many, the batch ends at once. By default it never does. `least_episodes` is the size of a whole
        batch: its failures are measured as a share of at least so many.
        """
        self._sampler = Sampler(config.rollout, pool)
        self._max_attempts = config.rollout.max_attempts
        self._pool = pool
        self._maker = maker
        self._group_size = group_size
        self._least_rewards = REWARDS_NEEDED[least_of_group(config)]
        self._params = params
        episodes, scorings = config.episodes.max_failed_fraction, config.reward.max_failed_fraction
        bounds = most_episodes, least_episodes
        self._episodes = FailureLimit("episodes", "episodes", episodes, *bounds, EpisodeError)
        self._scorings = FailureLimit("scorings", "reward", scorings, *bounds, RewardError)
        self._clock = clock
        self._counts: collections.Counter[str] = collections.Counter()
        self._registration_errors = pool.num_registration_errors
        self._runner_counts = maker.driver.runner.counts.copy()
        self.last_generated = clock()

    async def sample(
        self,
        group_id: int,
        prompt: Prompt,
        name: str,
        known: Group | None = None,
        keep: Callable[[Episode], None] = lambda episode: None,
    ) -> Group:
        """Sample and score all episodes of one prompt, and return them as a group. Each episode is scored as soon as it
        is complete.

        `name` is the prefix of the episode ids. Episodes that `known` has are counted as if they were sampled now.
        `keep` gets every other one as soon as it is scored or has failed.
        """
        group = Group(group_id, prompt, []) if known is None else known
        for episode in group.episodes:
            self._count(episode)
            self._counts["num_generated_tokens"] += episode.num_sampled_tokens
        there = {sample_of(episode) for episode in group.episodes}
        async with TaskGroup() as tasks:
            missing = [index for index in range(self._group_size) if index not in there]
            samples = [tasks.create_task(self._sample_one(group, index, name, keep)) for index in missing]
        group.episodes.extend(task.result() for task in samples)
        if there:
            group.episodes.sort(key=sample_of)
        return group

    async def _sample_one(self, group: Group, index: int, name: str, keep: Callable[[Episode], None]) -> Episode:
        episode = await self._run_episode(group, index, name)
        self.last_generated = self._clock()
        if episode.failure is None:
            await self._maker.score(episode)
            if episode.reward is None and episode.reward_error is None:
                raise RuntimeError(f"the scorer left episode {episode.episode_id} without a reward")
        self._count(episode)
        keep(episode)
        self._episodes.check()
        self._scorings.check()
        return episode

    async def _run_episode(self, group: Group, index: int, name: str) -> Episode:
        """Run one episode to its end and return it. If the infrastructure lost it before anything was sampled, it is
        drawn again under another id, and so with another seed. After `rollout.max_attempts` the last failed one is
        returned.
        """
        prefix = f"{name}-g{group.group_id:05d}"
        attempt = 0
        while True:
            episode_id = f"{prefix}-s{index:03d}" if attempt == 0 else f"{prefix}-r{attempt}-s{index:03d}"
            episode = await self._maker.driver.run(
                group.prompt, group.group_id, episode_id, self._sampler, self._params
            )
            if episode.failure is None or not lost_by_infrastructure(episode):
                return episode
            attempt += 1
            if attempt >= self._max_attempts:
                episode.failure = f"{episode.failure} (so were {attempt} in a row; rollout.max_attempts)"
                return episode
            self._counts.update(episode.counts)
            self._counts["num_episodes_redrawn"] += 1
            self._counts[f"num_episodes_redrawn_{episode.failure.partition(':')[0]}"] += 1
            delay = min(_MAX_BACKOFF_SECONDS, _BACKOFF_SECONDS * 2 ** (attempt - 1))
            await asyncio.sleep(delay * random.uniform(0.5, 1.5))

    def _count(self, episode: Episode) -> None:
        self._counts["num_trajectories"] += 1
        self._counts["num_truncated"] += episode.is_truncated
        self._counts.update(counts_of(episode))
        name = f"{episode.episode_id} ({episode.prompt.prompt_id})"
        self._episodes.add(None if episode.failure is None else f"{name}: {episode.failure}")
        if episode.failure is None:
            self._scorings.add(None if episode.is_scored else f"{name}: {episode.reward_error}")

    def check_failures(self, anything_left: bool) -> None:
        """Call it at the end of a batch. Raise EpisodeError or RewardError if too many episodes or scorings failed, and
        RewardError if nothing is left to train on.
        """
        self._episodes.check_end()
        self._scorings.check_end()
        if not anything_left:
            failed = [one for one in (self._episodes, self._scorings) if one.num]
            raise RewardError(
                f"no group of the batch has {self._least_rewards}; {', '.join(map(str, failed or [self._scorings]))}."
                f" The first:{''.join(one.shown() for one in failed)}"
            )

    def take_counts(self) -> dict[str, float]:
        """Return the counts of everything that ended since the last call, by metric name, and begin to count anew."""
        names = (
            "num_trajectories",
            *EPISODE_COUNTS,
            "num_reward_failures",
            "num_truncated",
            "num_retries",
            "num_request_failures",
            "num_aborted_requests",
            "num_moved_responses",
            "num_paused_responses",
            "num_drained_responses",
            "num_continued_requests",
            "num_discarded_tokens",
            "num_sessions_moved",
            "num_generated_tokens",
            "num_registration_errors",
        )
        self._counts["num_reward_failures"] = self._scorings.num
        self._counts["num_registration_errors"] = self._pool.num_registration_errors - self._registration_errors
        runner = self._maker.driver.runner.counts - self._runner_counts
        counted = self._counts + self._sampler.counts + runner
        self._registration_errors = self._pool.num_registration_errors
        self._runner_counts = self._maker.driver.runner.counts.copy()
        for counts in (self._counts, self._sampler.counts):
            counts.clear()
        self._episodes.begin()
        self._scorings.begin()
        return {name: float(value) for name, value in {**dict.fromkeys(names, 0), **counted}.items()}


def sample_of(episode: Episode) -> int:
    """Return which sample of its group an episode is. Its id ends with that number."""
    return int(episode.episode_id.rpartition("-s")[2])


class FailureLimit:
    """A limit on the failures of one sort in a batch.

    If failures are allowed at all, one of several is always allowed: among few, a single one says nothing about a
    share. `num` is the number of failures so far, and `num_done` how many of the things that may fail have ended.
    """

    def __init__(
        self,
        what: str,
        section: str,
        fraction: float,
        most_done: float,
        least_done: int,
        error: type[GspoMegaError],
    ) -> None:
        """`what` names the things that may fail, for the message. `fraction` is `section.max_failed_fraction`. More
        failures than this fraction of `most_done`, the size of the largest batch, end the batch at once with `error`.
        At the end of a batch the fraction is taken of at least `least_done`, even if fewer ended since the last batch.
        """
        self._least = least_done
        self.begin()
        self._what, self._section, self._fraction, self._error = what, section, fraction, error
        self._most = self._allowed(most_done)

    def begin(self) -> None:
        """Begin the next batch."""
        self.num = self.num_done = 0
        self._first: list[str] = []
        self._certain: str | None = None

    def add(self, failure: str | None) -> None:
        """Count one that ended, with this failure or None."""
        self.num_done += 1
        if failure is not None:
            self.num += 1
            if len(self._first) < _SHOWN:
                self._first.append(failure)

    def check(self) -> None:
        """Raise the error as soon as it is certain that too many fail. Its counts stay those of that moment, whichever
        of the tasks that raise it is the first to end.
        """
        if self.num > self._most:
            self._certain = self._certain or self._too_many()
            raise self._error(self._certain)

    def check_end(self) -> None:
        """Call it at the end of a batch. Raise the error if too many failed."""
        if self.num > self._allowed(max(self.num_done, self._least)):
            raise self._error(self._too_many())

    def _allowed(self, num_done: float) -> float:
        share = self._fraction * num_done
        return max(share, 1.0) if self._fraction > 0 and num_done > 1 else share

    def _too_many(self) -> str:
        return (
            f"{self}, more than {self._section}.max_failed_fraction {self._fraction:g} allows in a step. The"
            f" first:{self.shown()}"
        )

    def __str__(self) -> str:
        return f"{self.num} of {self.num_done} {self._what} failed"

    def shown(self) -> str:
        """Return the first failures, one line each."""
        return "".join(f"\n  {line}" for line in self._first)

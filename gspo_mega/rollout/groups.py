"""Groups while they are sampled: each episode's id and score, and what they add up to from batch to batch.

Owns the counts of a batch (of all that ended since the one before it), and the limits on failed episodes and failed
scorings. `scheduler.py` decides which groups a batch needs; `episodes.driver` runs each single episode.

How many failures of one sort a batch may have: those of its episodes, and those of its scorings.

Owns the limit and its message. What failed, and what follows for a group, is `groups.py`'s.
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
from gspo_mega.agents.protocol import lost_by_infrastructure
from gspo_mega.agents.session import EPISODE_COUNTS, counts_of
from gspo_mega.base.episodes import Episode, Group
from gspo_mega.base.errors import EpisodeError, GspoMegaError, RewardError
from gspo_mega.base.records import Prompt
from gspo_mega.config.schema import Config
from gspo_mega.rollout.client.completion import SamplingParams
from gspo_mega.rollout.sampler import Sampler, SamplingServers

_SHOWN = 5


class FailureLimit:
    """Failures of one batch. One of several is always allowed where any is: of few, one is no measure of a share.

    Attributes: num, how many so far; num_done, of how many that ended.
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
        """`what` fails, in words. `fraction`: `section.max_failed_fraction`, of `most_done` at the end of the largest
        batch; more end it at once with `error`. `least_done`: a batch counts as so many, where fewer of them ended
        since the batch before.
        """
        self._least = least_done
        self.begin()
        self._what, self._section, self._fraction, self._error = what, section, fraction, error
        self._most = self._allowed(most_done)

    def begin(self) -> None:
        """The next batch begins."""
        self.num = self.num_done = 0
        self._first: list[str] = []

    def add(self, failure: str | None) -> None:
        """Count what ended: with this failure, or None."""
        self.num_done += 1
        if failure is not None:
            self.num += 1
            if len(self._first) < _SHOWN:
                self._first.append(failure)

    def check(self) -> None:
        """Raise the error as soon as it is certain that too many fail."""
        if self.num > self._most:
            raise self._too_many()

    def check_end(self) -> None:
        """Raise the error at the end of the batch if too many failed."""
        if self.num > self._allowed(max(self.num_done, self._least)):
            raise self._too_many()

    def _allowed(self, num_done: float) -> float:
        share = self._fraction * num_done
        return max(share, 1.0) if self._fraction > 0 and num_done > 1 else share

    def _too_many(self) -> GspoMegaError:
        return self._error(
            f"{self}, more than {self._section}.max_failed_fraction {self._fraction:g} allows in a step. The"
            f" first:{self.shown()}"
        )

    def __str__(self) -> str:
        return f"{self.num} of {self.num_done} {self._what} failed"

    def shown(self) -> str:
        """The first failures, a line each."""
        return "".join(f"\n  {line}" for line in self._first)


_BACKOFF_SECONDS = 0.1
_MAX_BACKOFF_SECONDS = 10.0


class TaskGroup(asyncio.TaskGroup):
    """A TaskGroup that raises its first error as it is, not inside an ExceptionGroup."""

    async def __aexit__(self, *exception):
        try:
            return await super().__aexit__(*exception)
        except BaseExceptionGroup as group:
            first = group.exceptions[0]
            raise first from first.__cause__


@dataclass(frozen=True)
class Acting:
    """What makes scored episodes: `driver` runs one, `score` fills its reward."""

    driver: EpisodeDriver
    score: Callable[[Episode], Awaitable[None]]


class SampledGroups:
    """Samples and scores groups, on the pool's loop.

    Attributes:
        last_generated: the clock's time when the last episode so far was complete.
    """

    def __init__(
        self,
        config: Config,
        pool: SamplingServers,
        acting: Acting,
        group_size: int,
        params: SamplingParams,
        *,
        least_episodes: int = 0,
        most_episodes: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`most_episodes`: that may end in one batch; more failures than the configuration allows of so many end it at
        once. Without, none do. `least_episodes`: of a whole batch, whose failures are measured by at least so many.
        """
        self._sampler = Sampler(config.rollout, pool)
        self._max_attempts = config.rollout.max_attempts
        self._pool = pool
        self._acting = acting
        self._group_size = group_size
        self._params = params
        episodes, scorings = config.episodes.max_failed_fraction, config.reward.max_failed_fraction
        bounds = most_episodes, least_episodes
        self._episodes = FailureLimit("episodes", "episodes", episodes, *bounds, EpisodeError)
        self._scorings = FailureLimit("scorings", "reward", scorings, *bounds, RewardError)
        self._clock = clock
        self._own: collections.Counter[str] = collections.Counter()
        self._registration_errors = pool.num_registration_errors
        self._runner_counts = acting.driver.runner.counts.copy()
        self.last_generated = clock()

    async def sample(
        self,
        group_id: int,
        prompt: Prompt,
        name: str,
        known: Group | None = None,
        keep: Callable[[Episode], None] = lambda episode: None,
    ) -> Group:
        """All samples of one prompt: each is a request of its own, and is scored as soon as it is complete.

        `name` is the prefix of the episode ids. Samples that `known` has are counted as if they were sampled now.
        `keep` gets every other one as soon as it is scored or has failed.
        """
        group = Group(group_id, prompt, []) if known is None else known
        for episode in group.episodes:
            self._count(episode)
            self._own["num_generated_tokens"] += episode.num_sampled_tokens
        there = {sample_of(episode) for episode in group.episodes}
        async with TaskGroup() as tasks:
            missing = [index for index in range(self._group_size) if index not in there]
            samples = [tasks.create_task(self._one(group, index, name, keep)) for index in missing]
        group.episodes.extend(task.result() for task in samples)
        if there:
            group.episodes.sort(key=sample_of)
        return group

    async def _one(self, group: Group, index: int, name: str, keep: Callable[[Episode], None]) -> Episode:
        episode = await self._drawn(group, index, name)
        self.last_generated = self._clock()
        if episode.failure is None:
            await self._acting.score(episode)
            if episode.reward is None and episode.reward_error is None:
                raise RuntimeError(f"the scorer left episode {episode.episode_id} without a reward")
        self._count(episode)
        keep(episode)
        self._episodes.check()
        self._scorings.check()
        return episode

    async def _drawn(self, group: Group, index: int, name: str) -> Episode:
        """One episode that has ended. A sample that the infrastructure lost, of which nothing was sampled, is drawn
        again under another id, and so with another seed; the last of `rollout.max_attempts` is a failed episode.
        """
        prefix = f"{name}-g{group.group_id:05d}"
        attempt = 0
        while True:
            episode_id = f"{prefix}-s{index:03d}" if attempt == 0 else f"{prefix}-r{attempt}-s{index:03d}"
            episode = await self._acting.driver.run(
                group.prompt, group.group_id, episode_id, self._sampler, self._params
            )
            if episode.failure is None or not lost_by_infrastructure(episode):
                return episode
            attempt += 1
            if attempt >= self._max_attempts:
                episode.failure = f"{episode.failure} (so were {attempt} in a row; rollout.max_attempts)"
                return episode
            self._own.update(episode.counts)
            self._own["num_episodes_redrawn"] += 1
            self._own[f"num_episodes_redrawn_{episode.failure.partition(':')[0]}"] += 1
            delay = min(_MAX_BACKOFF_SECONDS, _BACKOFF_SECONDS * 2 ** (attempt - 1))
            await asyncio.sleep(delay * random.uniform(0.5, 1.5))

    def _count(self, episode: Episode) -> None:
        self._own["num_trajectories"] += 1
        self._own["num_truncated"] += episode.is_truncated
        self._own.update(counts_of(episode))
        name = f"{episode.episode_id} ({episode.prompt.prompt_id})"
        self._episodes.add(None if episode.failure is None else f"{name}: {episode.failure}")
        if episode.failure is None:
            self._scorings.add(None if episode.is_scored else f"{name}: {episode.reward_error}")

    def check_failures(self, anything_left: bool) -> None:
        """Raise EpisodeError or RewardError at the end of the batch if too many episodes or scorings failed, or if no
        group is left.
        """
        self._episodes.check_end()
        self._scorings.check_end()
        if not anything_left:
            failed = [one for one in (self._episodes, self._scorings) if one.num]
            raise RewardError(
                f"no group of the batch has two rewards; {', '.join(map(str, failed or [self._scorings]))}. The"
                f" first:{''.join(one.shown() for one in failed)}"
            )

    def take_counts(self) -> dict[str, float]:
        """The counts of everything that ended since they were taken before, by metric name. They begin anew."""
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
        self._own["num_reward_failures"] = self._scorings.num
        self._own["num_registration_errors"] = self._pool.num_registration_errors - self._registration_errors
        runner = self._acting.driver.runner.counts - self._runner_counts
        counted = self._own + self._sampler.counts + runner
        self._registration_errors = self._pool.num_registration_errors
        self._runner_counts = self._acting.driver.runner.counts.copy()
        for counts in (self._own, self._sampler.counts):
            counts.clear()
        self._episodes.begin()
        self._scorings.begin()
        return {name: float(value) for name, value in {**dict.fromkeys(names, 0), **counted}.items()}


def sample_of(episode: Episode) -> int:
    """Which sample of its group an episode is: its id ends with the number."""
    return int(episode.episode_id.rpartition("-s")[2])

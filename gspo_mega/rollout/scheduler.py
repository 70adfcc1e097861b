"""Groups from admission to the batch that consumes them, on the pool's loop: sampling goes on while the trainer trains.

`GroupScheduler` decides when a group is started and which groups a batch has, by the rules of `admission.py`. Sampling
one group is in `groups.py`; the trainer's side, which waits, is in `collector.py`. Nothing is started beyond what was
asked for. With `rollout.max_staleness` 0 that is the batch that the trainer waits for, and nothing between two batches.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gspo_mega.base.episodes import Episode, Group, RolloutBatch
from gspo_mega.base.group_results import GroupResult, group_result
from gspo_mega.base.records import Prompt, distinct_values
from gspo_mega.base.user_functions import LoadedHook, load_hook
from gspo_mega.config.derived import compares_within_groups, filters_groups, least_of_group
from gspo_mega.config.schema import Config, UserFunction
from gspo_mega.metrics.reductions import is_constant, sampled_metrics
from gspo_mega.rollout.admission import Admission
from gspo_mega.rollout.arrival_order import Formed, Freshness
from gspo_mega.rollout.groups import SampledGroups, TaskGroup
from gspo_mega.rollout.pool import ServerPool

_LEAST_RUNNING = 64


class Prompts(Protocol):
    """An endless stream of prompts, such as `PromptStream` of the room `data`."""

    def next(self) -> Prompt: ...

    def observe(self, results: Sequence[GroupResult]) -> None:
        """Gets the groups that were sampled for a step, in the order of their numbers, before the next is begun."""
        ...


@dataclass(frozen=True)
class BatchRequest:
    """A batch that the trainer asks for.

    `known` holds groups that exist already, whole or in part, by number. `keep` gets every new episode as soon as it is
    scored or has failed. `admit` gets every new group (number, prompt, weight version) before it is sampled. Both are
    called on the pool's thread, for this batch and until the next one is asked for.
    """

    step: int
    known: Mapping[int, Group] = field(default_factory=dict)
    keep: Callable[[Episode], None] = lambda episode: None
    admit: Callable[[int, Prompt, int], None] = lambda number, prompt, weight_version: None


@dataclass(frozen=True)
class ResumePoint:
    """What a run needs to continue after a batch.

    `prompts` is the position in the prompts before the first outstanding group was drawn. `tickets` is the position in
    the groups' numbers (`Admission.state_dict`).
    """

    prompts: Any = None
    tickets: dict[str, Any] | None = None


FILTER_KEY = "rollout.group_filter"


def load_group_filter(settings: UserFunction) -> LoadedHook:
    """Return `rollout.group_filter`, which gets a `GroupResult` and returns whether to train on the group. Raises
    HookError if it cannot be loaded or called.
    """
    return load_hook(FILTER_KEY, settings.function, settings.options, 1)


def is_kept_by(hook: LoadedHook, group: GroupResult) -> bool:
    """Whether `rollout.group_filter` keeps a group. Raises HookError if it fails, or returns neither True nor False."""
    kept = hook(group)
    # NumPy's and PyTorch's truth values are meant as well.
    if not isinstance(kept, bool) and type(kept).__name__ not in ("bool_", "bool"):
        raise hook.bad_result(f"{kept!r} for the group of {group.prompt_id}; True (keep it) or False was expected")
    return bool(kept)


def admission_of(config: Config) -> Admission:
    """Return the admission that the configuration asks for."""
    rollout, wanted = config.rollout, config.batch.prompts_per_step
    return Admission(
        wanted,
        int(wanted * rollout.max_oversampling) if filters_groups(rollout) else wanted,
        Freshness(rollout.max_staleness),
        rollout.order,
        num_steps=None if config.train is None else config.train.num_steps,
    )


class GroupScheduler:
    """One stretch of sampling, from the first batch asked for until `close`, or until an error ends all of it."""

    def __init__(
        self,
        config: Config,
        pool: ServerPool,
        prompts: Prompts,
        sampled: SampledGroups,
        tickets: Mapping[str, Any] | None,
        snapshot: Callable[[], Any],
        clock: Callable[[], float] = time.monotonic,
        on_ready: Callable[[int, list[Group]], None] = lambda step, groups: None,
    ) -> None:
        """`tickets` says where the numbers continue. `snapshot` returns the present position in `prompts`. `on_ready`
        gets the next step and the groups that it would have, if they are complete before it is asked for.
        """
        self._config, self._pool, self._prompts, self._sampled = config, pool, prompts, sampled
        self._snapshot, self._clock = snapshot, clock
        self._admission = admission_of(config)
        self._admission.load_state_dict(tickets)
        self._asked = BatchRequest(-1)
        self._batch: asyncio.Future[tuple[RolloutBatch, ResumePoint]] | None = None
        self._worker: asyncio.Task[None] | None = None
        # Groups that have ended come through a queue: asyncio.wait on N tasks would cost time by N for each of them.
        self._events: asyncio.Queue[asyncio.Task[Group] | None] = asyncio.Queue()
        self._num_running = 0
        chosen = config.rollout.group_filter
        self._filter = None if chosen is None else load_group_filter(chosen)
        self._groups: dict[int, Group] = {}
        self._before: dict[int, Any] = {}
        self._known: dict[int, Group] = {}
        self._on_ready = on_ready
        self._ready: tuple[int, ...] = ()
        self._num_drawn = self._admission.first
        self._asked_at = self._busy_since = clock()
        self._busy_seconds = 0.0
        self._straggler: tuple[float, int] | None = None

    async def take(self, asked: BatchRequest) -> tuple[RolloutBatch, ResumePoint]:
        """Return the batch of a step, and the position after it.

        Raises the first error of any group, also of one that would belong to a later batch. Cancelling this ends all
        sampling.
        """
        if self._worker is None:
            self._worker = asyncio.ensure_future(self._work())
            self._known = dict(asked.known)
        self._asked, self._asked_at = asked, self._clock()
        self._straggler = None
        self._batch = asyncio.get_running_loop().create_future()
        self._admission.ask(asked.step)
        self._num_drawn = min(self._num_drawn, self._admission.next_number)
        self._events.put_nowait(None)
        try:
            await asyncio.wait({self._batch, self._worker}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await self.close()
            raise
        if self._worker.done() and not self._batch.done():
            await self._worker
        return self._batch.result()

    async def close(self) -> None:
        """End all sampling."""
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)

    async def _work(self) -> None:
        async with TaskGroup() as tasks:
            while True:
                self._start_groups(tasks)
                self._hand_out()
                ended = await self._events.get()
                if ended is not None:
                    self._group_completed(ended.result())

    def _start_groups(self, tasks: asyncio.TaskGroup) -> None:
        # Do not start groups that could only wait for a server: Python's garbage collector visits every waiting task.
        most = max(_LEAST_RUNNING, 2 * self._pool.capacity // self._config.batch.group_size)
        while self._num_running < most and self._admission.may_admit():
            number = self._admission.next_number
            for _ in range(self._num_drawn, number):
                self._prompts.next()  # skip prompts of groups that were consumed before a restart
            self._num_drawn = number + 1
            self._before[number] = self._snapshot()
            prompt = self._prompts.next()
            known = self._known.pop(number, None)
            staleness = 0 if known is None else self._staleness(known)
            if known is not None and not self._is_in_time(staleness):
                known, staleness = None, 0
            self._admission.admit(staleness)
            if known is None:
                self._asked.admit(number, prompt, self._pool.committed_version)
            task = tasks.create_task(
                self._sampled.sample(number, prompt, f"step{self._asked.step:06d}", known, self._asked.keep)
            )
            task.add_done_callback(self._events.put_nowait)
            if not self._num_running:
                self._busy_since = self._clock()
            self._num_running += 1

    def _staleness(self, group: Group) -> int:
        """Return by how many versions the oldest token of a group lags behind the committed version. It is below 0 if
        one of its tokens is of a version that was never committed.
        """
        versions = {v for e in group.episodes for node in e.turns for v in distinct_values(node.weight_versions)}
        lags = [self._pool.committed_version - version for version in versions] or [0]
        return min(lags) if min(lags) < 0 else max(lags)

    def _is_in_time(self, staleness: int) -> bool:
        ahead = self._admission.latest_step() - self._admission.asked
        return staleness >= 0 and ahead + staleness <= self._config.rollout.max_staleness

    def _group_completed(self, group: Group) -> None:
        self._num_running -= 1
        if not self._num_running:
            self._busy_seconds += max(0.0, self._sampled.last_generated - self._busy_since)
        self._groups[group.group_id] = group
        self._admission.complete(group.group_id, self._is_kept(group))

    def _is_kept(self, group: Group) -> bool:
        if len(group.scored) < least_of_group(self._config):
            return False
        if self._filter is not None:
            return is_kept_by(self._filter, group_result(group))
        return not (self._config.rollout.filter_constant_groups and is_constant(group, self._config.advantage))

    def _hand_out(self) -> None:
        """Hand out the batch that was asked for, if it is complete. Report the next one if that is complete already."""
        if self._batch is None:
            return
        formed = self._admission.formed()
        if self._batch.done():
            if formed is not None and formed.kept not in ((), self._ready):
                self._ready = formed.kept
                self._on_ready(self._admission.step, [self._groups[number] for number in formed.kept])
            return
        if formed is None:
            if self._straggler is None and len(waited := self._admission.waits_for()) == 1:
                self._straggler = self._clock(), waited[0]
            return
        self._admission.consume(formed)
        sampled = [self._groups[number] for number in sorted((*formed.kept, *formed.dropped))]
        batch = self._make_batch(formed)
        if self._config.data.source is not None:
            self._prompts.observe([group_result(group) for group in sampled])  # the position below is after it
        for number in (*formed.kept, *formed.dropped):
            del self._before[number]
        first = self._before.get(self._admission.first)
        position = ResumePoint(first if self._before else self._snapshot(), self._admission.state_dict())
        self._batch.set_result((batch, position))
        self._hand_out()  # the next one may be complete, too

    def _make_batch(self, formed: Formed) -> RolloutBatch:
        now, sampled = self._clock(), self._sampled
        kept = [self._groups.pop(number) for number in formed.kept]
        dropped = [self._groups.pop(number) for number in formed.dropped]
        constant = [group for group in dropped if len(group.scored) >= least_of_group(self._config)]
        sampled.check_failures(anything_left=bool(kept or constant))
        counts = sampled.take_counts()
        # A step in which no group carries a signal still needs a batch: its advantages, and so its gradient, are zero.
        groups = kept or constant[: self._config.batch.prompts_per_step]
        counts["num_prompts_sampled"] = len(kept) + len(dropped)
        counts["num_groups_filtered"] = len(constant)
        counts["num_groups_unscored"] = len(dropped) - len(constant)
        counts["num_groups_missing"] = self._config.batch.prompts_per_step - len(kept)
        counts["num_groups_in_flight"] = self._admission.outstanding
        counts["num_partial_episodes"] = sum(_is_partial(e) for group in groups for e in group.episodes)
        counts["trainer_wait_seconds"] = now - self._asked_at
        counts["straggler_wait_seconds"] = self._straggler_seconds(now, groups)
        counts["servers_idle_seconds"] = self._pool.take_idle_seconds()
        generate, score = self._busy_seconds, now - sampled.last_generated
        if self._num_running:
            generate, score = generate + now - self._busy_since, 0.0
        self._busy_seconds, self._busy_since = 0.0, now
        return RolloutBatch(
            step=self._asked.step,
            groups=groups,
            counts={name: float(value) for name, value in counts.items()},
            phase_seconds={"generate": generate, "score": max(0.0, min(score, now - self._asked_at))},
            sampled=sampled_metrics(
                sorted([*kept, *dropped], key=lambda group: group.group_id),
                self._config.advantage,
                compares_within_groups(self._config),
            ),
        )

    def _straggler_seconds(self, now: float, groups: list[Group]) -> float:
        """Return for how long the batch waited for a single group. Tell the user about a long wait, with the prompt's
        name.
        """
        if self._straggler is None:
            return 0.0
        since, number = self._straggler
        seconds = now - since
        if seconds > self._config.rollout.progress_deadline_seconds / 2:
            name = next(
                (group.prompt.prompt_id for group in groups if group.group_id == number), "one that was dropped"
            )
            self._pool.tell(
                f"waited   step {self._asked.step + 1}: {seconds:.1f} s for the last group, of prompt {name}"
            )
        return seconds


def _is_partial(episode: Episode) -> bool:
    """Whether the episode was sampled from several versions of the weights."""
    return len({version for node in episode.turns for version in distinct_values(node.weight_versions)}) > 1

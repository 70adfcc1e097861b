"""From the numbers of a step to its metrics.

`reduced` turns the numbers of trajectories, groups or optimizer steps into one value each, by the catalogue's
reduction. `sampled_metrics` computes the metrics of everything that a step sampled, whether it is trained on or not.
`PhaseTimer` divides a step's wall time into phases that add up to it.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from gspo_mega.base.episodes import Group
from gspo_mega.config.schema import Advantage
from gspo_mega.metrics.catalogue import find_metric
from gspo_mega.metrics.tables import PHASES

_REDUCTIONS: dict[str, Callable[[np.ndarray], Any]] = {
    "mean": np.mean,
    "sum": np.sum,
    "min": np.min,
    "max": np.max,
    "sd": np.std,
    "ratio": np.mean,
    "value": lambda values: values.item(),
}


def reduced(numbers: Mapping[str, ArrayLike]) -> dict[str, float]:
    """One value for each metric from its numbers, [n] and not empty, by the metric's `reduction` in the catalogue.

    `ratio` takes one truth value per unit and gives the share that is true. `sd` is that of the population. `value`
    takes a single number. Raises ValueError for a name that is not in the catalogue, for a `quantile`, and for several
    numbers of a `value`.
    """
    metrics = {}
    for name, values in numbers.items():
        reduction = find_metric(name).reduction
        if reduction not in _REDUCTIONS:
            raise ValueError(f"metric {name} is a {reduction}, which cannot be computed from plain numbers")
        metrics[name] = float(_REDUCTIONS[reduction](np.asarray(values)))
    return metrics


def sampled_metrics(groups: Sequence[Group], advantage: Advantage, compares: bool) -> dict[str, float]:
    """The metrics of all `groups` that were sampled for a step; empty if no episode has a reward.

    `compares`: advantages are relative to the group (`compares_within_groups`).

    A filter drops groups with equal rewards from training, but what the policy can do shows in all groups. So these
    values are computed where the batch is made, which still sees the dropped groups, and recorded with it, so that a
    replay has the same values. Episodes that could not be scored, by a failure of their code, of a scorer or of the
    infrastructure, are in none of them.
    """
    scored = [group.scored for group in groups]
    episodes = [episode for group in scored for episode in group]
    if not episodes:
        return {}
    rewards = np.array([episode.reward for episode in episodes], dtype=np.float64)
    lengths = [episode.num_sampled_tokens for episode in episodes]
    numbers: dict[str, ArrayLike] = {
        "reward/mean": rewards,
        "reward/sd": rewards,
        "reward/standard_error": [_standard_error([[float(one.reward or 0.0) for one in group] for group in scored])],
        "response/length_mean": lengths,
        "response/length_max": lengths,
        "response/truncated_fraction": [episode.is_truncated for episode in episodes],
    }
    masks = [turn.sampling_masks for one in episodes for turn in one.turns if turn.sampling_masks is not None]
    if masks:
        counts = np.concatenate([mask.counts for mask in masks])
        numbers |= {"response/kept_tokens_mean": counts, "response/kept_tokens_max": counts}
    if compares:  # otherwise groups with equal rewards teach something as well
        several = [group for group in groups if len(group.scored) > 1]
        if several:
            numbers["groups/constant_fraction"] = [is_constant(group, advantage) for group in several]
    sources = np.array([episode.prompt.source for episode in episodes])
    for source in dict.fromkeys(sources.tolist()):
        numbers[f"reward/source/{source}"] = rewards[sources == source]
    for part in dict.fromkeys(name for episode in episodes for name in episode.reward_parts):
        numbers[f"reward/function/{_as_name(part)}"] = [
            episode.reward_parts[part] for episode in episodes if part in episode.reward_parts
        ]
    return reduced(numbers)


def is_constant(group: Group, advantage: Advantage) -> bool:
    """Whether a group teaches nothing: the advantages of its episodes are all 0."""
    return group.is_constant_by_turn if advantage.turns == "return_to_go" else group.is_constant


def _standard_error(groups: Sequence[Sequence[float]]) -> float:
    """The standard error of the mean over all rewards, from the spread between groups: prompts are independent, and the
    responses to one prompt are not. With a single group it is from the spread of the rewards in it.
    """
    groups = [group for group in groups if group]
    count = sum(map(len, groups))
    mean = math.fsum(reward for group in groups for reward in group) / count
    units = groups if len(groups) > 1 else [[reward] for reward in groups[0]]
    squares = math.fsum(math.fsum(reward - mean for reward in unit) ** 2 for unit in units)
    return math.sqrt(squares * len(units) / max(len(units) - 1, 1)) / count


def _as_name(label: str) -> str:
    """A reward's label as part of a metric's name. Characters that a name may not have, such as the colon in
    `package.module:function`, become dots.
    """
    return re.sub(r"[^A-Za-z0-9._-]+", ".", label)


class PhaseTimer:
    """Accumulates wall seconds by phase. The time of a nested phase does not count for the outer one, so the phases and
    `other`, the remainder, add up to the step. For one thread.

    A step runs from construction, `start_step` or the last `finish_step` to the next `finish_step`.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._inner_seconds: list[float] = []
        self._started = clock()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A context manager: count the block's time as the phase `name`, even if the block raises. Raises ValueError
        for an unknown phase.
        """
        if name not in PHASES or name == "other":
            raise ValueError(f"unknown phase {name!r}; valid: {', '.join(p for p in PHASES if p != 'other')}")
        started = self._clock()
        self._inner_seconds.append(0.0)
        try:
            yield
        finally:
            elapsed = self._clock() - started
            own = elapsed - self._inner_seconds.pop()
            if self._inner_seconds:
                self._inner_seconds[-1] += elapsed
            self._seconds[name] = self._seconds.get(name, 0.0) + own

    def start_step(self) -> None:
        """Drop what was counted so far and start a step now. Raises RuntimeError inside a phase."""
        if self._inner_seconds:
            raise RuntimeError("start_step inside a phase")
        self._seconds = {}
        self._started = self._clock()

    def finish_step(self) -> dict[str, float]:
        """End the step and start the next one. Returns `time/step_seconds`, `time/<phase>_seconds` of the phases that
        ran, and `time/other_seconds`. Raises RuntimeError inside a phase.
        """
        if self._inner_seconds:
            raise RuntimeError("finish_step inside a phase")
        now = self._clock()
        total = now - self._started
        seconds = {f"time/{name}_seconds": value for name, value in self._seconds.items()}
        other = total - sum(self._seconds.values())
        self._started, self._seconds = now, {}
        return {"time/step_seconds": total, **seconds, "time/other_seconds": max(other, 0.0)}

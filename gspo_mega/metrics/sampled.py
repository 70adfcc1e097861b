"""The metrics of everything that a step sampled, whether it is trained on or not.

A filter of groups with equal rewards trains on the others; what the policy can do is seen in all of them. These
values are computed where the batch is made, which is where the other groups are last seen, and recorded with it, so a
replay has the same. What could not be scored, by a failure of the episode's code, of a scorer or of the machinery, is
in none of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from gspo_mega.base.rollout_batch import Group
from gspo_mega.config.critic_config import compares_within_groups
from gspo_mega.config.schema import Config
from gspo_mega.metrics.reduction import reduced


def sampled_metrics(groups: Sequence[Group], config: Config) -> dict[str, float]:
    """Values of the metrics of `groups`, all that were sampled for a step. Nothing where no episode has a reward."""
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
    if compares_within_groups(config):  # otherwise equal rewards teach something, too
        several = [group for group in groups if len(group.scored) > 1]
        if several:
            numbers["groups/constant_fraction"] = [is_constant(group, config) for group in several]
    sources = np.array([episode.prompt.source for episode in episodes])
    for source in dict.fromkeys(sources.tolist()):
        numbers[f"reward/source/{source}"] = rewards[sources == source]
    for part in dict.fromkeys(name for episode in episodes for name in episode.reward_parts):
        numbers[f"reward/function/{_as_name(part)}"] = [
            episode.reward_parts[part] for episode in episodes if part in episode.reward_parts
        ]
    return reduced(numbers)


def is_constant(group: Group, config: Config) -> bool:
    """Whether a group teaches nothing: the advantages of its episodes are all 0."""
    return group.is_constant_by_turn if config.advantage.turns == "return_to_go" else group.is_constant


def _standard_error(groups: Sequence[Sequence[float]]) -> float:
    """Of the mean over all rewards, from the spread between groups: prompts are independent, the responses to one are
    not. With a single group, from the spread of its rewards.
    """
    groups = [group for group in groups if group]
    count = sum(map(len, groups))
    mean = math.fsum(reward for group in groups for reward in group) / count
    units = groups if len(groups) > 1 else [[reward] for reward in groups[0]]
    squares = math.fsum(math.fsum(reward - mean for reward in unit) ** 2 for unit in units)
    return math.sqrt(squares * len(units) / max(len(units) - 1, 1)) / count


def _as_name(label: str) -> str:
    """A reward's label as part of a metric's name, which may not hold all that `package.module:function` or a user's
    key does.
    """
    return re.sub(r"[^A-Za-z0-9._-]+", ".", label)

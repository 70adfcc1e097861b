"""What one step samples: the group of episodes of each prompt, and the batch that they are.

Owns which episodes of a batch are trained on: those with a reward, in groups of enough of them. What is inside an
episode is `episode_records.py`'s.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from gspo_mega.base.episode_records import Episode
from gspo_mega.base.records import Prompt, Trajectory, are_equal_rewards


@dataclass
class Group:
    """The episodes of one prompt in one rollout batch. Uneven groups are normal: samples may be dropped."""

    group_id: int
    prompt: Prompt
    episodes: list[Episode]

    @classmethod
    def of_rows(cls, group_id: int, prompt: Prompt, rows: Iterable[Trajectory]) -> Group:
        """A group of episodes of one turn each, whose rows are these very objects."""
        return cls(group_id, prompt, [Episode.of_row(row) for row in rows])

    @property
    def trajectories(self) -> list[Trajectory]:
        """The rows of all episodes, episode by episode."""
        return [row for episode in self.episodes for row in episode.rows()]

    @property
    def scored(self) -> list[Episode]:
        """The episodes that have a reward."""
        return [episode for episode in self.episodes if episode.is_scored]

    @property
    def rewards(self) -> list[float]:
        """The reward of every episode that has one."""
        return [float(episode.reward or 0.0) for episode in self.scored]

    @property
    def is_constant(self) -> bool:
        """True when the group carries no signal: the rewards of its episodes are all equal (or fewer than two)."""
        rewards = self.rewards
        return len(rewards) < 2 or are_equal_rewards(rewards)

    @property
    def is_constant_by_turn(self) -> bool:
        """`is_constant` where turns are credited with what follows them: rewards within an episode are a signal, too,
        even if the episodes' sums are equal.
        """
        return self.is_constant and not any(turn.reward for episode in self.scored for turn in episode.turns)


@dataclass
class RolloutBatch:
    """What `source.take(step)` returns: the complete, scored groups of one step, and how they were sampled.

    `counts` holds the collector's own numbers for metrics (`num_*`), `phase_seconds` its times. `sampled`: metrics of
    all groups that were sampled for the step, those that a filter left out, too; empty where that is not known.
    """

    step: int
    groups: list[Group]
    counts: dict[str, float] = field(default_factory=dict)
    phase_seconds: dict[str, float] = field(default_factory=dict)
    sampled: dict[str, float] = field(default_factory=dict)

    @property
    def episodes(self) -> list[Episode]:
        return [episode for group in self.groups for episode in group.episodes]

    @property
    def trajectories(self) -> list[Trajectory]:
        """The rows of all episodes, group by group."""
        return [row for group in self.groups for row in group.trajectories]

    def by_turn(self) -> RolloutBatch:
        """The same episodes with a row for each turn."""
        groups = [replace(group, episodes=[one.by_turn() for one in group.episodes]) for group in self.groups]
        return replace(self, groups=groups)

    def drop_routes(self) -> None:
        """Forget the routed experts, nearly all of what a batch with them takes in memory."""
        for episode in self.episodes:
            for part in (*episode.nodes, *episode.rows()):
                part.routed_experts = None

    def scored(self, least_of_group: int = 2) -> RolloutBatch:
        """What is trained on: the episodes that have a reward, in groups of at least `least_of_group` of them."""
        groups = [replace(group, episodes=group.scored) for group in self.groups]
        return replace(self, groups=[group for group in groups if len(group.episodes) >= least_of_group])

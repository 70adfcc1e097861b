"""From the rewards of episodes and of their turns to an advantage for every token of their rows.

Owns which turn has which reward and where its advantage goes; the returns and their normalisation are
`algorithm/turn_advantages.py`'s.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gspo_mega.algorithm.turn_advantages import turn_advantages
from gspo_mega.base.episode_records import Episode, leaves_of
from gspo_mega.config.schema import Config


def fill_turn_advantages(episodes: Sequence[Episode], rewards: Sequence[float], config: Config) -> None:
    """Set `token_advantages` of every row of the scored `episodes`, and `advantage` to its mean over the row's own
    tokens; 0 where it has none.

    `rewards`: the total of each episode. What is left of it besides the rewards of its turns belongs to the last turn
    of every branch. With `reward.permute_in_batch` the totals are others' and the turns have no rewards of their own.
    """
    own_rewards: list[float] = []
    parents: list[int] = []
    places: list[dict[int, int]] = []  # of each episode's turns, by node
    owners: list[int] = []
    for number, (episode, total) in enumerate(zip(episodes, rewards, strict=True)):
        place_of = {node.node_id: len(own_rewards) + k for k, node in enumerate(episode.turns)}
        given = {node.node_id: node.reward or 0.0 for node in episode.turns}
        if config.reward.permute_in_batch:
            given = dict.fromkeys(given, 0.0)
        left = total - sum(given.values())
        last = set(leaves_of(episode.nodes))
        for node in episode.turns:
            above = node.parent
            while above >= 0 and above not in place_of:
                above = episode.nodes[above].parent
            parents.append(place_of[above] if above >= 0 else -1)
            own_rewards.append(given[node.node_id] + (left if node.node_id in last else 0.0))
            owners.append(number)
        places.append(place_of)
    advantages = turn_advantages(
        torch.tensor(own_rewards, dtype=torch.float64),
        parents=torch.tensor(parents, dtype=torch.int64),
        episode_ids=torch.tensor(owners, dtype=torch.int64),
        group_ids=torch.tensor([episodes[owner].group_id for owner in owners], dtype=torch.int64),
        num_tokens=torch.tensor(
            [len(node.token_ids) for episode in episodes for node in episode.turns], dtype=torch.int64
        ),
        discount=config.advantage.turn_discount,
        std_ddof=config.advantage.std_ddof,
        divide_by_std=config.advantage.divide_by_std,
    ).tolist()
    for episode, place_of in zip(episodes, places, strict=True):
        for row in episode.rows():
            values = [0.0] * len(row.response_token_ids)
            total, count = 0.0, 0
            for (start, end), node_id in zip(row.turns, row.turn_nodes, strict=True):
                advantage = advantages[place_of[node_id]]
                values[start:end] = [advantage] * (end - start)
                total, count = total + advantage * (end - start), count + end - start
            row.token_advantages, row.advantage = values, total / max(count, 1)

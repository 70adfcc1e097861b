"""From the rewards of episodes and of their turns to a reward for every token of their rows, and whether a row was cut
off: what a critic's advantages are made of.

Owns which token has which reward; the maths is `algorithm/gae.py`'s. A row is a path to one of the episode's ends: it
has the rewards of the turns that it trains, and behind its last one what is left of the episode's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gspo_mega.algorithm.gae import token_rewards
from gspo_mega.base.episode_records import ENDED_BY_LIMIT, Episode
from gspo_mega.config.schema import Config


def fill_token_rewards(episodes: Sequence[Episode], rewards: Sequence[float], config: Config) -> None:
    """Set `token_rewards` and `is_truncated` of every row of the scored `episodes`. Their `advantage` is not known yet.

    `rewards`: the total of each episode. What is left of it besides the rewards of its turns is the last token's of
    every row. With `reward.permute_in_batch` the totals are others' and the turns have no rewards of their own.
    """
    for episode, total in zip(episodes, rewards, strict=True):
        given = {node.node_id: node.reward or 0.0 for node in episode.turns}
        if config.reward.permute_in_batch:
            given = dict.fromkeys(given, 0.0)
        left = total - sum(given.values())
        for row in episode.rows():
            row.advantage, row.token_advantages = None, None
            row.is_truncated = row.finish_reason == "length" or ENDED_BY_LIMIT in episode.info
            values = np.zeros(len(row.response_token_ids), np.float64)
            active = np.asarray(row.response_mask, bool)
            turns = [(end, node) for (start, end), node in zip(row.turns, row.turn_nodes, strict=True) if end > start]
            if turns:
                ends = [int(active[:end].sum()) for end, _ in turns]
                own = [given[node] for _, node in turns]
                own[-1] += left
                values[active] = token_rewards(int(active.sum()), ends, own).numpy()
            row.token_rewards = values.tolist()

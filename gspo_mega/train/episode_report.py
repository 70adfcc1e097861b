"""The shape of a step's episodes in its metrics: turns, rows, lengths, what the policy did not sample, and how old is
what it did.

Owns these names. How often turns, tools and failures happened while sampling is counted by the collector.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from gspo_mega.base.rollout_batch import RolloutBatch


def episode_shapes(batch: RolloutBatch) -> dict[str, ArrayLike]:
    """The numbers of each episode that is trained on, by name of the catalogue, before their reduction."""
    turns = [episode.num_turns for episode in batch.episodes]
    longest = [max((row.num_tokens for row in episode.rows()), default=0) for episode in batch.episodes]
    masks = [np.asarray(row.response_mask, np.uint8) for row in batch.trajectories]
    return {
        "episode/turns_mean": turns,
        "episode/turns_max": turns,
        "episode/rows_mean": [len(episode.rows()) for episode in batch.episodes],
        "episode/context_tokens_mean": longest,
        "episode/context_tokens_max": longest,
        "episode/masked_fraction": np.concatenate(masks) == 0,
    }


def token_staleness(batch: RolloutBatch, weight_version: int) -> list[np.ndarray]:
    """Of every row, [tokens that it trains] int64: by how many versions each lags behind `weight_version`."""
    active = (
        (np.asarray(row.weight_versions, np.int64), np.asarray(row.response_mask, bool)) for row in batch.trajectories
    )
    return [weight_version - versions[mask] for versions, mask in active]


def staleness_shapes(batch: RolloutBatch, staleness: Sequence[np.ndarray]) -> dict[str, ArrayLike]:
    """As `episode_shapes`, of the tokens. `staleness`: of `token_staleness`."""
    rows = iter(staleness)
    of_episodes = [np.concatenate([next(rows) for _ in episode.rows()]) for episode in batch.episodes]
    tokens = np.concatenate(of_episodes)
    return {
        "rollout/staleness_mean": tokens,
        "rollout/staleness_max": tokens,
        "rollout/multi_version_fraction": [(values != values[:1]).any() for values in of_episodes],
    }

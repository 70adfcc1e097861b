"""The records of format 1, whose episodes are one prompt and one response. They are read, and no longer written."""

from __future__ import annotations

from typing import Any

import numpy as np

from gspo_mega.base.episode_records import Episode, one_turn_episode
from gspo_mega.base.records import Prompt


def decode_trajectory(values: dict[str, Any], arrays: dict[str, np.ndarray], prompt: Prompt) -> Episode:
    """The episode of a record of kind `trajectory`. `arrays`: per token of the response, [response tokens], the ids
    (int32), the log-probs (float64 nats) and the weight versions; with routing, `routed_experts`.
    """
    episode = one_turn_episode(
        values["trajectory_id"],
        values["group_id"],
        prompt,
        arrays["response_token_ids"].tolist(),
        arrays["rollout_log_probs"].tolist(),
        arrays["weight_versions"].tolist(),
        values["finish_reason"],
        values["response_text"],
        routed_experts=arrays.get("routed_experts"),
    )
    for name in ("reward", "reward_parts", "reward_error"):
        setattr(episode, name, values[name])
    return episode

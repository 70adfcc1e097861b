"""The records that travel between the parts: Prompt, Trajectory, MicroBatch.

Plain data, no torch and no behaviour beyond small derived values, so that every layer may import them.
Token ids are never decoded and tokenised again: `Prompt.token_ids + Trajectory.response_token_ids` is
what the server saw and what the trainer scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

# Rewards whose spread is at most this share of the largest of them are equal: 1024 float64 roundings, what a sum of a
# thousand terms of one sign may lose when it is added up in another order. A millionth is four million times that.
REWARD_TOLERANCE = 1024 * 2.0**-52


@dataclass(frozen=True)
class Prompt:
    """One prompt x. `prompt_id` is stable across runs: `<source>:<zero-based row>`. `messages`: the prompt as a
    conversation, with the system prompt, from which `text` was rendered; none without a chat template. They make no
    prompt another one (`text` and `token_ids` do) and are not recorded.
    """

    prompt_id: str
    source: str
    token_ids: tuple[int, ...]
    text: str
    answer: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    messages: tuple[dict[str, Any], ...] = field(default=(), compare=False)


@dataclass
class Trajectory:
    """One row: a path of an episode from its first token to its last sampled one, as one sequence to train on.

    An episode of one turn is one row: a response y to a prompt. `response_token_ids`, `response_mask`,
    `rollout_log_probs` and `weight_versions` have one entry per token behind `prompt.token_ids`. `response_mask` is 1
    where the policy sampled the token and no other row of the episode trains it; elsewhere `rollout_log_probs` are 0.0.
    `rollout_log_probs` are nats under log_softmax(logits / temperature), as sampled. `routed_experts` is [prompt
    + response - 1, layers, top_k] of `route_type`, or None; of layers without experts it says nothing. `reward` is None
    until scored and after a failed scoring; `reward_error` is the failure's reason. `reward_parts` holds each reward
    function's own value; `correct` is whether the episode is right, None where no function says so. `advantage` is
    filled by the loop, `token_advantages` ([response], or None) where turns have advantages of their own, and
    `token_rewards` ([response], or None) where a critic makes the advantages. `finish_reason` is `stop` or `length`, of
    the last turn; `is_truncated`: whether that, or a limit of the episode, cut the row off.

    `branch` is the row's place among the episode's rows and `weight` its share of the episode's sampled tokens.
    `turns` are the spans [start, end) of the turns with mask 1 in the response, `turn_nodes` the nodes they are.
    """

    trajectory_id: str
    group_id: int
    prompt: Prompt
    response_token_ids: Sequence[int]
    response_mask: Sequence[int]
    rollout_log_probs: Sequence[float]
    weight_versions: Sequence[int]
    finish_reason: str
    response_text: str = ""
    routed_experts: np.ndarray | None = None
    reward: float | None = None
    reward_parts: dict[str, float] = field(default_factory=dict)
    reward_error: str | None = None
    correct: bool | None = None
    advantage: float | None = None
    episode_id: str = ""
    branch: int = 0
    weight: float = 1.0
    turns: list[tuple[int, int]] = field(default_factory=list)
    turn_nodes: list[int] = field(default_factory=list)
    token_advantages: list[float] | None = None
    token_rewards: list[float] | None = None
    is_truncated: bool = False

    @property
    def is_scored(self) -> bool:
        """Whether the trajectory has a reward to learn from. A scorer's failure says nothing about the response."""
        return self.reward is not None and self.reward_error is None

    @property
    def num_response_tokens(self) -> int:
        return len(self.response_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt.token_ids) + len(self.response_token_ids)


def route_type(num_experts: int) -> type[np.uint8] | type[np.int16]:
    """The type of expert numbers, wherever they travel or are kept: a token of a large model has hundreds of them."""
    return np.uint8 if num_experts <= 256 else np.int16


def are_equal_rewards(rewards: Sequence[float]) -> bool:
    """Whether max r - min r <= `REWARD_TOLERANCE` max |r|: the difference is rounding (0.1 + 0.2 is not 0.3 in
    float64).
    """
    low, high = min(rewards), max(rewards)
    # Halves, because the difference of two finite numbers may be infinite.
    return high / 2 - low / 2 <= REWARD_TOLERANCE * max(abs(low), abs(high)) / 2


@dataclass
class MicroBatch:
    """One packed forward of S whole sequences, T tokens, before any context-parallel slicing.

    Arrays (numpy), the same on all ranks of one data-parallel rank:

    - `token_ids` [T] int64; `position_ids` [T] int64, from 0 in each sequence
    - `cu_seqlens` [S+1] int32, offsets of the padded sequences
    - `sequence_ids` [T] int64 in [0, S), the sequence of each position
    - `labels` [T] int64, the next token (0 where there is none)
    - `loss_mask` [T] float32, 1 where `labels` is an active response token
    - `trajectory_index` [S] int64, the row of each sequence in the rollout batch; -1 for filler
    - `rollout_log_probs` [T] float32, nats, aligned with `labels`
    - `sequence`: values per sequence (advantage, response length, keep), [S] each
    - `routed_experts` [T, layers, top_k] of `route_type`, the experts that the rollout engine sent each position to;
      positions of which it returned none (a sequence's last token, padding, filler) are spread evenly. `routed_layers`
      [layers] int64: the model's layers that these are, counted from 0; None where they are all layers. Both differ
      between pipeline stages: a rank has the layers with experts of its own stage. None where there are no routes
    - `token_advantages` [T] float64, aligned with `labels`, 0 where `loss_mask` is 0; None where `sequence` has all.
      With a critic they are written once its values are known. `token_rewards` [T] float64, aligned alike; None without
      a critic
    - `versions` [V] int64, the weight versions that sampled the rollout batch, ascending, and `version_index` [T]
      int64, each active label's place in it; None where all were sampled by the weights that are trained

    Filler is a sequence without trajectory and with `loss_mask` 0; it lets all ranks run the same number of
    micro-batches.
    """

    token_ids: np.ndarray
    position_ids: np.ndarray
    cu_seqlens: np.ndarray
    sequence_ids: np.ndarray
    labels: np.ndarray
    loss_mask: np.ndarray
    trajectory_index: np.ndarray
    rollout_log_probs: np.ndarray
    sequence: dict[str, np.ndarray] = field(default_factory=dict)
    routed_experts: np.ndarray | None = None
    routed_layers: np.ndarray | None = None
    token_advantages: np.ndarray | None = None
    token_rewards: np.ndarray | None = None
    versions: np.ndarray | None = None
    version_index: np.ndarray | None = None

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def num_sequences(self) -> int:
        return int(self.trajectory_index.shape[0])

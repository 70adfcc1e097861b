"""The records that travel between the parts: Prompt, Trajectory, MicroBatch.

Plain data, no torch and no behaviour beyond small derived values, so that every layer may import them.
Token ids are never decoded and tokenised again: `Prompt.token_ids + Trajectory.response_token_ids` is
what the server saw and what the trainer scores.

One value for each token, as an array: what records hold of a response for as long as a batch lives.

Owns how few bytes that takes. A column reads and compares as the list of its values, which are never changed: token ids
take 4 bytes, log-probs 4 where float32 has their exact value and 8 otherwise, and a column of one value (a mask, the
version of the weights) none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, overload

import numpy as np

_T = TypeVar("_T", int, float)


class Column(Sequence[_T], Generic[_T]):
    """A sequence of Python numbers over `array`, [tokens]. Slices share its memory."""

    __slots__ = ("array",)

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __len__(self) -> int:
        return self.array.shape[0]

    @overload
    def __getitem__(self, place: int) -> _T: ...

    @overload
    def __getitem__(self, place: slice) -> Column[_T]: ...

    def __getitem__(self, place: int | slice) -> _T | Column[_T]:
        return Column(self.array[place]) if isinstance(place, slice) else self.array[place].item()

    def __iter__(self) -> Iterator[_T]:
        return iter(self.array.tolist())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.array, dtype) if copy else np.asarray(self.array, dtype)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Column):
            return np.array_equal(self.array, other.array)
        return self.array.tolist() == list(other) if isinstance(other, (list, tuple)) else NotImplemented

    def __add__(self, other: Sequence[_T]) -> list[_T]:
        """As of lists: a new list."""
        return [*self, *other] if isinstance(other, (list, Column)) else NotImplemented

    def __radd__(self, other: list[_T]) -> list[_T]:
        return [*other, *self] if isinstance(other, list) else NotImplemented

    __hash__ = None  # pyright: ignore[reportAssignmentType]: as of a list

    def __repr__(self) -> str:
        return repr(self.array.tolist())


def ints(values: Iterable[int]) -> Column[int]:
    """Raises OverflowError for a value beyond int32."""
    if isinstance(values, Column):
        return values
    array = np.asarray(values if isinstance(values, (list, tuple, np.ndarray)) else list(values), np.int32)
    return Column(_narrowest(array))


def floats(values: Iterable[float]) -> Column[float]:
    """The float64 values to the bit."""
    if isinstance(values, Column):
        return values
    array = np.asarray(values if isinstance(values, (list, tuple, np.ndarray)) else list(values), np.float64)
    with np.errstate(over="ignore"):
        short = array.astype(np.float32)
    # Compared as bits: 0.0 equals -0.0, and no NaN equals itself.
    is_exact = np.array_equal(short.astype(np.float64).view(np.int64), array.view(np.int64))
    return Column(short if is_exact else np.array(array))


def constant(value: int, num: int) -> Column[int]:
    """`num` times the value."""
    return Column(np.broadcast_to(np.int32(value), (num,)))


def joined(parts: Sequence[Sequence[_T]]) -> Sequence[_T]:
    """One behind the other; a single part as it is."""
    filled = [part for part in parts if len(part)] or list(parts[:1])
    if len(filled) == 1:
        return filled[0]
    return Column(_narrowest(np.concatenate([np.asarray(part) for part in filled])))


def _narrowest(array: np.ndarray) -> np.ndarray:
    if array.shape[0] and array.dtype.kind == "i" and (array == array[0]).all():
        return np.broadcast_to(array[0].copy(), array.shape)
    return np.array(array)


def distinct(values: Sequence[int]) -> set[int]:
    """The values that occur."""
    if isinstance(values, Column):
        return set(values[:1] if values.array.strides == (0,) else np.unique(values.array).tolist())
    return set(values)


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

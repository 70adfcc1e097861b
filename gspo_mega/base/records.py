"""The records that travel between the rooms: Prompt, Trajectory and MicroBatch, and the columns that they hold.

The records are plain data without torch and with only small derived values, so every room may import them. Token ids
are never decoded and tokenised again: `Prompt.token_ids + Trajectory.response_token_ids` is what the server saw and
what the trainer scores.

A `Column` holds one value per token of a response, for as long as a batch lives, in few bytes. It reads and compares as
the list of its values, which never change. A token id takes 4 bytes. A log-prob takes 4 bytes if float32 has its exact
value and that of all others, and 8 bytes otherwise. A column of one repeated value (a mask, the version of the weights)
takes none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, overload

import numpy as np

from gspo_mega.base.sampling_masks import SamplingMasks
from gspo_mega.base.served_scores import ServedScores

# Rewards are equal if their spread is at most this share of the largest of them. It is 1024 float64 roundings: a sum of
# a thousand terms of one sign may lose that much when it is added up in another order. One millionth is four million
# times this share.
REWARD_TOLERANCE = 1024 * 2.0**-52

_T = TypeVar("_T", int, float)


@dataclass(frozen=True)
class Prompt:
    """One prompt x.

    `prompt_id` is stable across runs: `<source>:<zero-based row>`. `messages` is the conversation from which `text` was
    rendered, with the system prompt; it is empty without a chat template. Two prompts that differ only in `messages`
    are equal (`text` and `token_ids` tell prompts apart), and `messages` is not recorded.
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

    An episode of one turn is one row: a response y to a prompt.

    - `response_token_ids`, `response_mask`, `rollout_log_probs` and `weight_versions` have one entry per token after
      `prompt.token_ids`. `response_mask` is 1 where the policy sampled the token and no other row of the episode trains
      it. `rollout_log_probs` are nats under log_softmax(logits / temperature), as sampled, and 0.0 where the mask is 0
    - `finish_reason` is that of the last turn: `stop`, `length` or `stop_string`. `is_truncated`: whether that, or a
      limit of the episode, cut the row off
    - `routed_experts` is [prompt + response - 1, layers, top_k] of `route_type`, or None. It says nothing about layers
      without experts
    - `sampling_masks` are the tokens that each response token was sampled from, empty where the mask is 0; None if it
      was sampled from all tokens. `rollout_log_probs` are then normalised over these
    - `teacher` is what a teacher's server said of the response tokens, 0 where the mask is 0; None without one
    - `reward` is None until the row is scored and after a failed scoring; `reward_error` is then the reason.
      `reward_parts` holds each reward function's own value. `correct` says whether the episode is right; it is None if
      no function says so
    - the training loop fills `advantage`. It fills `token_advantages` ([response], or None) if turns have advantages of
      their own, and `token_rewards` ([response], or None) if a critic makes the advantages
    - `branch` is the row's place among the episode's rows, and `weight` its share of the episode's sampled tokens
    - `turns` are the spans [start, end) in the response of the turns with mask 1; `turn_nodes` are their nodes
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
    sampling_masks: SamplingMasks | None = None
    teacher: ServedScores | None = None

    @property
    def is_scored(self) -> bool:
        """Whether the row has a reward to learn from. A failure of the scorer says nothing about the response."""
        return self.reward is not None and self.reward_error is None

    @property
    def num_response_tokens(self) -> int:
        return len(self.response_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt.token_ids) + len(self.response_token_ids)


def route_type(num_experts: int) -> type[np.uint8] | type[np.int16]:
    """Return the type in which expert numbers travel and are kept. A token of a large model has hundreds of them."""
    return np.uint8 if num_experts <= 256 else np.int16


def are_equal_rewards(rewards: Sequence[float]) -> bool:
    """Whether max r - min r <= `REWARD_TOLERANCE` max |r|.

    Such a difference is rounding: 0.1 + 0.2 is not 0.3 in float64.
    """
    low, high = min(rewards), max(rewards)
    # Halves are compared, because the difference of two finite numbers may be infinite.
    return high / 2 - low / 2 <= REWARD_TOLERANCE * max(abs(low), abs(high)) / 2


@dataclass
class MicroBatch:
    """One packed forward pass of S whole sequences with T tokens, before any context-parallel slicing.

    The arrays (numpy) are the same on all ranks of one data-parallel rank:

    - `token_ids` [T] int64; `position_ids` [T] int64, from 0 in each sequence
    - `cu_seqlens` [S+1] int32, the offsets of the padded sequences
    - `sequence_ids` [T] int64 in [0, S), the sequence of each position
    - `labels` [T] int64, the next token (0 if there is none)
    - `loss_mask` [T] float32, 1 where `labels` is an active response token
    - `trajectory_index` [S] int64, the row of each sequence in the rollout batch; -1 for filler
    - `rollout_log_probs` [T] float32, nats, aligned with `labels`
    - `sequence`: values per sequence (advantage, response length, keep), [S] each
    - `routed_experts` [T, layers, top_k] of `route_type`, the experts to which the rollout engine sent each position,
      or None without routes. Positions for which it returned none (a sequence's last token, padding, filler) are spread
      evenly. `routed_layers` [layers] int64 says which layers of the model these are, counted from 0; it is None if
      they are all layers. Both differ between pipeline stages: a rank has the layers with experts of its own stage
    - `token_advantages` [T] float64, aligned with `labels`, 0 where `loss_mask` is 0; None if `sequence` has all of
      them. With a critic they are written once its values are known. `token_rewards` [T] float64, aligned in the same
      way; None without a critic
    - `versions` [V] int64, the weight versions that sampled the rollout batch, ascending, and `version_index` [T]
      int64, the place of each active label's version in it. Both are None if the weights that are trained sampled
      everything

    - `mask_counts` [T] int32 and `mask_codes` [bytes] uint8, `SamplingMasks` aligned with `labels`: the tokens that
      each active label was sampled from, over which its log-probs are normalised. Both are None if these are all tokens
    - `computed_at` [T] int64, `node_starts` [n+1] and `node_ends` [n] int64: how the rows share prefixes, which a model
      computes once (`data/forest.py`). All other arrays have their T positions with or without sharing. Position p of
      the rows is computed at position `computed_at[p]` of the C = `node_starts[n]` tokens that a model sees. These are
      the nodes of a forest in preorder: node i is `node_starts[i]` to `node_starts[i+1]`, and its descendants reach
      from there to `node_ends[i]`. All three are None if no row shares anything
    - `teacher_log_probs` [T] float32, `teacher_top_ids` [T, K] int32 and `teacher_top_log_probs` [T, K] float32: what
      teachers' servers said of each active label (`ServedScores`), 0 elsewhere; None without such a teacher

    A filler is a sequence without a trajectory, with `loss_mask` 0. It lets all ranks run the same number of
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
    mask_counts: np.ndarray | None = None
    mask_codes: np.ndarray | None = None
    computed_at: np.ndarray | None = None
    node_starts: np.ndarray | None = None
    node_ends: np.ndarray | None = None
    teacher_log_probs: np.ndarray | None = None
    teacher_top_ids: np.ndarray | None = None
    teacher_top_log_probs: np.ndarray | None = None

    @property
    def num_tokens(self) -> int:
        """T, positions of all rows."""
        return int(self.token_ids.shape[0])

    @property
    def num_computed(self) -> int:
        """Positions that a model computes: fewer than T if rows share prefixes."""
        return self.num_tokens if self.node_starts is None else int(self.node_starts[-1])

    def first_rows(self) -> np.ndarray:
        """For each computed position the first of the rows' positions that are computed there, [C] int64."""
        positions = np.arange(self.num_tokens)
        if self.computed_at is None:
            return positions
        first = np.empty(self.num_computed, np.int64)
        first[self.computed_at[::-1]] = positions[::-1]  # of several writes to one place the last stays
        return first

    def row_counts(self) -> np.ndarray:
        """How many rows have a token at each computed position, [C] int64: 0 for padding, above 1 where rows share."""
        lengths = self.sequence["num_prompt_tokens"] + self.sequence["num_response_tokens"]
        is_token = self.position_ids < lengths[self.sequence_ids]
        computed_at = np.arange(self.num_tokens) if self.computed_at is None else self.computed_at
        return np.bincount(computed_at[is_token], minlength=self.num_computed)

    @property
    def num_sequences(self) -> int:
        return int(self.trajectory_index.shape[0])


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
        """A new list, as lists return."""
        return [*self, *other] if isinstance(other, (list, Column)) else NotImplemented

    def __radd__(self, other: list[_T]) -> list[_T]:
        return [*other, *self] if isinstance(other, list) else NotImplemented

    __hash__ = None  # pyright: ignore[reportAssignmentType]: a list has no hash either

    def __repr__(self) -> str:
        return repr(self.array.tolist())


def int_column(values: Iterable[int]) -> Column[int]:
    """Return a column of the values, [tokens] int32. Raises OverflowError for a value beyond int32."""
    if isinstance(values, Column):
        return values
    array = np.asarray(values if isinstance(values, (list, tuple, np.ndarray)) else list(values), np.int32)
    return Column(_narrowest(array))


def float_column(values: Iterable[float]) -> Column[float]:
    """Return a column of the float64 values, exact to the bit: [tokens] float32 if all of them fit, else float64."""
    if isinstance(values, Column):
        return values
    array = np.asarray(values if isinstance(values, (list, tuple, np.ndarray)) else list(values), np.float64)
    with np.errstate(over="ignore"):
        short = array.astype(np.float32)
    # The comparison is of bits, because 0.0 equals -0.0 and no NaN equals itself.
    is_exact = np.array_equal(short.astype(np.float64).view(np.int64), array.view(np.int64))
    return Column(short if is_exact else np.array(array))


def constant_column(value: int, num: int) -> Column[int]:
    """Return a column of `num` times the value."""
    return Column(np.broadcast_to(np.int32(value), (num,)))


def join_columns(parts: Sequence[Sequence[_T]]) -> Sequence[_T]:
    """Return the parts one after the other. If only one is not empty, it is returned as it is."""
    filled = [part for part in parts if len(part)] or list(parts[:1])
    if len(filled) == 1:
        return filled[0]
    return Column(_narrowest(np.concatenate([np.asarray(part) for part in filled])))


def _narrowest(array: np.ndarray) -> np.ndarray:
    if array.shape[0] and array.dtype.kind == "i" and (array == array[0]).all():
        return np.broadcast_to(array[0].copy(), array.shape)
    return np.array(array)


def distinct_values(values: Sequence[int]) -> set[int]:
    """Return the set of the values that occur."""
    if isinstance(values, Column):
        return set(values[:1] if values.array.strides == (0,) else np.unique(values.array).tolist())
    return set(values)

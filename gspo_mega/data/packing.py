"""From trajectories to packed micro-batches: which mini-batch, which data-parallel rank, which forward pass.

Owns the split of a rollout batch into mini-batches, the balanced packing of each under a token budget, and the
arrays of one pack. Pure numpy; moving shards between ranks and slicing for context parallelism is the engine's.
Everything is a function of its arguments: the same batch, seed and step give the same packs on every machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gspo_mega.base.errors import PlanError
from gspo_mega.base.records import MicroBatch
from gspo_mega.data.balance import balanced_packs

# For callers without a model; a run's own comes with its layout.
ATTENTION_CROSSOVER_TOKENS = 8192


@dataclass(frozen=True)
class RankPlan:
    """What one data-parallel rank works on in a rollout batch.

    `mini_batches[m][k]`: the rows of the rollout batch in micro-batch k of mini-batch m; an empty list is filler, which
    lets all ranks run equally many micro-batches.
    """

    mini_batches: list[list[list[int]]]

    @property
    def rows(self) -> list[int]:
        """All rows of the rollout batch that the rank works on, ascending."""
        return sorted(row for packs in self.mini_batches for pack in packs for row in pack)


def split_mini_batches(num_trajectories: int, num_mini_batches: int, seed: int, step: int) -> list[list[int]]:
    """Deal the trajectories 0..N-1 of a rollout batch to its mini-batches, shuffled by (`seed`, `step`).

    Every index once; sizes differ by at most one. Raises PlanError when a mini-batch would be empty.
    """
    if not 1 <= num_mini_batches <= num_trajectories:
        raise PlanError(
            f"{num_trajectories} trajectories cannot be split into {num_mini_batches} mini-batches;"
            f" batch.num_mini_batches must be 1 to {num_trajectories}"
        )
    order = np.random.default_rng((seed, step)).permutation(num_trajectories)
    return [part.tolist() for part in np.array_split(order, num_mini_batches)]


def padded_length(length: int, pad_multiple: int) -> int:
    """The smallest multiple of `pad_multiple` that holds `length` tokens."""
    return -(-length // pad_multiple) * pad_multiple


def sequence_cost(length: int, attention_crossover_tokens: int = ATTENTION_CROSSOVER_TOKENS) -> float:
    """Relative time of one sequence: linear layers plus causal attention, equal at `attention_crossover_tokens`."""
    return length + length * length / attention_crossover_tokens


def plan_packs(
    lengths: Sequence[int],
    budget_tokens: int,
    pad_multiple: int,
    num_data_parallel: int,
    attention_crossover_tokens: int = ATTENTION_CROSSOVER_TOKENS,
    *,
    pack_multiple: int = 1,
    synchronised_packs: bool = False,
) -> list[list[list[int]]]:
    """Pack the sequences of one mini-batch: packs[rank][k] lists the indices into `lengths` of one forward pass.

    Sequences are never split; each takes its length padded to `pad_multiple`, a pack the sum of those padded to
    `pack_multiple` (itself a multiple of the former), at most `budget_tokens`. All ranks get equally many packs, as few
    as best fit finds; an empty pack is filler. Packs are filled and dealt so that the dearest rank is as cheap as found
    (`data/balance.py`), because ranks wait for each other at the optimizer step; `synchronised_packs`: they do so in
    every pack, as expert parallelism makes them. Within a pack the longest sequence comes first.

    Raises PlanError for a sequence that does not fit alone.
    """
    budget = budget_tokens // pack_multiple * pack_multiple
    tokens = np.asarray(lengths, dtype=np.int64)
    padded = -(-tokens // pad_multiple) * pad_multiple
    for index in np.flatnonzero((tokens < 1) | (padded > budget)).tolist():
        if tokens[index] < 1:
            raise PlanError(f"sequence {index} has no tokens")
        multiple = max(pad_multiple, pack_multiple)
        needed = padded_length(int(tokens[index]), multiple)
        raise PlanError(
            f"sequence {index} has {tokens[index]} tokens ({needed} padded to a multiple of {multiple}); "
            f"batch.micro_batch_tokens is {budget_tokens} and must be at least {needed}"
        )
    sizes = padded.tolist()
    costs = [sequence_cost(size, attention_crossover_tokens) for size in sizes]
    packs = balanced_packs(sizes, costs, budget, num_data_parallel, synchronised_packs)
    return [[sorted(pack, key=lambda i: (-sizes[i], i)) for pack in rank] for rank in packs]


def plan_rollout_batch(
    lengths: Sequence[int],
    *,
    num_mini_batches: int,
    budget_tokens: int,
    pad_multiple: int,
    num_data_parallel: int,
    seed: int,
    step: int,
    episode_of: Sequence[int] | None = None,
    attention_crossover_tokens: int = ATTENTION_CROSSOVER_TOKENS,
    pack_multiple: int = 1,
    synchronised_packs: bool = False,
) -> list[RankPlan]:
    """The plan of every data-parallel rank for a rollout batch whose rows have `lengths` tokens.

    `episode_of`: the number of each row's episode, from 0 and ascending; None where each row is an episode. Episodes
    are dealt to mini-batches, with all their rows; their rows may go to several ranks. The other arguments are those of
    `split_mini_batches` and `plan_packs`. Raises PlanError as `split_mini_batches` and
    `plan_packs` do.
    """
    plans = [RankPlan([]) for _ in range(num_data_parallel)]
    rows_of: list[list[int]] = [[] for _ in range(episode_of[-1] + 1 if episode_of else 0)]
    for row, episode in enumerate(episode_of or ()):
        rows_of[episode].append(row)
    for episodes in split_mini_batches(len(rows_of) or len(lengths), num_mini_batches, seed, step):
        members = [row for episode in episodes for row in rows_of[episode]] if rows_of else episodes
        packed = plan_packs(
            [lengths[i] for i in members],
            budget_tokens,
            pad_multiple,
            num_data_parallel,
            attention_crossover_tokens,
            pack_multiple=pack_multiple,
            synchronised_packs=synchronised_packs,
        )
        for plan, packs in zip(plans, packed, strict=True):
            plan.mini_batches.append([[members[i] for i in pack] for pack in packs])
    return plans


def build_micro_batch(
    trajectories: Sequence[Mapping[str, Any]],
    rows: Sequence[int],
    pad_multiple: int,
    sequence_keys: Sequence[str] = (),
    pack_multiple: int = 1,
    token_keys: Sequence[str] = (),
) -> MicroBatch:
    """The arrays of one pack: the `rows` of `trajectories`, in that order; no rows give filler.

    A trajectory is a mapping with `prompt_token_ids` [P], `response_token_ids` [R], `response_mask` [R] and
    `rollout_log_probs` [R]. A position p of its P + R tokens is aligned with what the model predicts there: `labels[p]`
    is token p + 1, and `loss_mask[p]` and `rollout_log_probs[p]` are those of token p + 1, 0 unless it is an active
    response token. Padding up to `pad_multiple` belongs to the sequence (token 0, positions go on, loss_mask 0); the
    last sequence is padded further until the pack is a multiple of `pack_multiple` (itself one of `pad_multiple`).
    `sequence` holds, [S] each: `num_prompt_tokens`, `num_response_tokens`, `length` (active response tokens) int64, and
    float64 of every key in `sequence_keys`, looked up in the trajectory; 0 in filler, which is one sequence of the
    smallest valid pack's length with `trajectory_index` -1. `token_keys`: `token_advantages`, `token_rewards` and
    `version_index`, [R] of each trajectory, aligned as its log-probs are; not in the pack unless named.

    Raises ValueError for a trajectory whose arrays differ in length.
    """
    names = (*TOKEN_ARRAYS, *token_keys)
    pieces = [_sequence_arrays(trajectories[row], row, pad_multiple, token_keys) for row in rows]
    pieces = pieces or [_filler_arrays(pad_multiple, token_keys)]
    sizes = [piece["token_ids"].shape[0] for piece in pieces]
    missing = -sum(sizes) % pack_multiple
    for name in names:
        pieces[-1][name] = np.pad(pieces[-1][name], (0, missing))
    sizes[-1] += missing

    def joined(name: str) -> np.ndarray:
        return np.concatenate([piece[name] for piece in pieces])

    counts = {name: np.array([piece[name] for piece in pieces], dtype=np.int64) for name in COUNTS}
    values = {
        key: np.array([trajectories[row][key] for row in rows] or [0.0], dtype=np.float64) for key in sequence_keys
    }
    return MicroBatch(
        token_ids=joined("token_ids"),
        position_ids=np.concatenate([np.arange(size, dtype=np.int64) for size in sizes]),
        cu_seqlens=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32),
        sequence_ids=np.repeat(np.arange(len(sizes), dtype=np.int64), sizes),
        labels=joined("labels"),
        loss_mask=joined("loss_mask"),
        trajectory_index=np.array(list(rows) or [-1], dtype=np.int64),
        rollout_log_probs=joined("rollout_log_probs"),
        sequence=counts | values,
        **{name: joined(name) for name in token_keys},
    )


# Of the arrays that are in a pack only where they are asked for.
_MORE_DTYPES = {"token_advantages": np.float64, "token_rewards": np.float64, "version_index": np.int64}
TOKEN_ARRAYS = ("token_ids", "labels", "loss_mask", "rollout_log_probs")
COUNTS = ("num_prompt_tokens", "num_response_tokens", "length")


def _filler_arrays(size: int, token_keys: Sequence[str]) -> dict[str, Any]:
    return {
        "token_ids": np.zeros(size, np.int64),
        "labels": np.zeros(size, np.int64),
        "loss_mask": np.zeros(size, np.float32),
        "rollout_log_probs": np.zeros(size, np.float32),
        **{key: np.zeros(size, _MORE_DTYPES[key]) for key in token_keys},
    } | dict.fromkeys(COUNTS, 0)


def _sequence_arrays(
    trajectory: Mapping[str, Any], row: int, pad_multiple: int, token_keys: Sequence[str]
) -> dict[str, Any]:
    prompt = np.asarray(trajectory["prompt_token_ids"], dtype=np.int64)
    response = np.asarray(trajectory["response_token_ids"], dtype=np.int64)
    mask = np.asarray(trajectory["response_mask"], dtype=np.float32)
    log_probs = np.asarray(trajectory["rollout_log_probs"], dtype=np.float32)
    if not response.shape == mask.shape == log_probs.shape:
        raise ValueError(
            f"trajectory in row {row}: {response.shape[0]} response tokens, {mask.shape[0]} mask entries,"
            f" {log_probs.shape[0]} log-probs"
        )
    if prompt.size == 0:
        raise ValueError(f"trajectory in row {row}: no prompt token, so its first response token has no prediction")
    tokens = np.concatenate([prompt, response])
    arrays = _filler_arrays(padded_length(tokens.size, pad_multiple), token_keys)
    arrays["token_ids"][: tokens.size] = tokens
    arrays["labels"][: tokens.size - 1] = tokens[1:]
    predicted = slice(prompt.size - 1, tokens.size - 1)
    active = mask != 0
    arrays["loss_mask"][predicted] = active
    arrays["rollout_log_probs"][predicted] = np.where(active, log_probs, 0)
    for key in token_keys:
        arrays[key][predicted] = np.where(active, np.asarray(trajectory[key], _MORE_DTYPES[key]), 0)
    return arrays | {
        "num_prompt_tokens": prompt.size,
        "num_response_tokens": response.size,
        "length": int(active.sum()),
    }


def response_values(micro_batch: MicroBatch, values: np.ndarray) -> dict[int, np.ndarray]:
    """Values aligned with `labels`, [T], by trajectory: {row of the rollout batch: [R], one entry per response token}.
    Filler is left out.
    """
    result = {}
    for s, row in enumerate(micro_batch.trajectory_index.tolist()):
        if row >= 0:
            start = int(micro_batch.cu_seqlens[s]) + int(micro_batch.sequence["num_prompt_tokens"][s]) - 1
            result[row] = values[start : start + int(micro_batch.sequence["num_response_tokens"][s])]
    return result

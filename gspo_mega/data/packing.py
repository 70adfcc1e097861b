"""From trajectories to packed micro-batches: which mini-batch, which data-parallel rank, which forward pass.

First comes the split of a rollout batch into mini-batches and of each into packs under a token budget, then the arrays
of one pack, then the arithmetic of filling bins of equal capacity so that none costs much more than the others (an item
takes room, tokens, in one bin, a forward pass, and adds cost, FLOPs, to one rank). Last come the experts to which the
rollout engine sent each token, in the layout of a pack; a pipeline stage gets those of its own layers with experts, and
they are packed only when they are handed out, so that the whole batch's routes are in memory once.

Pure numpy. Moving shards between ranks and slicing for context parallelism happens in the engine. Everything is a
function of its arguments: the same batch, seed and step give the same packs on every machine; ties go to the lower
index.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import zip_longest
from typing import Any

import numpy as np

from gspo_mega.base.errors import PlanError, RolloutError
from gspo_mega.base.records import MicroBatch, Trajectory, route_type
from gspo_mega.base.sampling_masks import SamplingMasks
from gspo_mega.data.forest import SharePrefixes, forest_cost, in_tree_order, lay_out, num_computed, tree_pieces
from gspo_mega.models.spec import ModelSpec

# For callers without a model. A run's own value comes from its layout.
ATTENTION_CROSSOVER_TOKENS = 8192
TOKEN_ARRAYS = ("token_ids", "labels", "loss_mask", "rollout_log_probs")
COUNTS = ("num_prompt_tokens", "num_response_tokens", "length")
# The arrays that are in a pack only if they are asked for.
_MORE_DTYPES = {
    "token_advantages": np.float64,
    "token_rewards": np.float64,
    "version_index": np.int64,
    "teacher_log_probs": np.float32,
    "teacher_top_ids": np.int32,
    "teacher_top_log_probs": np.float32,
}
# Numbers that are compared at once, few enough to stay in a core's cache.
_BLOCK = 2**17


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


def plan_rollout_batch(
    lengths: Sequence[int],
    *,
    num_mini_batches: int,
    budget_tokens: int,
    pad_multiple: int,
    num_data_parallel: int,
    seed: int,
    step: int,
    unit_of: Sequence[int] | None = None,
    attention_crossover_tokens: int = ATTENTION_CROSSOVER_TOKENS,
    pack_multiple: int = 1,
    synchronised_packs: bool = False,
    share_prefixes: SharePrefixes = "off",
    shareable: Sequence[Sequence[int]] = (),
    routes: Sequence[np.ndarray | None] = (),
) -> list[RankPlan]:
    """The plan of every data-parallel rank for a rollout batch whose rows have `lengths` tokens.

    `unit_of`: the number of each row's unit, an episode or a group, from 0 and ascending; None if each row is one.
    Units are dealt to mini-batches with all their rows, which may go to several ranks. If packs share prefixes, the
    rows of a unit are planned as trees; `shareable`, `routes`: what each row can share (`in_tree_order`).
    The other arguments are those of `split_mini_batches` and `plan_packs` or `plan_tree_packs`, and so are the errors.
    """
    plans = [RankPlan([]) for _ in range(num_data_parallel)]
    rows_of: list[list[int]] = [[] for _ in range(unit_of[-1] + 1 if unit_of else 0)]
    for row, unit in enumerate(unit_of or ()):
        rows_of[unit].append(row)
    for units in split_mini_batches(len(rows_of) or len(lengths), num_mini_batches, seed, step):
        members = [row for unit in units for row in rows_of[unit]] if rows_of else units
        own_lengths = [lengths[i] for i in members]
        if share_prefixes == "off":
            packed = plan_packs(
                own_lengths,
                budget_tokens,
                pad_multiple,
                num_data_parallel,
                attention_crossover_tokens,
                pack_multiple=pack_multiple,
                synchronised_packs=synchronised_packs,
            )
        else:
            packed = plan_tree_packs(
                own_lengths,
                [shareable[i] for i in members],
                [0 if unit_of is None else unit_of[i] for i in members],
                share_prefixes,
                budget_tokens,
                num_data_parallel,
                attention_crossover_tokens,
                pack_multiple=pack_multiple,
                synchronised_packs=synchronised_packs,
                routes=[routes[i] for i in members] if routes else (),
            )
        for plan, packs in zip(plans, packed, strict=True):
            plan.mini_batches.append([[members[i] for i in pack] for pack in packs])
    return plans


def split_mini_batches(num_trajectories: int, num_mini_batches: int, seed: int, step: int) -> list[list[int]]:
    """Deal the trajectories 0..N-1 of a rollout batch to its mini-batches, shuffled by (`seed`, `step`).

    Every index comes once; sizes differ by at most one. Raises PlanError if a mini-batch would be empty.
    """
    if not 1 <= num_mini_batches <= num_trajectories:
        raise PlanError(
            f"{num_trajectories} trajectories cannot be split into {num_mini_batches} mini-batches;"
            f" batch.num_mini_batches must be 1 to {num_trajectories}"
        )
    order = np.random.default_rng((seed, step)).permutation(num_trajectories)
    return [part.tolist() for part in np.array_split(order, num_mini_batches)]


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

    Sequences are never split. Each takes its length padded to `pad_multiple`; a pack takes their sum padded to
    `pack_multiple` (a multiple of `pad_multiple`), at most `budget_tokens`. All ranks get equally many packs, as few as
    best fit finds; an empty pack is filler. `balanced_packs` fills and deals them so that the dearest rank is cheap,
    because ranks wait for each other at the optimizer step; with `synchronised_packs` they wait in every pack, as under
    expert parallelism. Within a pack the longest sequence comes first.

    Raises PlanError for a sequence that does not fit into a pack by itself.
    """
    sizes = _fitting_sizes(lengths, budget_tokens, pad_multiple, pack_multiple)
    budget = budget_tokens // pack_multiple * pack_multiple
    costs = [sequence_cost(size, attention_crossover_tokens) for size in sizes]
    packs = balanced_packs(sizes, costs, budget, num_data_parallel, synchronised_packs)
    return [[sorted(pack, key=lambda i: (-sizes[i], i)) for pack in rank] for rank in packs]


def plan_tree_packs(
    lengths: Sequence[int],
    shareable: Sequence[Sequence[int]],
    unit_of: Sequence[int],
    share_prefixes: SharePrefixes,
    budget_tokens: int,
    num_data_parallel: int,
    attention_crossover_tokens: int = ATTENTION_CROSSOVER_TOKENS,
    *,
    pack_multiple: int = 1,
    synchronised_packs: bool = False,
    routes: Sequence[np.ndarray | None] = (),
) -> list[list[list[int]]]:
    """`plan_packs` for sequences that are computed in a pack as trees. `shareable`, `routes`: what each can share
    (`in_tree_order`). `unit_of`: sequences of different units are in different trees; packs may share more.

    A tree goes into one pack. One that does not fit is cut between sequences, and what they share is repeated in every
    piece. Trees are also cut so that ranks are balanced: of plans with whole trees, with pieces of at
    most the mean rank's cost or half of it, and with only those trees cut that would leave some ranks without one,
    this takes the cheapest, and of equal ones the first. Sequences are not padded; a pack is, to `pack_multiple`.
    """
    sizes = _fitting_sizes(lengths, budget_tokens, 1, pack_multiple)
    budget = budget_tokens // pack_multiple * pack_multiple
    rows_of: dict[int, list[int]] = {}
    for row in sorted(range(len(sizes)), key=lambda row: (-sizes[row], row)):
        rows_of.setdefault(unit_of[row], []).append(row)
    rows: list[int] = []
    shared: list[int] = []
    for _, members in sorted(rows_of.items()):
        own_routes = [routes[row] for row in members] if routes else ()
        order, own_shared = in_tree_order([shareable[row] for row in members], share_prefixes, own_routes)
        rows += [members[place] for place in order]
        shared += own_shared
    starts = [*(k for k, common in enumerate(shared) if common == 0), len(rows)]
    trees = list(itertools.pairwise(starts))

    def pieces(largest_costs: Sequence[float]):
        return [
            piece
            for (start, end), largest in zip(trees, largest_costs, strict=True)
            for piece in tree_pieces(
                rows[start:end],
                [sizes[row] for row in rows[start:end]],
                shared[start:end],
                budget,
                largest,
                attention_crossover_tokens,
            )
        ]

    costs_of_trees = [
        forest_cost([sizes[row] for row in rows[start:end]], shared[start:end], attention_crossover_tokens)
        for start, end in trees
    ]
    mean = sum(costs_of_trees) / num_data_parallel
    limits = [[math.inf] * len(trees)]
    if num_data_parallel > 1:
        limits += [[mean / parts] * len(trees) for parts in (1, 2)]
        cheapest = sorted(range(len(trees)), key=costs_of_trees.__getitem__)[: len(trees) % num_data_parallel]
        limits.append(
            [cost / num_data_parallel if k in cheapest else math.inf for k, cost in enumerate(costs_of_trees)]
        )
    planned = []
    for items in map(pieces, limits):
        costs = [piece.cost for piece in items]
        plan = balanced_packs([piece.size for piece in items], costs, budget, num_data_parallel, synchronised_packs)
        at_the_end, at_every_turn = waiting_costs(plan, costs)
        planned.append((at_every_turn if synchronised_packs else at_the_end, plan, items))
    _, plan, items = min(planned, key=lambda one: one[0])
    return [
        [[row for k in sorted(pack, key=lambda k: (-items[k].size, k)) for row in items[k].rows] for pack in rank]
        for rank in plan
    ]


def _fitting_sizes(lengths: Sequence[int], budget_tokens: int, pad_multiple: int, pack_multiple: int) -> list[int]:
    """The padded lengths. Raises PlanError for a sequence that does not fit into a pack by itself."""
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
    return padded.tolist()


def padded_length(length: int, pad_multiple: int) -> int:
    """The smallest multiple of `pad_multiple` that holds `length` tokens."""
    return -(-length // pad_multiple) * pad_multiple


def sequence_cost(length: int, attention_crossover_tokens: int = ATTENTION_CROSSOVER_TOKENS) -> float:
    """Relative time of one sequence: linear layers plus causal attention, equal at `attention_crossover_tokens`."""
    return length + length * length / attention_crossover_tokens


def build_micro_batch(
    trajectories: Sequence[Mapping[str, Any]],
    rows: Sequence[int],
    pad_multiple: int,
    sequence_keys: Sequence[str] = (),
    pack_multiple: int = 1,
    token_keys: Sequence[str] = (),
    with_masks: bool = False,
    share_prefixes: SharePrefixes = "off",
    num_top: int = 0,
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
    `version_index`, [R] of each trajectory, aligned as its log-probs are; not in the pack unless named, and so are
    `teacher_log_probs` [R] and, of `num_top` K > 0, `teacher_top_ids` and `teacher_top_log_probs` [R, K]. `with_masks`:
    each trajectory with an active token has `sampling_masks`, [R], aligned in the same way.

    `share_prefixes`: unless it is off, rows are in tree order (`in_tree_order`), and what a row shares with the one
    before it is computed once; of trajectories with `routed_experts`, only tokens with the same experts. Then no row is
    padded but the last, so that the computed tokens are a multiple of `pack_multiple`.

    Raises ValueError for a trajectory whose arrays differ in length.
    """
    shared = [0] * max(1, len(rows))
    if share_prefixes != "off" and rows:
        shareable = [shareable_tokens(trajectories[row], share_prefixes) for row in rows]
        routes = [trajectories[row].get("routed_experts") for row in rows]
        order, shared = in_tree_order(shareable, share_prefixes, () if routes[0] is None else routes)
        rows, pad_multiple = [rows[place] for place in order], 1
    names = (*TOKEN_ARRAYS, *token_keys)
    pieces = [_sequence_arrays(trajectories[row], row, pad_multiple, token_keys, num_top) for row in rows]
    masks = _packed_masks([trajectories[row] for row in rows], pieces) if with_masks else None
    pieces = pieces or [_filler_arrays(pad_multiple, token_keys, num_top)]
    sizes = [piece["token_ids"].shape[0] for piece in pieces]
    missing = -num_computed(sizes, shared) % pack_multiple
    for name in names:
        array = pieces[-1][name]
        pieces[-1][name] = np.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1))
    sizes[-1] += missing
    forest = lay_out(sizes, shared) if any(shared) else None

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
        mask_counts=None if masks is None else np.pad(masks.counts, (0, sum(sizes) - len(masks))),
        mask_codes=None if masks is None else masks.codes,
        **({} if forest is None else vars(forest)),
        **{name: joined(name) for name in token_keys},
    )


def shareable_tokens(trajectory: Mapping[str, Any], share_prefixes: SharePrefixes) -> Sequence[int]:
    """The token ids that a trajectory, as in `build_micro_batch`, can share with others."""
    prompt = trajectory["prompt_token_ids"]
    return [*prompt, *trajectory["response_token_ids"]] if share_prefixes == "full" else prompt


def _sequence_arrays(
    trajectory: Mapping[str, Any], row: int, pad_multiple: int, token_keys: Sequence[str], num_top: int
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
    arrays = _filler_arrays(padded_length(tokens.size, pad_multiple), token_keys, num_top)
    arrays["token_ids"][: tokens.size] = tokens
    arrays["labels"][: tokens.size - 1] = tokens[1:]
    predicted = slice(prompt.size - 1, tokens.size - 1)
    active = mask != 0
    arrays["loss_mask"][predicted] = active
    arrays["rollout_log_probs"][predicted] = np.where(active, log_probs, 0)
    for key in token_keys:
        given = np.asarray(trajectory[key], _MORE_DTYPES[key])
        arrays[key][predicted] = np.where(active if given.ndim == 1 else active[:, None], given, 0)
    return arrays | {
        "num_prompt_tokens": prompt.size,
        "num_response_tokens": response.size,
        "length": int(active.sum()),
    }


def _packed_masks(trajectories: Sequence[Mapping[str, Any]], pieces: Sequence[Mapping[str, Any]]) -> SamplingMasks:
    """The masks of the pieces, aligned with their labels; empty where no active response token is predicted."""
    parts = []
    for trajectory, piece in zip(trajectories, pieces, strict=True):
        masks = trajectory["sampling_masks"] or SamplingMasks.none(piece["num_response_tokens"])
        before, after = piece["num_prompt_tokens"] - 1, len(piece["token_ids"]) - len(masks)
        active = np.asarray(trajectory["response_mask"]) != 0
        parts += [SamplingMasks.none(before), masks.where(active), SamplingMasks.none(after - before)]
    return SamplingMasks.join(parts)


def _filler_arrays(size: int, token_keys: Sequence[str], num_top: int) -> dict[str, Any]:
    return {
        "token_ids": np.zeros(size, np.int64),
        "labels": np.zeros(size, np.int64),
        "loss_mask": np.zeros(size, np.float32),
        "rollout_log_probs": np.zeros(size, np.float32),
        **{key: np.zeros((size, num_top) if "_top_" in key else size, _MORE_DTYPES[key]) for key in token_keys},
    } | dict.fromkeys(COUNTS, 0)


def response_values(micro_batch: MicroBatch, values: np.ndarray) -> dict[int, np.ndarray]:
    """Split values aligned with `labels`, [T], by trajectory: {row of the rollout batch: [R], one entry per response
    token}. Filler is left out.
    """
    result = {}
    for s, row in enumerate(micro_batch.trajectory_index.tolist()):
        if row >= 0:
            start = int(micro_batch.cu_seqlens[s]) + int(micro_batch.sequence["num_prompt_tokens"][s]) - 1
            result[row] = values[start : start + int(micro_batch.sequence["num_response_tokens"][s])]
    return result


Bins = list[list[int]]


def balanced_packs(
    sizes: Sequence[int], costs: Sequence[float], room: int, num_ranks: int, synchronised_packs: bool = False
) -> list[Bins]:
    """Pack items into bins of `room` and give every rank equally many: result[rank][k] lists the items of one bin.

    `sizes` and `costs` of the items rise together; no size is above `room`. The number of bins per rank is the smallest
    that best fit finds; missing bins are empty. Among several ways to fill them, this chooses the one whose dearest
    rank is cheapest, because ranks that meet once, after their last bin, wait for that rank. With `synchronised_packs`
    ranks meet after every bin, and it chooses the smallest sum of dearest bins. A rank's bins come dearest first.
    """
    order = sorted(range(len(sizes)), key=lambda item: (-sizes[item], item))
    fullest = fewest_bins(order, sizes, room)
    num_packs = max(1, -(-len(fullest) // num_ranks))
    plans = [_dealt(fullest, costs, num_ranks, num_packs)]
    cheap = fill_cheapest(order, sizes, costs, room, num_packs * num_ranks)
    if cheap is not None:
        plans += [_dealt(cheap, costs, num_ranks, num_packs), _in_turns(cheap, costs, num_ranks)]
    by_rank = _ranks_first(order, sizes, costs, room, num_ranks, num_packs)
    if by_rank is not None:
        plans.append(by_rank)
    plans = [_dearest_first(plan, costs) for plan in plans]

    def waits(plan: list[Bins]) -> tuple[float, float]:
        at_the_end, at_every_turn = waiting_costs(plan, costs)
        return (at_every_turn, at_the_end) if synchronised_packs else (at_the_end, at_every_turn)

    return min(plans, key=waits)


def fewest_bins(order: Sequence[int], sizes: Sequence[int], room: int) -> Bins:
    """Best fit: put each item, in `order` (largest first), into the fullest bin that still holds it, or a new one."""
    if not order:
        return []
    smallest = sizes[order[-1]]
    bins: Bins = []
    open_bins: list[tuple[int, int]] = []  # (room left, bin), ascending; bins that hold no further item are left out
    for item in order:
        size = sizes[item]
        place = bisect_left(open_bins, (size, -1))
        if place < len(open_bins):
            left, target = open_bins.pop(place)
        else:
            left, target = room, len(bins)
            bins.append([])
        bins[target].append(item)
        if left - size >= smallest:
            insort(open_bins, (left - size, target))
    return bins


def fill_cheapest(
    order: Sequence[int], sizes: Sequence[int], costs: Sequence[float], room: int, num_bins: int
) -> Bins | None:
    """Put each item, in `order` (largest first), into the cheapest bin with room for it; None if an item finds no
    bin.
    """
    bins: Bins = [[] for _ in range(num_bins)]
    left = [room] * num_bins
    cheapest = [(0.0, target) for target in range(num_bins)]
    # Bins that were too full for an item, the emptiest first. Items only get smaller, so each bin may come back.
    aside: list[tuple[int, float, int]] = []
    for item in order:
        size = sizes[item]
        while aside and -aside[0][0] >= size:
            _, cost, target = heappop(aside)
            heappush(cheapest, (cost, target))
        while cheapest and left[cheapest[0][1]] < size:
            cost, target = heappop(cheapest)
            heappush(aside, (-left[target], cost, target))
        if not cheapest:
            return None
        cost, target = heappop(cheapest)
        bins[target].append(item)
        left[target] -= size
        heappush(cheapest, (cost + costs[item], target))
    return bins


def _dealt(packs: Bins, costs: Sequence[float], num_ranks: int, num_packs: int) -> list[Bins]:
    """Give whole packs to ranks: dearest first, each to the cheapest rank that has fewer than `num_packs`."""
    pack_costs = [_cost(pack, costs) for pack in packs]
    order = sorted(range(len(packs)), key=lambda pack: (-pack_costs[pack], pack))
    ranks = fill_cheapest(order, [1] * len(packs), pack_costs, num_packs, num_ranks)
    assert ranks is not None, "there is a place for every pack"
    return [[packs[pack] for pack in rank] + [[] for _ in range(num_packs - len(rank))] for rank in ranks]


def _in_turns(packs: Bins, costs: Sequence[float], num_ranks: int) -> list[Bins]:
    """Give whole packs to ranks in order of cost, back and forth, so that the packs of one turn cost about the same."""
    packs = sorted(packs, key=lambda pack: (-_cost(pack, costs), pack))
    turns = [packs[start : start + num_ranks] for start in range(0, len(packs), num_ranks)]
    return [list(rank) for rank in zip(*(turn[::-1] if k % 2 else turn for k, turn in enumerate(turns)), strict=True)]


def _ranks_first(
    order: Sequence[int], sizes: Sequence[int], costs: Sequence[float], room: int, num_ranks: int, num_packs: int
) -> list[Bins] | None:
    """Give items to ranks by cost, then fill each rank's own packs; None if a rank's items do not fit into them."""
    ranks = fill_cheapest(order, sizes, costs, room * num_packs, num_ranks)
    if ranks is None:
        return None
    plan = []
    for items in ranks:
        packs = fill_cheapest(items, sizes, costs, room, num_packs) or fewest_bins(items, sizes, room)
        if len(packs) > num_packs:
            return None
        plan.append(packs + [[] for _ in range(num_packs - len(packs))])
    return plan


def _cost(pack: Sequence[int], costs: Sequence[float]) -> float:
    return sum(costs[item] for item in pack)


def _dearest_first(plan: list[Bins], costs: Sequence[float]) -> list[Bins]:
    return [sorted(packs, key=lambda pack: (-_cost(pack, costs), pack)) for packs in plan]


def waiting_costs(plan: list[Bins], costs: Sequence[float]) -> tuple[float, float]:
    """How long the ranks take together, in units of cost: (the cost of the dearest rank, the sum over turns of the
    dearest pack's cost).
    """
    by_rank = [[_cost(pack, costs) for pack in packs] for packs in plan]
    return max(sum(packs) for packs in by_rank), sum(max(turn) for turn in zip_longest(*by_rank, fillvalue=0.0))


class ExpertRoutes:
    """The routes of a batch's rows for a model with experts; `of` makes one. `experts_per_token` is the model's."""

    def __init__(self, rows: Sequence[Trajectory], spec: ModelSpec) -> None:
        assert spec.moe is not None, "a model without experts has no routes"
        self._rows, self._spec, self._moe = rows, spec, spec.moe

    @classmethod
    def of(cls, rows: Sequence[Trajectory], spec: ModelSpec, to_replay: bool) -> ExpertRoutes | None:
        """The routes of `rows`; None if no row has any. Raises RolloutError that names a row whose routes do not have
        the shape of its tokens and the model, or with `to_replay` a row with a token that goes to one expert twice.
        """
        if spec.moe is None or all(row.routed_experts is None for row in rows):
            return None
        for row in rows:
            wanted = (row.num_tokens - 1, spec.num_layers, spec.moe.experts_per_token)
            given = row.routed_experts
            if given is None or given.shape != wanted:
                has = "no routed experts" if given is None else f"routed experts of shape {given.shape}"
                raise RolloutError(
                    f"trajectory {row.trajectory_id} has {has}; expected is {wanted} (tokens without the last, layers,"
                    " experts per token)"
                )
            if to_replay and has_repeated(given, spec.moe.num_dense_layers):
                raise RolloutError(f"trajectory {row.trajectory_id} has a token that goes to the same expert twice")
        return cls(rows, spec)

    def layers(self, chunks: Iterable[range]) -> list[int]:
        """The layers with experts among those of a pipeline stage's model chunks."""
        return [layer for chunk in chunks for layer in chunk if self._spec.has_experts(layer)]

    def packed(self, micro_batch: MicroBatch, layers: Sequence[int]) -> np.ndarray:
        """The routes of a pack, [T, len(layers), k] of `route_type`. The pack's `trajectory_index` are indices of rows.

        A position of which the engine returned nothing (a sequence's last token, padding, filler) influences no
        log-prob. It goes to the experts in turn, by its place in its sequence: with one FP8 scale per tensor it may
        have an expert's largest value, which then does not depend on the pack.
        """
        k, num_experts = self._moe.experts_per_token, self._moe.num_experts
        routes = np.empty((micro_batch.num_tokens, len(layers), k), route_type(num_experts))
        runs = list(_runs(layers))
        for place, row in enumerate(micro_batch.trajectory_index.tolist()):
            start, end = (int(one) for one in micro_batch.cu_seqlens[place : place + 2])
            if row >= 0:
                given = self._rows[row].routed_experts
                assert given is not None
                for column, run in runs:
                    part = routes[start : start + len(given), column : column + len(run)]
                    part[...] = given[:, run.start : run.stop]
                _route_in_turn(routes, start + len(given), end, num_experts, start)
            else:
                _route_in_turn(routes, start, end, num_experts, start)
        last = int(micro_batch.cu_seqlens[-1])
        _route_in_turn(routes, last, micro_batch.num_tokens, num_experts, last)
        return routes

    def attach(self, micro_batches: Iterable[MicroBatch]) -> None:
        """Give each pack the routes of all layers."""
        for micro_batch in micro_batches:
            micro_batch.routed_experts = self.packed(micro_batch, range(self._spec.num_layers))


def has_repeated(routes: np.ndarray, num_dense_layers: int = 0) -> bool:
    """Whether a token goes to one expert twice in a layer after the first `num_dense_layers`. `routes`: [tokens,
    layers, k] integers. This takes a few passes over contiguous memory, a tenth of the time of sorting.
    """
    num_tokens, num_layers, k = routes.shape
    rows = max(1, _BLOCK // max(1, num_layers * k))
    column = np.arange(rows * num_layers * k) % k
    # Where this is True, entry i and the entry `apart` places after it belong to the same token and layer.
    together = {apart: column < k - apart for apart in range(1, k)}
    for start in range(0, num_tokens, rows):
        flat = np.ascontiguousarray(routes[start : start + rows, num_dense_layers:]).reshape(-1)
        for apart, same_token in together.items():
            equal = flat[:-apart] == flat[apart:]
            equal &= same_token[: len(equal)]
            if equal.any():
                return True
    return False


def _route_in_turn(routes: np.ndarray, start: int, end: int, num_experts: int, first: int) -> None:
    """Send the positions `start` to `end` to the experts in turn, counted from position `first`."""
    k = routes.shape[2]
    routes[start:end] = ((np.arange(start - first, end - first)[:, None] * k + np.arange(k)) % num_experts)[:, None]


def _runs(layers: Sequence[int]) -> Iterator[tuple[int, range]]:
    """(Index in `layers`, range) of every run of adjacent layers."""
    for _, run in itertools.groupby(enumerate(layers), lambda pair: pair[1] - pair[0]):
        pairs = list(run)
        yield pairs[0][0], range(pairs[0][1], pairs[-1][1] + 1)

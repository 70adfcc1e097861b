"""Rows that begin with the same tokens: how a pack computes what they share once, and how trees become items of packs.

The rows of a pack in tree order are described by one number each, `shared`: how many of its first tokens a row shares
with the row before it. From these numbers follow the forest that a model sees (`lay_out`), what a part of a tree costs,
and where it is cut (`tree_pieces`). With `batch.share_prefixes: prompts` rows share whole prompts of the same token
ids, and with `full` everything up to the first token that differs.

Sharing changes what is computed, not what is trained: the arrays of a pack still have one entry for every token of
every row (`base/records.py`), and each row's log-probs, masks and advantages are its own. Who knows of it:
`packing.py` plans and builds packs, `engine/device_batch.py` gives the model the computed tokens and the head one
(state, label) pair for each trained token, `engine/model.py` takes rotary positions by depth, and
`engine/attention.py` attends over ancestors, on a CPU by `cpu/forest_attention.py`, on a GPU by
`engine/flex_attention.py`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

SharePrefixes = Literal["off", "prompts", "full"]


def in_tree_order(
    rows: Sequence[Sequence[int]], share: SharePrefixes, routes: Sequence[np.ndarray | None] = ()
) -> tuple[list[int], list[int]]:
    """Order rows so that those which share tokens are neighbours: (order, `shared` of each row in that order).

    `rows`: what each row can share, in token ids: its prompt with `prompts`, all of it with `full`. Two rows share
    their prompt if all of it is the same; prompts come in the order of their first row, and the rows of a prompt in
    theirs. With `full` rows are sorted by their tokens, and those that are equal keep their order.
    `routes`: if they are replayed, the experts of each row's tokens but the last, [tokens, layers, k]. Then rows are
    sorted by them too, and two of them share tokens up to the first whose experts differ.
    """
    if share == "off":
        return list(range(len(rows))), [0] * len(rows)
    symbols = [_symbols(row, routes[place] if routes else None) for place, row in enumerate(rows)]
    order = list(range(len(rows)))
    if routes or share == "full":
        order.sort(key=lambda row: symbols[row].tobytes())  # big-endian, so by value
    if share == "prompts":
        first_of: dict[Hashable, int] = {}
        for row, prompt in enumerate(rows):
            first_of.setdefault(tuple(prompt), row)
        order.sort(key=lambda row: first_of[tuple(rows[row])])
    shared = [0] * len(rows)
    for place, (one, other) in enumerate(itertools.pairwise(order), 1):
        if share == "full" or tuple(rows[one]) == tuple(rows[other]):
            shared[place] = _num_equal(symbols[one], symbols[other])
    return order, shared


def _symbols(tokens: Sequence[int], routes: np.ndarray | None) -> np.ndarray:
    """What has to be equal for two rows to share a token, [tokens, 1 or more] int64, big-endian: its id and experts."""
    ids = np.asarray(tokens, dtype=">i8")[:, None]
    if routes is None:
        return ids
    flat = routes[: len(ids)].reshape(len(routes[: len(ids)]), -1).astype(">i8")
    return np.hstack([ids, np.pad(flat, ((0, len(ids) - len(flat)), (0, 0)), constant_values=-1)])


def _num_equal(one: np.ndarray, other: np.ndarray) -> int:
    """How many first entries two arrays have in common."""
    length = min(len(one), len(other))
    different = np.flatnonzero((one[:length] != other[:length]).any(axis=1))
    return int(different[0]) if different.size else length


@dataclass(frozen=True)
class Forest:
    """How the T positions of a pack's rows are computed at C <= T positions: `computed_at` [T], `node_starts` [n + 1]
    and `node_ends` [n] int64, as in `MicroBatch`.
    """

    computed_at: np.ndarray
    node_starts: np.ndarray
    node_ends: np.ndarray


def num_computed(sizes: Sequence[int], shared: Sequence[int]) -> int:
    """The positions that rows of `sizes` tokens take together; arguments as in `lay_out`."""
    return sum(sizes) - sum(shared)


def lay_out(sizes: Sequence[int], shared: Sequence[int]) -> Forest:
    """The forest of rows of `sizes` tokens, of which each shares its first `shared` tokens with the row before it, and
    so on: rows in tree order.

    A row's own tokens follow those of the row before it. They are cut into nodes wherever a later row leaves them.
    Raises ValueError if a row shares more tokens than it or the row before it has.
    """
    if len(sizes) != len(shared) or any(
        not 0 <= common <= min(size, before) for size, before, common in zip(sizes, [0, *sizes], shared)
    ):
        raise ValueError(f"rows of {list(sizes)} tokens cannot share the first {list(shared)} with the row before")
    depths = np.asarray(shared, np.int64)
    own = np.asarray(sizes, np.int64) - depths
    begins = np.concatenate([[0], np.cumsum(own)])
    places: list[np.ndarray] = []
    cuts: list[set[int]] = [set() for _ in sizes]  # depths at which a row's own tokens are cut
    path: list[int] = []  # the rows that own the tokens of the current row, from the root down
    for row, common in enumerate(shared):
        while path and shared[path[-1]] >= common:
            path.pop()
        if path and common < sizes[path[-1]]:
            cuts[path[-1]].add(common)
        new = np.arange(begins[row], begins[row + 1])
        places.append(np.concatenate([places[-1][:common], new]) if common else new)
        path.append(row)
    starts: list[int] = []
    ends: list[int] = []
    for row, common in enumerate(shared):
        bounds = [common, *sorted(cuts[row]), sizes[row]]
        for first, last in itertools.pairwise(bounds):
            if last > first:
                starts.append(int(begins[row]) + first - common)
                leaving = np.flatnonzero(depths[row + 1 :] < last)
                ends.append(int(begins[row + 1 + leaving[0] if leaving.size else len(sizes)]))
    return Forest(
        np.concatenate(places) if places else np.zeros(0, np.int64),
        np.array([*starts, begins[-1]], np.int64),
        np.array(ends, np.int64),
    )


def forest_cost(sizes: Sequence[int], shared: Sequence[int], attention_crossover_tokens: int) -> float:
    """The relative time of rows that are computed as a forest, in the unit of `packing.sequence_cost`: each token once,
    with attention to all tokens before it. Arguments as in `lay_out`.
    """
    return sum(
        size - common + (size * size - common * common) / attention_crossover_tokens
        for size, common in zip(sizes, shared, strict=True)
    )


@dataclass(frozen=True)
class Piece:
    """Rows of one tree that go into one pack, in tree order; `size` computed tokens, `cost` as in `forest_cost`."""

    rows: list[int]
    size: int
    cost: float


def tree_pieces(
    rows: Sequence[int],
    sizes: Sequence[int],
    shared: Sequence[int],
    room: int,
    largest_cost: float,
    attention_crossover_tokens: int,
) -> list[Piece]:
    """Cut the tree of `rows` into pieces that fit into `room` tokens, each with the prefix of its first row repeated.

    `sizes`, `shared` of the rows, as in `lay_out`; every row fits by itself. A tree that costs more than
    `largest_cost` is also cut into parts: as many as its cost is multiples of that, and at most its rows.
    """
    total = forest_cost(sizes, shared, attention_crossover_tokens)
    num_parts = min(len(rows), max(1, math.ceil(total / largest_cost - 1e-9)))
    # Every part pays for its prefix, so the parts are equal in what comes after it.
    after_prefix = [*shared[1:2], *shared[1:]] or [0]
    costs = [
        forest_cost([size], [common], attention_crossover_tokens)
        for size, common in zip(sizes, after_prefix, strict=True)
    ]
    total = max(sum(costs), 1e-9)
    parts: list[list[int]] = []
    part_of_last, before, left = -1, 0.0, 0
    for k, cost in enumerate(costs):
        part = min(num_parts - 1, int((before + cost / 2) * num_parts / total))
        before += cost
        if part != part_of_last or left < sizes[k] - shared[k]:
            parts.append([])
            left = room - shared[k]
        parts[-1].append(k)
        left -= sizes[k] - shared[k]
        part_of_last = part
    return [_piece(part, rows, sizes, shared, attention_crossover_tokens) for part in parts]


def _piece(part: list[int], rows: Sequence[int], sizes: Sequence[int], shared: Sequence[int], crossover: int) -> Piece:
    own, common = [sizes[k] for k in part], [0, *(shared[k] for k in part[1:])]
    return Piece([rows[k] for k in part], num_computed(own, common), forest_cost(own, common, crossover))

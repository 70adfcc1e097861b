"""Packings that training would not choose and that must not matter: shuffled, all in one, one each, uneven shards."""

from __future__ import annotations

import numpy as np

from gspo_mega.data.packing import RankPlan
from gspo_mega.plan.layout import Layout

_UNEVEN_PACK_SEQUENCES = 3


def packing(kind: str, num_trajectories: int, seed: int, layout: Layout, planned: list[RankPlan]) -> list[RankPlan]:
    """The plans of all data-parallel ranks for one mini-batch in the packing `kind` (`certify.cases[].packing`).

    `planned`: the plans of training; `seed` orders the random ones. All ranks get equally many packs, empty ones
    (filler) where sequences run out.
    """
    rng = np.random.default_rng((seed, 9))
    if kind == "planned":
        return planned
    if kind == "shuffled":
        return [RankPlan([_shuffled(packs, rng) for packs in plan.mini_batches]) for plan in planned]
    if kind == "one_pack":
        return [RankPlan([[plan.rows]]) for plan in planned]
    if kind == "one_each":
        return _equal_counts([[[index] for index in plan.rows] for plan in planned])
    if kind == "uneven":
        order = rng.permutation(num_trajectories).tolist()
        # The first rank takes two thirds, the second two thirds of what is left, ...
        shards, rest = [], order
        for _ in range(layout.data - 1):
            taken = -(-2 * len(rest) // 3)
            shards.append(rest[:taken])
            rest = rest[taken:]
        shards.append(rest)
        step = _UNEVEN_PACK_SEQUENCES
        return _equal_counts([[shard[i : i + step] for i in range(0, len(shard), step)] for shard in shards])
    raise ValueError(f"packing {kind!r}; valid: planned, shuffled, one_pack, one_each, uneven")


def _shuffled(packs: list[list[int]], rng: np.random.Generator) -> list[list[int]]:
    return [rng.permutation(packs[k]).astype(int).tolist() for k in rng.permutation(len(packs))]


def _equal_counts(packs_of: list[list[list[int]]]) -> list[RankPlan]:
    """Plans from packs of batch indices, filled up to equally many."""
    count = max(len(packs) for packs in packs_of)
    return [RankPlan([packs + [[] for _ in range(count - len(packs))]]) for packs in packs_of]

"""Fill bins of equal capacity so that none costs much more than the others. The arithmetic behind `packing.py`.

Knows sizes and costs, no trajectories: an item takes room (tokens) in one bin (a forward pass) and adds cost (FLOPs) to
one rank. All functions are deterministic; ties go to the lower index.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import zip_longest

Bins = list[list[int]]


def fewest_bins(order: Sequence[int], sizes: Sequence[int], room: int) -> Bins:
    """Best fit: each item, in `order` (largest first), into the fullest bin that still holds it, or a new one."""
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


def spread(order: Sequence[int], sizes: Sequence[int], costs: Sequence[float], room: int, num_bins: int) -> Bins | None:
    """Each item, in `order` (largest first), into the cheapest bin with room for it; None when one finds no bin."""
    bins: Bins = [[] for _ in range(num_bins)]
    left = [room] * num_bins
    cheapest = [(0.0, target) for target in range(num_bins)]
    # Bins that were too full for an item, the emptiest first: items only get smaller, so each may come back.
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


def balanced_packs(
    sizes: Sequence[int], costs: Sequence[float], room: int, num_ranks: int, synchronised_packs: bool = False
) -> list[Bins]:
    """Pack items into bins of `room` and give every rank equally many: result[rank][k] lists the items of one bin.

    `sizes` and `costs` of the items rise together; no size is above `room`. The number of bins per rank is the smallest
    that best fit finds; missing bins are empty. Of several ways to fill them the one is taken whose dearest rank is
    cheapest, which is what ranks wait for when they meet once, after their last bin; with `synchronised_packs`, when
    they meet after every bin, the one with the smallest sum of dearest bins. A rank's bins come dearest first.
    """
    order = sorted(range(len(sizes)), key=lambda item: (-sizes[item], item))
    fullest = fewest_bins(order, sizes, room)
    num_packs = max(1, -(-len(fullest) // num_ranks))
    plans = [_dealt(fullest, costs, num_ranks, num_packs)]
    cheap = spread(order, sizes, costs, room, num_packs * num_ranks)
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


def _dealt(packs: Bins, costs: Sequence[float], num_ranks: int, num_packs: int) -> list[Bins]:
    """Whole packs to ranks: dearest first, each to the cheapest rank that has fewer than `num_packs`."""
    pack_costs = [_cost(pack, costs) for pack in packs]
    order = sorted(range(len(packs)), key=lambda pack: (-pack_costs[pack], pack))
    ranks = spread(order, [1] * len(packs), pack_costs, num_packs, num_ranks)
    assert ranks is not None, "there is a place for every pack"
    return [[packs[pack] for pack in rank] + [[] for _ in range(num_packs - len(rank))] for rank in ranks]


def _in_turns(packs: Bins, costs: Sequence[float], num_ranks: int) -> list[Bins]:
    """Whole packs to ranks in order of cost, back and forth, so that packs of one turn cost alike."""
    packs = sorted(packs, key=lambda pack: (-_cost(pack, costs), pack))
    turns = [packs[start : start + num_ranks] for start in range(0, len(packs), num_ranks)]
    return [list(rank) for rank in zip(*(turn[::-1] if k % 2 else turn for k, turn in enumerate(turns)), strict=True)]


def _ranks_first(
    order: Sequence[int], sizes: Sequence[int], costs: Sequence[float], room: int, num_ranks: int, num_packs: int
) -> list[Bins] | None:
    """Items to ranks by cost, then each rank's into its own packs; None when a rank's do not fit into them."""
    ranks = spread(order, sizes, costs, room * num_packs, num_ranks)
    if ranks is None:
        return None
    plan = []
    for items in ranks:
        packs = spread(items, sizes, costs, room, num_packs) or fewest_bins(items, sizes, room)
        if len(packs) > num_packs:
            return None
        plan.append(packs + [[] for _ in range(num_packs - len(packs))])
    return plan


def _cost(pack: Sequence[int], costs: Sequence[float]) -> float:
    return sum(costs[item] for item in pack)


def _dearest_first(plan: list[Bins], costs: Sequence[float]) -> list[Bins]:
    return [sorted(packs, key=lambda pack: (-_cost(pack, costs), pack)) for packs in plan]


def waiting_costs(plan: list[Bins], costs: Sequence[float]) -> tuple[float, float]:
    """How long the ranks take together, in units of cost: (the dearest rank, the sum over turns of the dearest
    pack).
    """
    by_rank = [[_cost(pack, costs) for pack in packs] for packs in plan]
    return max(sum(packs) for packs in by_rank), sum(max(turn) for turn in zip_longest(*by_rank, fillvalue=0.0))

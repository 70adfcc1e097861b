"""Which groups form the next batch: the next ones in the order of admission, or those that completed first.

`Freshness` comes first: which weight versions samples may come from, given the version that the run has committed.
Admission uses it before a group is started, the pool when it chooses a server for a sample, the journal before a
recorded step is used again, and the batch once more before it is trained on. It holds no state; its callers know the
current version.

The two queues hold groups between their admission and the batch that consumes them, as numbers and outcomes, and know
nothing of prompts, tokens or time. A group is open until it completes; it is then kept or dropped (constant, filtered,
unscored). A batch is `wanted` kept groups. It ends short once `allowed` groups have gone into it and too few of them
were kept.

In the order `admission` groups count by their numbers, so that which groups a batch has does not depend on how long
their responses were. In the order `completion` they count as they completed, but a batch waits for a group if a later
batch could be too late for it. Then fast groups are trained sooner, and short responses are fast.

An event costs the same however many groups are outstanding: no group is visited again because of another one.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Freshness:
    """The rule for weight versions. `max_staleness`: how many versions the weights that sampled a token may lag behind
    those that it trains; 0 admits only the trained version.
    """

    max_staleness: int = 0

    def staleness(self, weight_version: int, current_version: int) -> int:
        """Return by how many versions `weight_version` lags behind the current one; below 0, it was never committed."""
        return current_version - weight_version

    def deadline(self, weight_version: int) -> int:
        """Return the last version that may train what is started under `weight_version`."""
        return weight_version + self.max_staleness

    def may_start(self, weight_version: int, latest_version: int) -> bool:
        """Return whether a sample that may train as late as `latest_version` may start under `weight_version`."""
        return latest_version <= self.deadline(weight_version)

    def admits(self, weight_version: int | None, current_version: int) -> bool:
        """Whether samples from `weight_version` may be used. None, an unknown version, is never admitted."""
        if weight_version is None:
            return False
        return 0 <= self.staleness(weight_version, current_version) <= self.max_staleness

    def admits_all(self, weight_versions: Iterable[int], current_version: int) -> bool:
        """Whether all tokens of a request, trajectory or batch may be used. `weight_versions` has one entry per
        token.
        """
        return all(self.admits(version, current_version) for version in set(weight_versions))

    def describe(self, current_version: int) -> str:
        """Return the admitted versions as the end of an error message, such as "7 is committed"."""
        if self.max_staleness == 0:
            return f"{current_version} is committed"
        oldest = max(0, current_version - self.max_staleness)
        return f"{current_version} is committed and versions from {oldest} on are admitted"


Order = Literal["admission", "completion"]


@dataclass
class Arrival:
    """A group that was admitted and not yet consumed. `deadline` is the last step that may consume it. `place` is how
    many groups completed before it; None while it is open.
    """

    number: int
    deadline: int
    place: int | None = None
    is_kept: bool = False

    @property
    def is_open(self) -> bool:
        return self.place is None

    @property
    def is_dropped(self) -> bool:
        return self.place is not None and not self.is_kept


@dataclass(frozen=True)
class Formed:
    """The groups of one batch by number, in ascending order, and those that were dropped on the way to it."""

    kept: tuple[int, ...]
    dropped: tuple[int, ...]


@dataclass
class _FillingBatch:
    """A batch while it fills, counted as if all its open groups were kept. `places` counts groups that are open or
    kept.
    """

    groups: collections.deque[Arrival] = field(default_factory=collections.deque)
    open: collections.OrderedDict[int, Arrival] = field(default_factory=collections.OrderedDict)
    places: int = 0

    def add(self, arrival: Arrival) -> None:
        self.groups.append(arrival)
        self.places += not arrival.is_dropped
        if arrival.is_open:
            self.open[arrival.number] = arrival

    def take_first(self) -> Arrival:
        arrival = self.groups.popleft()
        self.places -= not arrival.is_dropped
        self.open.pop(arrival.number, None)
        return arrival


class AdmissionQueue:
    """Groups in the order of their numbers, for batches of `wanted` kept or `allowed` groups in all. When a group is
    dropped, the first one of each later batch moves to the batch before.
    """

    def __init__(self, wanted: int, allowed: int) -> None:
        self._wanted, self._allowed = wanted, allowed
        self._batches: list[_FillingBatch] = []
        self._batch_of: dict[int, _FillingBatch] = {}

    def add(self, arrival: Arrival) -> None:
        """Add the group that was admitted last."""
        if not self._batches or self._is_full(self._batches[-1]):
            self._batches.append(_FillingBatch())
        self._put(self._batches[-1], arrival)

    def complete(self, arrival: Arrival) -> None:
        """Note that the group has completed."""
        batch = self._batch_of[arrival.number]
        del batch.open[arrival.number]
        if arrival.is_dropped:
            batch.places -= 1
            self._refill(next(place for place, one in enumerate(self._batches) if one is batch))

    @property
    def num_full(self) -> int:
        """How many batches are full already if all open groups are kept."""
        return len(self._batches) - bool(self._batches and not self._is_full(self._batches[-1]))

    def formed(self) -> Formed | None:
        """Return the next batch; None while a group that belongs to it is open."""
        if not self._batches or self._batches[0].open or not self._is_full(self._batches[0]):
            return None
        groups = self._batches[0].groups
        kept = tuple(arrival.number for arrival in groups if arrival.is_kept)
        return Formed(kept, tuple(arrival.number for arrival in groups if not arrival.is_kept))

    def consume(self) -> None:
        """Note that the batch that `formed` returned was taken."""
        for arrival in self._batches.pop(0).groups:
            del self._batch_of[arrival.number]

    def waits_for(self, most: int) -> list[int]:
        """Return the first `most` open groups that the next batch waits for."""
        return list(itertools.islice(self._batches[0].open, most)) if self._batches else []

    def _put(self, batch: _FillingBatch, arrival: Arrival) -> None:
        batch.add(arrival)
        self._batch_of[arrival.number] = batch

    def _refill(self, place: int) -> None:
        while place + 1 < len(self._batches):
            batch, following = self._batches[place], self._batches[place + 1]
            if self._is_full(batch):
                return  # so nothing is taken from the batches after it
            while following.groups and not self._is_full(batch):
                self._put(batch, following.take_first())
            if following.groups:
                place += 1
            else:
                del self._batches[place + 1]

    def _is_full(self, batch: _FillingBatch) -> bool:
        return batch.places == self._wanted or len(batch.groups) == self._allowed


class CompletionQueue:
    """Groups in the order in which they completed, for batches of `wanted` kept or `allowed` groups in all.

    Each step after the next one can take `wanted` groups. Groups whose deadlines leave no room there must be in the
    next batch: of those with a deadline up to s, all but (s - step) x wanted. Those places are closed to groups
    with later deadlines; nothing else makes a group wait. These bounds are nested, so how many places can be
    filled is a sum over the deadlines, no matter which groups fill them.
    """

    def __init__(self, wanted: int, allowed: int) -> None:
        self._wanted, self._allowed = wanted, allowed
        self._num: dict[int, int] = {}  # by deadline: how many are open or kept
        self._kept: dict[int, collections.deque[Arrival]] = {}  # by deadline, in the order of completion
        self._open: dict[int, collections.OrderedDict[int, Arrival]] = {}  # by deadline, in the order of numbers
        self._all_open: collections.OrderedDict[int, Arrival] = collections.OrderedDict()
        self._dropped: list[int] = []
        self.num_outstanding = 0

    def add(self, arrival: Arrival) -> None:
        """Add the group that was admitted last."""
        deadline = arrival.deadline
        self._num[deadline] = self._num.get(deadline, 0) + 1
        self._kept.setdefault(deadline, collections.deque())
        self._open.setdefault(deadline, collections.OrderedDict())[arrival.number] = arrival
        self._all_open[arrival.number] = arrival
        self.num_outstanding += 1

    def complete(self, arrival: Arrival) -> None:
        """Note that the group has completed."""
        del self._open[arrival.deadline][arrival.number], self._all_open[arrival.number]
        if arrival.is_kept:
            self._kept[arrival.deadline].append(arrival)
        else:
            self._dropped.append(arrival.number)
            self._remove(arrival.deadline)

    def formed(self, step: int) -> Formed | None:
        """Return the batch of `step`; None while too few groups have completed, or while one is open that may not wait
        for a later batch.
        """
        places = self._places(step)
        num_kept = sum(map(len, self._kept.values()))
        filled = 0
        for deadline in sorted(places, reverse=True):
            filled = min(filled + len(self._kept[deadline]), places[deadline])
        if filled < self._wanted:
            # The batch can only end short: if no kept group has to wait, and there is no group to wait for.
            if filled < num_kept or filled + len(self._dropped) < self._allowed:
                return None
            if any(need > there for need, there in self._needs(step).values()):
                return None
        return Formed(tuple(sorted(self._chosen(places, filled))), tuple(sorted(self._dropped)))

    def consume(self, formed: Formed) -> None:
        """Note that the batch that `formed` returned was taken."""
        taken = set(formed.kept)
        for deadline, kept in list(self._kept.items()):
            while kept and kept[0].number in taken:  # of each deadline those that completed first
                kept.popleft()
                self._remove(deadline)
        self._dropped = []

    def waits_for(self, step: int, most: int) -> list[int]:
        """Return the first `most` open groups that no batch after that of `step` could take, or the first of all open
        groups if any would do.
        """
        return list(itertools.islice(self._open.get(step) or self._all_open, most))

    def _remove(self, deadline: int) -> None:
        self.num_outstanding -= 1
        self._num[deadline] -= 1
        if not self._num[deadline]:
            del self._num[deadline], self._kept[deadline], self._open[deadline]

    def _needs(self, step: int) -> dict[int, tuple[int, int]]:
        """Return by deadline s how many groups with a deadline up to s must be in the batch, and how many are kept."""
        needs, num, there = {}, 0, 0
        for deadline in sorted(self._num):
            num += self._num[deadline]
            there += len(self._kept[deadline])
            needs[deadline] = max(0, num - (deadline - step) * self._wanted), there
        return needs

    def _places(self, step: int) -> dict[int, int]:
        """Return by deadline the number of places for groups with that deadline or a later one."""
        places, most = {}, self._wanted
        for deadline, (need, _) in self._needs(step).items():
            places[deadline] = most
            most = min(most, max(0, self._wanted - need))
        return places

    def _chosen(self, places: dict[int, int], num: int) -> list[int]:
        """Return the first `num` groups to complete that have a place."""
        heads = {deadline: collections.deque(kept) for deadline, kept in self._kept.items() if kept}
        left, chosen = dict(places), []
        while len(chosen) < num:
            # Once the groups from some deadline on have no place left, none with that deadline gets one later.
            first = min(
                (d for d in heads if all(left[s] > 0 for s in left if s <= d)), key=lambda d: heads[d][0].place or 0
            )
            chosen.append(heads[first].popleft().number)
            if not heads[first]:
                del heads[first]
            for deadline in left:
                left[deadline] -= deadline <= first
        return chosen

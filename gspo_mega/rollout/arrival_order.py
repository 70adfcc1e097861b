"""Which groups form the next batch: the next ones in the order of admission, or those that completed first.

Owns groups between their admission and the batch that consumes them, as numbers and outcomes: nothing of prompts,
tokens or time. A group is open until it completes, and is then kept or dropped (constant, filtered, unscored). A batch
is `wanted` kept groups. It ends short once `allowed` groups have gone into it and too few of them were kept.

`admission`: groups count in the order of their numbers, so that which groups a batch has does not depend on how long
their responses were. `completion`: in the order in which they completed, but a group is waited for where a later batch
could be too late for it: fast ones are trained sooner, and short responses are fast.

An event costs the same however many groups are outstanding: no group is looked at again for another's sake.

Freshness: which weight versions samples may come from, given the version that the run has committed.

Owns the rule alone. Admission asks it before a group is started, the sampler for every token that comes back, the
journal before a recorded step is used again, and the batch once more before it is trained on. It holds no state: who
asks knows the current version.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Freshness:
    """`max_staleness`: how many versions the weights of a token may lag behind those that it trains. 0 admits the
    trained version only.
    """

    max_staleness: int = 0

    def staleness(self, weight_version: int, current_version: int) -> int:
        """How many versions `weight_version` lags behind the current version; below 0, it was never committed."""
        return current_version - weight_version

    def deadline(self, weight_version: int) -> int:
        """The last version that may train what is started under `weight_version`."""
        return weight_version + self.max_staleness

    def may_start(self, weight_version: int, latest_version: int) -> bool:
        """Whether a sample may be started under `weight_version` that trains `latest_version` at the latest."""
        return latest_version <= self.deadline(weight_version)

    def admits(self, weight_version: int | None, current_version: int) -> bool:
        """Whether samples from `weight_version` may be used. None, an unknown version, is never admitted."""
        if weight_version is None:
            return False
        return 0 <= self.staleness(weight_version, current_version) <= self.max_staleness

    def admits_all(self, weight_versions: Iterable[int], current_version: int) -> bool:
        """Whether all tokens may be used: of a request, a trajectory, a batch. `weight_versions`: of each token."""
        return all(self.admits(version, current_version) for version in set(weight_versions))

    def describe(self, current_version: int) -> str:
        """The admitted versions as the end of an error message, such as "7 is committed"."""
        if self.max_staleness == 0:
            return f"{current_version} is committed"
        oldest = max(0, current_version - self.max_staleness)
        return f"{current_version} is committed and versions from {oldest} on are admitted"


Order = Literal["admission", "completion"]


@dataclass
class Arrival:
    """A group that was admitted and not yet consumed. `deadline`: the last step that may consume it. `place`: how many
    groups completed before it; None while it is open.
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
class _Filling:
    """A batch as if all its open groups were kept. `places`: of groups that are open or kept."""

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
    """Groups in the order of their numbers, for batches of `wanted` kept or `allowed` groups. A group that is dropped
    lets the first one of each later batch move to the batch before.
    """

    def __init__(self, wanted: int, allowed: int) -> None:
        self._wanted, self._allowed = wanted, allowed
        self._batches: list[_Filling] = []
        self._of: dict[int, _Filling] = {}

    def add(self, arrival: Arrival) -> None:
        """The group that was admitted last."""
        if not self._batches or self._is_full(self._batches[-1]):
            self._batches.append(_Filling())
        self._put(self._batches[-1], arrival)

    def note(self, arrival: Arrival) -> None:
        """The group has completed."""
        batch = self._of[arrival.number]
        del batch.open[arrival.number]
        if arrival.is_dropped:
            batch.places -= 1
            self._refill(next(place for place, one in enumerate(self._batches) if one is batch))

    @property
    def num_full(self) -> int:
        """How many batches are full already if all open groups are kept."""
        return len(self._batches) - bool(self._batches and not self._is_full(self._batches[-1]))

    def formed(self) -> Formed | None:
        """The next batch, None while a group that belongs to it is open."""
        if not self._batches or self._batches[0].open or not self._is_full(self._batches[0]):
            return None
        groups = self._batches[0].groups
        kept = tuple(arrival.number for arrival in groups if arrival.is_kept)
        return Formed(kept, tuple(arrival.number for arrival in groups if not arrival.is_kept))

    def consume(self) -> None:
        """The batch that `formed` returned is taken."""
        for arrival in self._batches.pop(0).groups:
            del self._of[arrival.number]

    def waits_for(self, most: int) -> list[int]:
        """The first `most` open groups that the next batch waits for."""
        return list(itertools.islice(self._batches[0].open, most)) if self._batches else []

    def _put(self, batch: _Filling, arrival: Arrival) -> None:
        batch.add(arrival)
        self._of[arrival.number] = batch

    def _refill(self, place: int) -> None:
        while place + 1 < len(self._batches):
            batch, behind = self._batches[place], self._batches[place + 1]
            if self._is_full(batch):
                return  # nothing is taken from those behind it
            while behind.groups and not self._is_full(batch):
                self._put(batch, behind.take_first())
            if behind.groups:
                place += 1
            else:
                del self._batches[place + 1]

    def _is_full(self, batch: _Filling) -> bool:
        return batch.places == self._wanted or len(batch.groups) == self._allowed


class CompletionQueue:
    """Groups in the order in which they completed, for batches of `wanted` kept or `allowed` groups.

    Steps behind the next one can take `wanted` groups each. Groups whose deadlines leave no room there must be in the
    next batch: of those with a deadline up to s, all but (s - step) x wanted. So many places are not for groups with
    later deadlines, which is all that a group may have to wait for. These bounds lie in each other, so that how many
    places can be filled is a sum over the deadlines, whichever groups fill them.
    """

    def __init__(self, wanted: int, allowed: int) -> None:
        self._wanted, self._allowed = wanted, allowed
        self._num: dict[int, int] = {}  # by deadline: of those that are open or kept
        self._kept: dict[int, collections.deque[Arrival]] = {}  # by deadline, in the order of completion
        self._open: dict[int, collections.OrderedDict[int, Arrival]] = {}  # by deadline, in the order of numbers
        self._all_open: collections.OrderedDict[int, Arrival] = collections.OrderedDict()
        self._dropped: list[int] = []
        self.num_outstanding = 0

    def add(self, arrival: Arrival) -> None:
        """The group that was admitted last."""
        deadline = arrival.deadline
        self._num[deadline] = self._num.get(deadline, 0) + 1
        self._kept.setdefault(deadline, collections.deque())
        self._open.setdefault(deadline, collections.OrderedDict())[arrival.number] = arrival
        self._all_open[arrival.number] = arrival
        self.num_outstanding += 1

    def note(self, arrival: Arrival) -> None:
        """The group has completed."""
        del self._open[arrival.deadline][arrival.number], self._all_open[arrival.number]
        if arrival.is_kept:
            self._kept[arrival.deadline].append(arrival)
        else:
            self._dropped.append(arrival.number)
            self._leave(arrival.deadline)

    def formed(self, step: int) -> Formed | None:
        """The batch of `step`, None while too few have completed or one that may not wait for a later batch is open."""
        places = self._places(step)
        num_kept = sum(map(len, self._kept.values()))
        filled = 0
        for deadline in sorted(places, reverse=True):
            filled = min(filled + len(self._kept[deadline]), places[deadline])
        if filled < self._wanted:
            # The batch may only end short: with nothing that has to wait, and nothing that it has to wait for.
            if filled < num_kept or filled + len(self._dropped) < self._allowed:
                return None
            if any(need > there for need, there in self._needs(step).values()):
                return None
        return Formed(tuple(sorted(self._chosen(places, filled))), tuple(sorted(self._dropped)))

    def consume(self, formed: Formed) -> None:
        """The batch that `formed` returned is taken."""
        taken = set(formed.kept)
        for deadline, kept in list(self._kept.items()):
            while kept and kept[0].number in taken:  # of one deadline those that completed first
                kept.popleft()
                self._leave(deadline)
        self._dropped = []

    def waits_for(self, step: int, most: int) -> list[int]:
        """The first `most` open groups that no later batch than that of `step` could take, or of all open ones where
        any would do.
        """
        return list(itertools.islice(self._open.get(step) or self._all_open, most))

    def _leave(self, deadline: int) -> None:
        self.num_outstanding -= 1
        self._num[deadline] -= 1
        if not self._num[deadline]:
            del self._num[deadline], self._kept[deadline], self._open[deadline]

    def _needs(self, step: int) -> dict[int, tuple[int, int]]:
        """By deadline s: how many groups with a deadline up to s must be in the batch, and how many have completed."""
        needs, num, there = {}, 0, 0
        for deadline in sorted(self._num):
            num += self._num[deadline]
            there += len(self._kept[deadline])
            needs[deadline] = max(0, num - (deadline - step) * self._wanted), there
        return needs

    def _places(self, step: int) -> dict[int, int]:
        """By deadline: the most places for groups with that deadline or a later one."""
        places, most = {}, self._wanted
        for deadline, (need, _) in self._needs(step).items():
            places[deadline] = most
            most = min(most, max(0, self._wanted - need))
        return places

    def _chosen(self, places: dict[int, int], num: int) -> list[int]:
        """The first `num` to complete that have a place."""
        heads = {deadline: collections.deque(kept) for deadline, kept in self._kept.items() if kept}
        left, chosen = dict(places), []
        while len(chosen) < num:
            # Where groups up to some deadline have no place any more, none of that deadline gets one later on.
            first = min(
                (d for d in heads if all(left[s] > 0 for s in left if s <= d)), key=lambda d: heads[d][0].place or 0
            )
            chosen.append(heads[first].popleft().number)
            if not heads[first]:
                del heads[first]
            for deadline in left:
                left[deadline] -= deadline <= first
        return chosen

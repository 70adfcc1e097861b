"""Admission: a group is started only if it is certain to be consumed in time, no matter what becomes of the others.

`Admission` has the numbers of groups and the bound, and knows which groups are outstanding. While a run goes on,
nothing that was sampled is thrown away for its age: a group of unbounded length holds up the batch that it belongs to,
and no later batch overtakes it by more than the bound. (After a restart, recorded groups that are too old are sampled
again.)

Let n be the next step to be consumed. A step's groups are started, at the earliest, under the weights with which it was
asked for. A group admitted while step m is the last one asked for may be consumed by step m + K at the latest, where
K = `max_staleness`. In order of admission, the worst case is that every open group is kept: a dropped one only moves
later ones forward. In order of completion, all outstanding groups must fit into the batches n to m + K, which take
`wanted` each. With K = 0 this is: the groups of one step, started when it is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gspo_mega.rollout.arrival_order import (
    AdmissionQueue,
    Arrival,
    CompletionQueue,
    Formed,
    Freshness,
    Order,
)


@dataclass
class Admission:
    """Groups of a run between admission and consumption, by number. Only one thread may use it.

    `wanted` is the number of groups of a batch. `allowed` is how many may go into one, dropped ones included. No group
    is admitted for a step from `num_steps` on; None means that there is no end.

    Attributes:
        step: the next step to be consumed.
        asked: the last step that was asked for, -1 before the first.
    """

    wanted: int
    allowed: int
    freshness: Freshness
    order: Order = "admission"
    num_steps: int | None = None
    step: int = 0
    asked: int = -1
    _arrivals: dict[int, Arrival] = field(default_factory=dict)
    _next: int = 0
    _num_completed: int = 0
    _done: set[int] = field(default_factory=set)
    _is_restored: bool = False
    _queue: AdmissionQueue = field(init=False)
    _completion: CompletionQueue = field(init=False)

    def __post_init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        """Begin without outstanding groups. Only the queue of the configured order is used."""
        self._arrivals.clear()
        self._queue = AdmissionQueue(self.wanted, self.allowed)
        self._completion = CompletionQueue(self.wanted, self.allowed)

    def ask(self, step: int) -> None:
        """Note that the trainer asks for `step`, the next one, and holds its weights. If no step shares groups with
        another, numbers begin at 0 in each step; otherwise they go on through the run.
        """
        if self.freshness.max_staleness == 0 and not (self._arrivals or self._done or self._is_restored):
            self._next = 0
        self.asked = self.step = step
        self._is_restored = False

    @property
    def horizon(self) -> int:
        """The last step that a group may be admitted for."""
        last = self.freshness.deadline(self.asked)
        return last if self.num_steps is None else max(self.asked, min(last, self.num_steps - 1))

    @property
    def outstanding(self) -> int:
        """How many groups were admitted, and neither dropped nor consumed."""
        return sum(not arrival.is_dropped for arrival in self._arrivals.values())

    @property
    def open_numbers(self) -> list[int]:
        """The groups that have not completed."""
        return [arrival.number for arrival in self._arrivals.values() if arrival.is_open]

    def latest_step(self) -> int:
        """The last step that could consume the group admitted next."""
        if self.order == "completion":
            outstanding = self._completion.num_outstanding
            return self.step + max(outstanding // self.wanted, len(self._arrivals) // self.allowed)
        return self.step + self._queue.num_full

    def may_admit(self) -> bool:
        """Whether another group may be started now."""
        return self.asked >= 0 and self.latest_step() <= self.horizon

    @property
    def next_number(self) -> int:
        """The number of the group that is admitted next. Numbers that were consumed before a restart are skipped."""
        number = self._next
        while number in self._done:
            number += 1
        return number

    def admit(self, staleness: int = 0) -> int:
        """Admit a group and return its number. Call it only while `may_admit`. `staleness` is by how many versions the
        samples that the group already has lag behind the step last asked for.
        """
        number = self.next_number
        self._done.difference_update(range(self._next, number))
        self._next = number + 1
        arrival = Arrival(number, min(self.horizon, self.freshness.deadline(self.asked - staleness)))
        self._arrivals[number] = arrival
        if self.order == "admission":
            self._queue.add(arrival)
        else:
            self._completion.add(arrival)
        return number

    def complete(self, number: int, is_kept: bool) -> None:
        """Note that a group has completed, and whether it is kept to be trained on."""
        arrival = self._arrivals[number]
        arrival.place, arrival.is_kept = self._num_completed, is_kept
        self._num_completed += 1
        (self._queue if self.order == "admission" else self._completion).complete(arrival)

    def formed(self) -> Formed | None:
        """Return the groups of the batch of `step`; None while it is not complete."""
        if self.order == "admission":
            return self._queue.formed()
        return self._completion.formed(self.step)

    def waits_for(self, most: int = 2) -> list[int]:
        """Return the open groups that the batch of `step` waits for, at most `most` of them."""
        if self.order == "admission":
            return self._queue.waits_for(most)
        return self._completion.waits_for(self.step, most)

    def consume(self, formed: Formed) -> None:
        """Note that the batch of `step` was taken."""
        for number in (*formed.kept, *formed.dropped):
            del self._arrivals[number]
        if self.order == "admission":
            self._queue.consume()
        else:
            self._completion.consume(formed)
        self.step += 1

    # --- what a checkpoint keeps -----------------------------------------------------------------------------

    @property
    def first(self) -> int:
        """The lowest number that is outstanding or not reached yet; dropped groups of a later batch count as such."""
        return min(self._arrivals, default=self._next)

    def state_dict(self) -> dict[str, Any] | None:
        """Return the position in the numbers, in JSON types: `first`, and `done`, the later numbers that are consumed.
        None if the next step begins at 0.
        """
        if self.freshness.max_staleness == 0 and not (self._arrivals or self._done):
            return None
        first = self.first
        passed = [n for n in range(first, self._next) if n not in self._arrivals]
        return {"first": first, "done": [*passed, *sorted(self._done)]}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Continue from a position. The groups that were outstanding then are admitted anew, under their numbers."""
        self._begin()
        self.asked = -1
        self._next = state["first"] if state else 0
        self._done = set(state["done"]) if state else set()
        self._is_restored = state is not None

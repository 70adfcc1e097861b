"""Admission: a group is started only while it is certain that it is consumed in time, whatever becomes of the others.

Owns the numbers of groups, the bound, and which groups are outstanding. With it nothing that was sampled is ever thrown
away for its age: a group of unbounded length holds the batch that it belongs to, and no later batch passes it by more
than the bound.

Let n be the next step to be consumed, and let a step's groups be started under the weights that it was asked for with,
at the earliest. A group admitted while step m is the last one asked for may be consumed by step m + K at the latest,
K = `max_staleness`. In order of admission the groups before it fill at most so many batches as if all open ones were
kept: a dropped one only moves later ones forward. In order of completion all outstanding groups must fit into the
batches n to m + K, which take `wanted` each. With K = 0 this is: the groups of one step, started when it is asked for.
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
    """Groups of a run between admission and consumption, by number. Used by one thread.

    `wanted`: groups of a batch. `allowed`: groups that may go into one, dropped ones included. `num_steps`: no group is
    admitted for a later step than the last of them; None for no end.

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
        """No group is outstanding. Only the queue of the configured order is used."""
        self._arrivals.clear()
        self._queue = AdmissionQueue(self.wanted, self.allowed)
        self._completion = CompletionQueue(self.wanted, self.allowed)

    def ask(self, step: int) -> None:
        """The trainer asks for `step`, the next one, and holds its weights. Where no step shares groups with another,
        numbers begin at 0 in each; otherwise they go on through the run.
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
        """Groups that were admitted, and neither dropped nor consumed."""
        return sum(not arrival.is_dropped for arrival in self._arrivals.values())

    @property
    def open_numbers(self) -> list[int]:
        """Groups that have not completed."""
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
        """Of the group that is admitted next: numbers that were consumed before a restart are passed over."""
        number = self._next
        while number in self._done:
            number += 1
        return number

    def admit(self, staleness: int = 0) -> int:
        """Start a group; returns its number. Only while `may_admit`. `staleness`: how many versions those of its
        samples that exist already lag behind the step last asked for.
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
        """A group has completed; `is_kept`: it is trained on."""
        arrival = self._arrivals[number]
        arrival.place, arrival.is_kept = self._num_completed, is_kept
        self._num_completed += 1
        (self._queue if self.order == "admission" else self._completion).note(arrival)

    def formed(self) -> Formed | None:
        """The batch of `step`, None while it is not complete."""
        if self.order == "admission":
            return self._queue.formed()
        return self._completion.formed(self.step)

    def waits_for(self, most: int = 2) -> list[int]:
        """The open groups that the batch of `step` waits for, `most` of them at most."""
        if self.order == "admission":
            return self._queue.waits_for(most)
        return self._completion.waits_for(self.step, most)

    def consume(self, formed: Formed) -> None:
        """The batch of `step` is taken."""
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
        """The position in the numbers, JSON types: `first`, and `done`, the numbers behind it that are consumed. None
        where the next step begins at 0.
        """
        if self.freshness.max_staleness == 0 and not (self._arrivals or self._done):
            return None
        first = self.first
        passed = [n for n in range(first, self._next) if n not in self._arrivals]
        return {"first": first, "done": [*passed, *sorted(self._done)]}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Continue from a position: the groups outstanding then are admitted anew, under their numbers."""
        self._begin()
        self.asked = -1
        self._next = state["first"] if state else 0
        self._done = set(state["done"]) if state else set()
        self._is_restored = state is not None

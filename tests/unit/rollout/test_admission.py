"""Admission and the order of batches, as properties: whatever completes, is dropped or is slow, and whenever."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from arrival_oracle import check_decisions, in_order_of_completion
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gspo_mega.rollout.admission import Admission
from gspo_mega.rollout.arrival_order import Arrival, Formed, Freshness

ORDERS = ("admission", "completion")


@dataclass
class Run:
    """A run of `num_steps` steps whose groups complete when `choose` says: a chooser of one of n things.

    `is_kept(k)`: what becomes of the k-th group admitted. `asked_at`: the step last asked for when it was.
    """

    admission: Admission
    num_steps: int
    choose: object
    is_kept: object
    asked_at: list[int] = field(default_factory=list)
    batches: list[tuple[list[int], list[int]]] = field(default_factory=list)
    most_outstanding: int = 0

    def go(self) -> Run:
        serial: dict[int, int] = {}  # number -> which of all groups
        for step in range(self.num_steps):
            self.admission.ask(step)
            check_decisions(self.admission)
            while (formed := self.admission.formed()) is None:
                self.advance(serial)
            self.admission.consume(formed)
            check_decisions(self.admission)
            self.batches.append(tuple([serial[n] for n in part] for part in (formed.kept, formed.dropped)))
            for _ in range(self.choose(4)):  # while the trainer trains
                self.advance(serial)
        return self

    def advance(self, serial) -> None:
        may = self.admission.may_admit()
        running = self.admission.open_numbers
        pick = self.choose(len(running) + may)
        if may and pick == len(running):
            ahead = self.admission.latest_step() - self.admission.asked
            staleness = self.choose(2) if ahead < self.admission.freshness.max_staleness else 0
            number = self.admission.admit(staleness)
            check_decisions(self.admission)
            serial[number] = len(self.asked_at)
            self.asked_at.append(self.admission.asked - staleness)
            self.most_outstanding = max(self.most_outstanding, self.admission.outstanding)
        elif running:
            number = running[pick]
            self.admission.complete(number, self.is_kept(serial[number]))
            check_decisions(self.admission)
        else:
            assert self.admission.formed() is not None or self.admission.step > self.admission.asked, (
                "nothing to wait for"
            )


@st.composite
def runs(draw, order=None):
    wanted = draw(st.integers(1, 4))
    allowed = draw(st.integers(wanted, 3 * wanted))
    staleness, num_steps = draw(st.integers(0, 4)), draw(st.integers(1, 7))
    kept = draw(st.lists(st.booleans(), min_size=60, max_size=60))
    rng = draw(st.randoms(use_true_random=False))
    admission = Admission(
        wanted, allowed, Freshness(staleness), order or draw(st.sampled_from(ORDERS)), num_steps=num_steps
    )
    return Run(admission, num_steps, lambda n: rng.randrange(n) if n else 0, lambda k: kept[k % 60])


@given(runs())
@settings(max_examples=150, deadline=None)
def test_no_group_is_older_than_the_bound_when_it_is_trained_and_none_is_thrown_away(run: Run):
    run.go()
    freshness = run.admission.freshness
    for step, (kept, dropped) in enumerate(run.batches):
        assert len(kept) <= run.admission.wanted
        # Its oldest token may be of the weights that the last step asked for had.
        assert all(freshness.admits(run.asked_at[k], step) for k in kept), (step, [run.asked_at[k] for k in kept])
        assert [run.is_kept(k) for k in kept] == [True] * len(kept)
        assert not any(run.is_kept(k) for k in dropped)
        if len(kept) < run.admission.wanted:
            assert len(kept) + len(dropped) >= run.admission.allowed
    consumed = [k for batch in run.batches for part in batch for k in part]
    kept = [k for k in range(len(run.asked_at)) if run.is_kept(k)]
    assert len(consumed) == len(set(consumed))
    assert run.admission.outstanding == 0 and set(kept) <= set(consumed), "sampled, kept, and never trained"


@given(runs("admission"))
@settings(max_examples=80, deadline=None)
def test_in_order_of_admission_a_batch_depends_on_outcomes_alone(run: Run):
    """The same batches as one group after the other, whoever was slow."""
    run.go()
    outcomes = iter(range(10**6))
    for kept, dropped in run.batches:
        expected: tuple[list[int], list[int]] = ([], [])
        while len(expected[0]) < run.admission.wanted and sum(map(len, expected)) < run.admission.allowed:
            k = next(outcomes)
            expected[not run.is_kept(k)].append(k)
        assert (kept, dropped) == expected


@given(st.integers(0, 4), st.integers(1, 4), st.sampled_from(ORDERS))
def test_all_of_the_bound_is_used(staleness, wanted, order):
    """As many groups are outstanding as can be trained in time, and with 0 none is between two steps."""
    admission = Admission(wanted, wanted, Freshness(staleness), order)
    admission.ask(0)
    while admission.may_admit():
        admission.admit()
    assert admission.outstanding == (staleness + 1) * wanted
    for number in admission.open_numbers:
        admission.complete(number, True)
    admission.consume(admission.formed())
    assert admission.outstanding == staleness * wanted and not admission.may_admit()


@given(runs(), st.integers(0, 30))
@settings(max_examples=80, deadline=None)
def test_a_position_continues_with_the_numbers_that_are_outstanding(run: Run, stop: int):
    """After a restart each of them is admitted once more, and no consumed one."""
    run.num_steps = max(1, run.num_steps // 2)
    run.go()
    first = run.admission
    state = first.state_dict()
    outstanding = sorted(first._arrivals)
    again = Admission(first.wanted, first.allowed, first.freshness, first.order)
    again.load_state_dict(state)
    again.ask(first.step)
    admitted = []
    while again.may_admit() and len(admitted) < len(outstanding):
        admitted.append(again.next_number)
        assert again.admit() == admitted[-1]
    assert admitted == outstanding[: len(admitted)]
    assert (state is None) == (first.freshness.max_staleness == 0 and not outstanding)
    if again.may_admit() and state is not None:
        assert again.next_number == first._next


@given(runs(order="completion"), st.integers(0, 3), st.data())
@settings(max_examples=80, deadline=None)
def test_a_restart_that_admits_few_groups_forgets_no_consumed_one(run: Run, bound: int, data):
    """Stopped again at once, or with another bound: what was consumed before is not sampled a second time."""
    run.num_steps = max(1, run.num_steps // 2)
    run.go()
    first = run.admission
    consumed = set(range(first._next)) - set(first._arrivals)
    again = Admission(first.wanted, first.allowed, Freshness(bound), first.order)
    again.load_state_dict(first.state_dict())
    again.ask(first.step)
    for _ in range(data.draw(st.integers(0, 6))):
        if again.may_admit():
            again.admit()
    state = again.state_dict()
    if first.state_dict() is not None:  # else numbers begin anew in each step
        state = state or {"first": again._next, "done": []}
        open_again = {n for n in range(state["first"], first._next) if n not in state["done"]}
        assert not open_again & consumed


def test_a_straggler_holds_the_batch_only_where_it_is_next_or_too_old_otherwise():
    def started(order):
        admission = Admission(2, 2, Freshness(1), order)
        admission.ask(0)
        while admission.may_admit():
            admission.admit()
        for number in (1, 2, 3):
            admission.complete(number, True)
        return admission

    held = started("admission")
    assert held.formed() is None and held.waits_for() == [0]
    passed = started("completion")
    assert passed.formed() == Formed((1, 2), ())
    passed.consume(passed.formed())
    passed.ask(1)
    passed.admit(), passed.admit()
    passed.complete(4, True)
    assert passed.formed() is None and passed.waits_for() == [0], "3 and 4 would do, and 0 would be too old then"
    passed.complete(0, True)
    assert passed.formed() == Formed((0, 3), ()), "3 completed before 4"


def test_in_order_of_completion_places_are_kept_for_earlier_deadlines():
    arrivals = [Arrival(0, 5), Arrival(1, 5), Arrival(2, 6, 0, True), Arrival(3, 6, 1, True), Arrival(4, 6, 2, True)]
    assert in_order_of_completion(arrivals, 5, 3, 3) is None
    arrivals[0].place, arrivals[0].is_kept = 3, True
    arrivals[1].place, arrivals[1].is_kept = 4, False
    assert in_order_of_completion(arrivals, 5, 3, 3) == Formed((0, 2, 3), (1,))


@example(staleness=0, latest=8)
@example(staleness=1, latest=8)
@given(st.integers(0, 5), st.integers(0, 20))
def test_what_may_start_is_still_fresh_when_it_is_trained(staleness, latest):
    freshness = Freshness(staleness)
    starts = [version for version in range(latest + 1) if freshness.may_start(version, latest)]
    assert starts == [version for version in range(latest + 1) if freshness.admits(version, latest)]
    assert freshness.deadline(latest - staleness) == latest


@pytest.mark.parametrize("order", ORDERS)
def test_no_group_is_admitted_for_a_step_that_never_comes(order):
    admission = Admission(3, 3, Freshness(4), order, num_steps=2)
    admission.ask(0)
    while admission.may_admit():
        admission.admit()
    assert admission.outstanding == 6 and math.isfinite(admission.horizon) and admission.horizon == 1

"""The run in limits that are known by hand, against a simulation of a tiny run, and under failures."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_mega.rollout.admission import Admission
from gspo_mega.rollout.arrival_order import Freshness
from gspo_mega.verify.simulate.events import RunEvents
from gspo_mega.verify.simulate.job import Job, constant, log_normal, of_values
from gspo_mega.verify.simulate.servers import DecodeCost, ServerCost

SERVER = ServerCost(DecodeCost(weights=0.01, cached=0.0, computed=0.0), 0.0, cache_tokens=1e12, most_requests=64)
JOB = Job(
    groups=4,
    group_size=2,
    num_servers=2,
    server=SERVER,
    lengths=constant(100),
    prompt_tokens=10,
    max_staleness=0,
    order="admission",
    on_publish="continue_with_cache",
    train_fixed=2.0,
    train_token=0.0,
    publish=0.25,
)


def test_with_no_staleness_a_step_is_rollout_and_training():
    record = RunEvents(JOB).run(num_steps=5)
    assert record.steps == pytest.approx([1.0 + 2.0 + 0.25] * 5) and record.waits == pytest.approx([1.0] * 5)
    assert record.staleness.tolist() == [5 * 8 * 100]
    assert record.tokens == 5 * 8 * 110 and record.sampled == pytest.approx(5 * 8 * 100)
    assert record.servers_busy == pytest.approx(5 * 2 * 1.0)


@pytest.mark.parametrize("train, rollout", [(2.0, 1.0), (0.5, 1.0), (1.0, 1.0)])
@pytest.mark.parametrize("staleness", [1, 3])
def test_with_staleness_a_step_is_the_longer_of_both(train, rollout, staleness):
    """Where all run at once, K batches' decode steps cost what one's do: the slots are one batch's here."""
    server = replace(SERVER, most_requests=4)
    job = replace(JOB, server=server, max_staleness=staleness, train_fixed=train, publish=0.0)
    record = RunEvents(job).run(num_steps=40)
    assert record.steps[10:] == pytest.approx([max(train, rollout)] * 30)
    assert np.flatnonzero(record.staleness).max() <= staleness


def test_waves_by_hand():
    """4 requests per server, 2 slots: two waves."""
    job = replace(JOB, server=replace(SERVER, most_requests=2))
    assert RunEvents(job).run(num_steps=3).waits == pytest.approx([2.0] * 3)
    cached = replace(SERVER, cache_tokens=2 * (10 + 50) + 1)
    assert replace(JOB, server=cached).slots == 2, "a prompt of 10 and half of 100"


def test_cores_that_are_shared_add_up():
    server = replace(SERVER, most_requests=4)
    apart = replace(JOB, server=server, max_staleness=1, train_fixed=2.0, publish=0.0)
    assert RunEvents(apart).run(num_steps=20).steps[5:] == pytest.approx([2.0] * 15)
    assert RunEvents(replace(apart, shared=True)).run(num_steps=20).steps[5:] == pytest.approx([3.0] * 15)


def test_the_same_seed_gives_the_same_run():
    job = replace(JOB, lengths=log_normal(60.0, 0.7, 400), max_staleness=2, train_fixed=0.7)
    one, other = (RunEvents(job, 3, 40.0).run(num_steps=60) for _ in range(2))
    assert one.steps == other.steps and one.trainer_failures == other.trainer_failures > 0
    assert RunEvents(job, 4, 40.0).run(num_steps=60).steps != one.steps


def one_by_one(lengths, steps, groups, staleness, train, order):
    """Seconds of each wait, one event after the other, every request on a server of its own at 1 s per token."""
    admission = Admission(groups, groups, Freshness(staleness), order)
    now, ends, waits, drawn = 0.0, {}, [], iter(lengths)
    for step in range(steps):
        admission.ask(step)
        while admission.may_admit():
            ends[admission.admit()] = now + next(drawn)
        asked = now
        while (formed := admission.formed()) is None:
            number = min(ends, key=lambda n: ends[n])
            now = max(now, ends.pop(number))
            admission.complete(number, True)
        waits.append(now - asked)
        admission.consume(formed)
        now += train
        for number in sorted((n for n in ends if ends[n] <= now), key=lambda n: ends[n]):
            del ends[number]
            admission.complete(number, True)
    return waits


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(0, 3),
    st.floats(0.1, 30.0),
    st.sampled_from(["admission", "completion"]),
    st.randoms(use_true_random=False),
)
def test_a_tiny_run_is_as_one_event_after_the_other(groups, staleness, train, order, random):
    steps = 6
    lengths = [random.uniform(1, 40) for _ in range((steps + staleness) * groups)]
    decode = DecodeCost(weights=1.0, cached=0.0, computed=0.0)
    job = replace(
        JOB,
        groups=groups,
        group_size=1,
        num_servers=(staleness + 1) * groups * 2,
        server=ServerCost(decode, 0.0, 1e12, 64),
        max_staleness=staleness,
        order=order,
        train_fixed=train,
        publish=0.0,
        lengths=of_values(np.array(lengths), "drawn"),
    )

    class InOrder(type(job.lengths)):
        def sample(self, rng, number):
            found, lengths[:number] = lengths[:number], []
            return np.array(found)

    values = list(lengths)
    run = RunEvents(replace(job, lengths=InOrder("drawn", 40, drawn=np.array(values))))
    record = run.run(num_steps=steps)
    assert record.waits == pytest.approx(one_by_one(values, steps, groups, staleness, train, order), abs=1e-6)
    assert record.staleness.sum() == pytest.approx(record.tokens - 10 * groups * steps)


def test_wait_drains_and_continue_reads_again():
    slow = replace(SERVER, most_requests=4, prefill=0.001)
    ahead = replace(JOB, server=slow, max_staleness=1, train_fixed=0.3, lengths=log_normal(80.0, 0.5, 300))
    drained = RunEvents(replace(ahead, on_publish="wait")).run(num_steps=30)
    read = RunEvents(replace(ahead, on_publish="continue")).run(num_steps=30)
    kept = RunEvents(ahead).run(num_steps=30)
    assert drained.publishing > read.publishing == pytest.approx(kept.publishing) == pytest.approx(30 * 0.25)
    assert sum(read.steps) > sum(kept.steps)
    for record in (drained, read, kept):
        assert record.staleness.sum() == pytest.approx(record.tokens - 30 * 8 * 10)
        assert (
            sum(record.steps)
            == pytest.approx(record.elapsed)
            == pytest.approx(record.waiting + record.training + record.publishing)
        )


def test_a_failed_trainer_repeats_what_no_checkpoint_has():
    job = replace(JOB, save=0.5, save_every=4, restart=10.0)
    record = RunEvents(job, 5, 60.0).run(num_steps=100)
    assert record.trainer_failures > 3 and record.restarting >= 10.0 * (record.trainer_failures - 2)
    assert len(record.steps) == 100 and record.tokens == 100 * 8 * 110
    assert record.staleness.sum() == pytest.approx(100 * 8 * 100), "nothing is trained twice"
    whole = record.waiting + record.training + record.publishing + record.saving + record.repeated + record.restarting
    assert record.elapsed == pytest.approx(whole)
    plain = RunEvents(job).run(num_steps=100)
    assert plain.repeated == plain.restarting == 0 and plain.saving == pytest.approx(25 * 0.5)
    assert record.repeated <= record.trainer_failures * 4 * 2.25 + 1e-9


def test_lost_servers_lose_no_group():
    job = replace(JOB, trainer_nodes=0, server_nodes=2, server_restart=5.0, lengths=log_normal(80.0, 0.5, 300))
    record = RunEvents(job, 2, 30.0).run(num_steps=100)
    assert record.server_failures > 5 and record.trainer_failures == 0
    assert record.tokens == pytest.approx(record.staleness.sum() + 100 * 8 * 10)
    assert np.mean(record.steps) > np.mean(RunEvents(job, 2).run(num_steps=100).steps)
    alone = replace(job, num_servers=1, server_nodes=1)
    assert math.isfinite(RunEvents(alone, 2, 10.0).run(num_steps=20).elapsed), "it waits for its only server"

"""Groups whose rewards are all equal: replaced, within a bound, and only if asked for."""

from __future__ import annotations

import itertools

from collector_support import Stream


def constant_first(num_constant):
    """Groups below `num_constant` get equal rewards, the rest differing ones."""
    counter = itertools.count()

    async def score(trajectory):
        trajectory.reward = 1.0 if trajectory.group_id < num_constant else float(next(counter))

    return score


def test_constant_groups_are_replaced(fakes, collect):
    fakes("server-0")
    stream = Stream()
    collector, _ = collect(score=constant_first(4), stream=stream, filter_constant_groups=True, max_oversampling=3.0)
    batch = collector.take(0)
    assert [g.prompt.prompt_id for g in batch.groups] == [f"p:{i}" for i in range(4, 10)]
    assert not any(g.is_constant for g in batch.groups)
    assert (batch.counts["num_prompts_sampled"], batch.counts["num_groups_filtered"]) == (10, 4)
    assert batch.counts["num_groups_missing"] == 0 and len(stream.drawn) == 10


def test_oversampling_has_a_bound(fakes, collect):
    fakes("server-0")
    collector, _ = collect(score=constant_first(7), filter_constant_groups=True, max_oversampling=1.5)
    batch = collector.take(0)
    assert [g.group_id for g in batch.groups] == [7, 8]
    assert batch.counts["num_prompts_sampled"] == 9
    assert (batch.counts["num_groups_filtered"], batch.counts["num_groups_missing"]) == (7, 4)


def test_a_step_without_any_signal_still_has_its_batch(fakes, collect):
    fakes("server-0")
    collector, _ = collect(score=constant_first(99), filter_constant_groups=True, max_oversampling=2.0)
    batch = collector.take(0)
    assert len(batch.groups) == 6 and batch.counts["num_groups_missing"] == 6


def test_without_the_filter_constant_groups_stay(fakes, collect):
    fakes("server-0")
    collector, _ = collect(score=constant_first(99))
    batch = collector.take(0)
    assert len(batch.groups) == 6 and batch.counts["num_groups_filtered"] == 0

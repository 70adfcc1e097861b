"""Groups with equal rewards are replaced, within a bound, and only if configured."""

from __future__ import annotations

import itertools

import pytest
from collector_support import Stream

from gspo_mega.base.errors import RewardError


def constant_first(num_constant):
    """Groups below `num_constant` get equal rewards, the rest differing ones."""
    counter = itertools.count()

    async def score(episode):
        episode.reward = 1.0 if episode.group_id < num_constant else float(next(counter))

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
    # What is shown is what was sampled: 16 rewards of 1, and 0 to 23.
    assert batch.sampled["reward/mean"] == pytest.approx((16 + sum(range(24))) / 40)
    assert batch.sampled["groups/constant_fraction"] == pytest.approx(4 / 10)
    assert batch.scored().sampled is batch.sampled


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
    assert (batch.sampled["reward/mean"], batch.sampled["groups/constant_fraction"]) == (1.0, 1.0)


def test_without_the_filter_constant_groups_stay(fakes, collect):
    fakes("server-0")
    collector, _ = collect(score=constant_first(99))
    batch = collector.take(0)
    assert len(batch.groups) == 6 and batch.counts["num_groups_filtered"] == 0


def failing(fails):
    """Scoring fails where `fails(group_id, sample)`; else rewards differ."""
    counter = itertools.count()

    async def score(episode):
        sample = int(episode.episode_id[-3:])
        if fails(episode.group_id, sample):
            episode.reward_error = f"judge: it hung on {episode.episode_id}"
        else:
            episode.reward = float(next(counter))

    return score


def test_a_failed_scoring_leaves_its_group(fakes, collect):
    fakes("server-0")
    kept = []
    collector, _ = collect(score=failing(lambda group, sample: group == 2 and sample == 1), max_failed_fraction=0.1)
    collector.start(0, keep=kept.append)
    batch = collector.take(0)
    assert [len(g.trajectories) for g in batch.groups] == [4] * 6 and len(kept) == 24, "the record has it"
    assert [len(g.trajectories) for g in batch.scored().groups] == [4, 4, 3, 4, 4, 4]
    assert (
        batch.counts["num_reward_failures"],
        batch.counts["num_groups_unscored"],
        batch.counts["num_groups_missing"],
    ) == (1, 0, 0)


def test_a_group_with_fewer_than_two_rewards_leaves_the_batch(fakes, collect):
    fakes("server-0")
    collector, _ = collect(score=failing(lambda group, sample: group == 3 and sample > 0), max_failed_fraction=0.2)
    batch = collector.take(0)
    assert [g.group_id for g in batch.groups] == [0, 1, 2, 4, 5]
    assert batch.sampled["reward/mean"] == pytest.approx(10.0), "21 rewards, 0 to 20; a failed scoring is none"
    assert batch.sampled["groups/constant_fraction"] == 0.0, "a single reward does not say that they are equal"
    assert (
        batch.counts["num_reward_failures"],
        batch.counts["num_groups_unscored"],
        batch.counts["num_groups_missing"],
    ) == (3, 1, 1)


def test_with_the_filter_such_a_group_is_replaced_and_is_no_constant_one(fakes, collect):
    fakes("server-0")
    fails = failing(lambda group, sample: group == 3 and sample > 0)
    collector, _ = collect(score=fails, max_failed_fraction=0.2, filter_constant_groups=True, max_oversampling=2.0)
    batch = collector.take(0)
    assert [g.group_id for g in batch.groups] == [0, 1, 2, 4, 5, 6]
    assert (
        batch.counts["num_groups_unscored"],
        batch.counts["num_groups_filtered"],
        batch.counts["num_groups_missing"],
    ) == (1, 0, 0)


def test_too_many_failures_stop_the_run_with_the_first_of_them(fakes, collect):
    fakes("server-0")
    collector, _ = collect(score=failing(lambda group, sample: sample == 0 and group < 3), max_failed_fraction=0.1)
    with pytest.raises(
        RewardError,
        match=(
            r"3 of \d+ scorings failed, more than reward.max_failed_fraction 0.1 allows.*\n.*judge: it hung on"
            r" step000000-g00000-s000"
        ),
    ):
        collector.take(0)


def test_a_reward_that_always_fails_stops_early(fakes, collect):
    """Not after the deadline of every scoring of the batch."""
    fakes("server-0")
    asked = []

    async def score(episode):
        asked.append(episode)
        episode.reward_error = "judge: no result within 10 s"

    collector, _ = collect(score=score, max_failed_fraction=0.1, prompts_per_step=20, max_concurrent_requests=4)
    with pytest.raises(RewardError, match="9 of"):
        collector.take(0)
    assert len(asked) < 20


def test_with_every_failure_allowed_a_batch_needs_one_group(fakes, collect):
    fakes("server-0")
    collector, _ = collect(score=failing(lambda group, sample: True), max_failed_fraction=1.0)
    with pytest.raises(RewardError, match="no group of the batch has two rewards; 24 of 24 scorings failed"):
        collector.take(0)
    # Relative to the batch, one response of a group is enough.
    whole_batch = {"baseline": "batch", "std_over": "batch"}
    collector, _ = collect(score=failing(lambda group, sample: True), max_failed_fraction=1.0, **whole_batch)
    with pytest.raises(RewardError, match="no group of the batch has a reward; 24 of 24 scorings failed"):
        collector.take(0)
    collector, _ = collect(score=failing(lambda group, sample: group > 0), max_failed_fraction=1.0)
    assert [g.group_id for g in collector.take(0).groups] == [0]

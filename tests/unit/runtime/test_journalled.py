"""A restarted step trains on the very trajectories it had; what does not belong to it is sampled again, and said."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace

import pytest

from gspo_mega.journal.journal import Journal
from gspo_mega.records import Group, Prompt, RolloutBatch, Trajectory
from gspo_mega.runtime.journalled import JournalledBatches


class Order:
    """Prompts 0, 1, 2, ..."""

    def __init__(self, position=0):
        self.position = position

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class Source:
    """Samples three groups of two; every sample is another one. `fail_after`: trajectories until it breaks down; `unscored`:
    which samples, counted from 1, cannot be scored."""

    def __init__(self, order, fail_after=None, unscored=()):
        self.order, self.fail_after, self.unscored, self.num_sampled = order, fail_after, unscored, 0

    def prompt(self, number):
        return Prompt(f"train:{number}", "train", (number,), "text")

    def upcoming(self, step, count):
        return [self.prompt(self.order.position + k) for k in range(count)]

    def sample(self, step, known, keep, on_wait):
        on_wait()
        groups = []
        for number in range(3):
            group = known.get(number) or Group(number, self.prompt(self.order.position + number), [])
            for sample in range(len(group.trajectories), 2):
                if self.num_sampled == self.fail_after:
                    raise InterruptedError
                self.num_sampled += 1
                one = Trajectory(f"s{step}-g{number}-{sample}", number, group.prompt, [self.num_sampled], [1], [-0.5], [step], "stop", reward=1.0)
                if self.num_sampled in self.unscored:
                    one.reward, one.reward_error, one.reward_parts = None, "judge: it hung", {"length": 3.0}
                group.trajectories.append(one)
                keep(one)
            groups.append(group)
        self.order.position += 3
        return RolloutBatch(step, groups, {}, {})


def tokens(batch):
    return [t.response_token_ids for t in batch.trajectories]


@pytest.fixture
def run(tmp_path):
    def make(*, position=0, fail_after=None, keep_last=None, offset=0, unscored=()):
        order = Order(position)
        source = Source(order, fail_after, unscored)
        source.num_sampled = offset
        batches = JournalledBatches(Journal(tmp_path), order, source, 2, keep_last)
        said = []
        return SimpleNamespace(
            order=order, source=source, said=said, take=lambda step, version=None: batches.take(step, step if version is None else version, lambda: None, said.append)
        )

    return make


def test_a_complete_batch_is_taken_as_it_was_and_the_order_goes_on_behind_it(run):
    first = run().take(0)
    again = run(offset=100)
    assert tokens(again.take(0)) == tokens(first)
    assert again.source.num_sampled == 100 and again.order.position == 3
    assert "6 trajectories are in the journal" in again.said[0]
    assert tokens(again.take(1)) == [[101], [102], [103], [104], [105], [106]]


def test_only_what_is_missing_is_sampled(run):
    broken = run(fail_after=5)
    with pytest.raises(InterruptedError):
        broken.take(0)
    again = run(offset=100)
    assert tokens(again.take(0)) == [[1], [2], [3], [4], [101], [102]]
    assert again.said == ["step 1: 2 complete groups of the journal are taken over; 1 trajectories of others are sampled again"]
    third = run(offset=200)
    assert tokens(third.take(0)) == [[1], [2], [3], [4], [101], [102]], "the repaired step is complete"


def test_a_failed_scoring_is_recorded_and_taken_as_it_was_with_its_batch(run):
    """To the field: what a resumed step, or a replay, trains on is what the first one did."""
    first = run(unscored=(2,)).take(0)
    again = run(offset=100).take(0)
    assert [asdict(t) for t in again.trajectories] == [asdict(t) for t in first.trajectories]
    assert [t.is_scored for t in again.trajectories] == [True, False, True, True, True, True]
    assert tokens(again.scored()) == tokens(first.scored()) == [[3], [4], [5], [6]], "one is left of the first group"


def test_of_an_incomplete_batch_a_group_with_a_failed_scoring_is_sampled_again(run):
    with pytest.raises(InterruptedError):
        run(fail_after=5, unscored=(2,)).take(0)
    again = run(offset=100)
    batch = again.take(0)
    assert tokens(batch) == [[101], [102], [3], [4], [103], [104]] and all(t.is_scored for t in batch.trajectories)
    assert again.said == ["step 1: 1 complete groups of the journal are taken over; 3 trajectories of others are sampled again"]


@pytest.mark.parametrize(("change", "reason"), [(dict(version=7), "weight version 0 sampled them, and the run holds 7"), (dict(position=1), "other prompts")])
def test_what_does_not_belong_to_the_step_is_not_used(run, change, reason):
    with pytest.raises(InterruptedError):
        run(fail_after=5).take(0)
    again = run(offset=100, position=change.get("position", 0))
    assert tokens(again.take(0, change.get("version"))) == [[101], [102], [103], [104], [105], [106]]
    assert reason in again.said[0] and again.said[0].startswith("notice")


def test_a_step_sampled_anew_takes_the_later_ones_with_it(run, tmp_path):
    before = run()
    for step in range(3):
        before.take(step)
    Journal(tmp_path).file(1).unlink()
    again = run(offset=100)
    again.take(0)
    again.take(1)
    assert Journal(tmp_path).steps() == [0, 1], "step 2 was sampled from weights that will not come back"


def test_old_steps_go(run, tmp_path):
    before = run(keep_last=1)
    for step in range(3):
        before.take(step)
    assert Journal(tmp_path).steps() == [2]

"""A restarted step trains on the very trajectories it had; what does not belong to it is sampled again, and said."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from gspo_mega.base.episodes import Episode, Group, RolloutBatch, one_turn_row
from gspo_mega.base.records import Prompt
from gspo_mega.data.journal.journal import Journal
from gspo_mega.rollout.arrival_order import Freshness
from gspo_mega.train.sources import JournalledSource


def TrainState():
    """What of a checkpoint's state the batches have to do with."""
    return SimpleNamespace(prompts={}, history="")


class Source:
    """Samples three groups of two for prompts 0, 1, 2, ...; every sample is another one. `fail_after`: trajectories
    until it breaks down; `unscored`: which samples, counted from 1, cannot be scored.
    """

    def __init__(self, position=0, fail_after=None, unscored=()):
        self.position, self.fail_after, self.unscored, self.num_sampled = position, fail_after, unscored, 0
        self.made = {"rewards": "r", "sampling": "s"}
        self.answers, self.routes = {}, False

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]

    def made_by(self, step):
        return self.made

    def prompt(self, number):
        messages = ({"role": "user", "content": "text"},)
        return Prompt(f"train:{number}", "train", (number,), "text", self.answers.get(number), messages=messages)

    def due(self, step, numbers):
        return {number: self.prompt(self.position + number) for number in numbers}

    def take(self, step, weight_version, on_wait, known, keep, admit):
        on_wait()
        assert all(group.prompt.messages for group in known.values()), "what is missing is sampled from the messages"
        groups = []
        for number in range(3):
            group = known.get(number) or Group(number, self.prompt(self.position + number), [])
            for sample in range(len(group.episodes), 2):
                if self.num_sampled == self.fail_after:
                    raise InterruptedError
                self.num_sampled += 1
                one = one_turn_row(
                    f"s{step}-g{number}-{sample}",
                    number,
                    group.prompt,
                    [self.num_sampled],
                    [1],
                    [-0.5],
                    [step],
                    "stop",
                    reward=1.0,
                )
                if self.routes:
                    one.routed_experts = np.zeros((1, 10, 100), dtype=np.int32)
                if self.num_sampled in self.unscored:
                    one.reward, one.reward_error, one.reward_parts = None, "judge: it hung", {"length": 3.0}
                group.episodes.append(Episode.from_row(one))
                keep(group.episodes[-1])
            groups.append(group)
        self.position += 3
        return RolloutBatch(step, groups, {}, {})


def tokens(batch):
    return [t.response_token_ids for t in batch.trajectories]


@pytest.fixture
def run(tmp_path):
    def make(*, position=0, fail_after=None, offset=0, first="f", unscored=(), **options):
        source = Source(position, fail_after, unscored)
        source.num_sampled = offset
        said = []
        batches = JournalledSource(
            Journal(tmp_path), source, 2, say=said.append, freshness=Freshness(), first_weights=lambda: first, **options
        )
        batches.restore(TrainState())
        return SimpleNamespace(
            source=source,
            said=said,
            batches=batches,
            take=lambda step, version=None: batches.take(step, step if version is None else version, lambda: None),
        )

    return make


def test_a_complete_batch_is_taken_as_it_was_and_the_order_goes_on_behind_it(run):
    first = run().take(0)
    again = run(offset=100)
    assert tokens(again.take(0)) == tokens(first)
    assert again.source.num_sampled == 100 and again.source.position == 3
    assert "6 trajectories are in the journal" in again.said[0]
    assert tokens(again.take(1)) == [[101], [102], [103], [104], [105], [106]]


def test_only_what_is_missing_is_sampled(run):
    broken = run(fail_after=5)
    with pytest.raises(InterruptedError):
        broken.take(0)
    again = run(offset=100)
    assert tokens(again.take(0)) == [[1], [2], [3], [4], [5], [101]]
    assert again.said == ["step 1: 5 trajectories of the journal, in 3 groups, are taken over"]
    third = run(offset=200)
    assert tokens(third.take(0)) == [[1], [2], [3], [4], [5], [101]], "the repaired step is complete"


def test_a_failed_scoring_is_recorded_and_taken_as_it_was_with_its_batch(run):
    """To the field: what a resumed step, or a replay, trains on is what the first one did."""
    first = run(unscored=(2,)).take(0)
    again = run(offset=100).take(0)
    assert again.trajectories == first.trajectories
    assert [t.is_scored for t in again.trajectories] == [True, False, True, True, True, True]
    assert tokens(again.scored()) == tokens(first.scored()) == [[3], [4], [5], [6]], "one is left of the first group"


def test_of_an_incomplete_batch_a_failed_scoring_is_sampled_again(run):
    with pytest.raises(InterruptedError):
        run(fail_after=5, unscored=(2,)).take(0)
    again = run(offset=100)
    batch = again.take(0)
    assert tokens(batch) == [[1], [101], [3], [4], [5], [102]] and all(t.is_scored for t in batch.trajectories)
    assert again.said == [
        "step 1: 4 trajectories of the journal, in 3 groups, are taken over; 1 without a reward are sampled again"
    ]


@pytest.mark.parametrize(
    ("change", "reason"),
    [(dict(version=7), "weight version 0 sampled them, and the run holds 7"), (dict(position=1), "other prompts")],
)
def test_what_does_not_belong_to_the_step_is_not_used(run, tmp_path, change, reason):
    with pytest.raises(InterruptedError):
        run(fail_after=5).take(0)
    before = Journal(tmp_path).file(0).read_bytes()
    again = run(offset=100, position=change.get("position", 0))
    assert tokens(again.take(0, change.get("version"))) == [[101], [102], [103], [104], [105], [106]]
    assert (
        reason in again.said[0]
        and again.said[0].startswith("notice")
        and "moved to step_00000000.old-0001" in again.said[0]
    )
    assert (tmp_path / "step_00000000.old-0001").read_bytes() == before, "nothing that was recorded is deleted"


def test_a_step_sampled_anew_takes_the_later_ones_with_it(run, tmp_path):
    before = run()
    for step in range(3):
        before.take(step)
    Journal(tmp_path).file(1).unlink()
    again = run(offset=100)
    again.take(0)
    again.take(1)
    assert Journal(tmp_path).steps() == [0, 1], "step 2 was sampled from weights that will not come back"
    assert (tmp_path / "step_00000002.old-0001").exists(), "and stays, under another name"


def test_old_steps_go(run, tmp_path):
    before = run(keep_last=1)
    for step in range(3):
        before.take(step)
        if step == 0:
            (tmp_path / "step_00000000.old-0001").write_bytes(b"of another history")
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000002"]


def made(run, **made):
    run.source.made = {**run.source.made, **made}
    return run


@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(made=dict(rewards="repaired")), "another reward scored them: its source or its options are not the same"),
        (dict(made=dict(sampling="hotter")), "they were sampled with other settings"),
        (dict(first="other weights"), "other weights sampled them"),
    ],
)
def test_what_something_else_made_is_moved_aside_and_sampled_again(run, tmp_path, complete, change, reason):
    first = run(fail_after=None if complete else 5)
    try:
        first.take(0)
    except InterruptedError:
        assert not complete
    recorded = Journal(tmp_path).file(0).read_bytes()
    again = made(run(offset=100, first=change.get("first", "f")), **change.get("made", {}))
    assert tokens(again.take(0)) == [[101], [102], [103], [104], [105], [106]]
    count = 6 if complete else 5
    assert again.said == [
        f"notice   step 1: the journal's {count} trajectories are not used: {reason}; they are moved to"
        " step_00000000.old-0001, and others sampled"
    ]
    assert (tmp_path / "step_00000000.old-0001").read_bytes() == recorded
    third = made(run(offset=200, first=change.get("first", "f")), **change.get("made", {}))
    assert tokens(third.take(0)) == [
        [101],
        [102],
        [103],
        [104],
        [105],
        [106],
    ], "what was sampled in their place is this run's own"


def test_a_record_of_an_earlier_release_says_nothing_of_what_made_it(run, tmp_path):
    source = run().source
    with Journal(tmp_path).begin(0, 0, 2, {}) as writer:
        batch = source.take(0, 0, lambda: None, {}, writer.add, None)
        writer.finish(batch, {"position": 3})
    again = run(offset=100)
    assert tokens(again.take(0))[0] == [101] and "an earlier release recorded them" in again.said[0]


def test_a_repaired_row_has_its_own_group_sampled_again_and_no_other(run, tmp_path):
    run().take(0)
    again = run(offset=100)
    again.source.answers[1] = "repaired"
    assert tokens(again.take(0)) == [[1], [2], [101], [102], [5], [6]]
    assert "2 of the journal's trajectories are not used: they are about other prompts" in again.said[0]
    assert "4 trajectories of the journal, in 2 groups, are taken over" in again.said[1]
    third = run(offset=200)
    third.source.answers[1] = "repaired"
    assert (
        tokens(third.take(0)) == [[1], [2], [101], [102], [5], [6]] and (tmp_path / "step_00000000.old-0001").exists()
    )


def test_the_weights_of_a_step_are_known_by_all_that_was_trained_on(run):
    straight, history = run(), []
    for step in range(3):
        history.append(straight.batches.history)
        straight.take(step)
    resumed = run(offset=100)
    state = TrainState()
    state.history, state.prompts = history[1], {"position": 3}
    resumed.batches.restore(state)
    assert tokens(resumed.take(1)) == [[7], [8], [9], [10], [11], [12]] and resumed.batches.history == history[2]
    resumed.batches.save_position(state)
    assert state.history == history[2] and state.prompts == {"position": 6}

    other = run(offset=100)  # the counters are the same, and another run's checkpoint was put in place of this one's
    state.history, state.prompts = "another", {"position": 3}
    other.batches.restore(state)
    assert tokens(other.take(1))[0] == [101] and "other weights sampled them" in other.said[0]


def test_rollouts_alone_change_no_weights(run):
    recording = run(trains=False)
    recording.take(0, 0)
    recording.take(1, 0)
    assert recording.batches.history == "f"
    again = run(trains=False, offset=100)
    assert tokens(again.take(0, 0)) == [[1], [2], [3], [4], [5], [6]] and tokens(again.take(1, 0))[0] == [7]


def test_routes_go_once_a_checkpoint_has_trained_on_them(run, tmp_path):
    first = run(prune_routes=True)
    first.source.routes = True
    before = [first.take(step) for step in range(2)]
    journal = Journal(tmp_path)
    sizes = [journal.file(step).stat().st_size for step in range(2)]
    histories = first.batches.history
    first.batches.on_checkpoint_saved(tmp_path / "step_00000001")
    first.batches.close()
    assert [journal.has_pruned_routes(step) for step in range(2)] == [True, False]
    assert journal.file(0).stat().st_size < sizes[0] - 6 * 1000 and journal.file(1).stat().st_size == sizes[1]
    record = journal.read(0)
    assert [t.response_token_ids for t in record.batch.trajectories] == tokens(before[0]) and record.batch.trajectories[
        0
    ].routed_experts is None

    again = run(prune_routes=True)
    again.source.routes = True
    again.take(0)
    again.take(1)
    assert again.batches.history == histories, "a record without routes is known for the one that it was"
    needing = run(needs_routes=True, offset=100)
    needing.source.routes = True
    assert tokens(needing.take(0))[0] == [101] and "their routed experts were pruned" in needing.said[0]

"""A run that samples ahead of its training, killed anywhere: nothing complete is sampled twice, nothing is trained twice,
the order is kept, and what is trained on is what a replay of the journal reads.
"""

from __future__ import annotations

import copy
import random
from types import SimpleNamespace

import pytest
from sampled_ahead_support import PROMPTS, SIZE, STEPS, Ahead, Killed, Run, World, content, is_dropped
from waiting import until

from gspo_mega.base.episodes import RolloutBatch
from gspo_mega.base.errors import JournalError
from gspo_mega.data.journal.journal import Journal
from gspo_mega.rollout.arrival_order import Freshness
from gspo_mega.train.sources import JournalledSource, RecordedSource


def check(run):
    assert all(len(tokens) == 1 for tokens in run.world.sampled.values()), "a complete episode is sampled once"
    journal = Journal(run.folder)
    order = []
    for step in range(STEPS):
        record = journal.read(step)
        assert content(record.batch) == run.trained[step]
        order += [group.group_id for group in record.batch.groups]
    assert order == [n for n in range(100) if not is_dropped(n)][: STEPS * PROMPTS], "in the order of admission, once"
    for number in order:
        want = [run.world.sampled[number, sample] for sample in range(SIZE)]
        step, place = divmod(order.index(number), PROMPTS)
        assert [[tokens[0]] for tokens in run.trained[step][place]] == want


@pytest.mark.parametrize("seed", range(4))
def test_uninterrupted_every_group_is_consumed_once_in_order(tmp_path, seed):
    run = Run(tmp_path, World(seed))
    run.start()
    check(run)
    since = [record.consumed.get("since", step) for step in range(STEPS) if (record := Journal(tmp_path).read(step))]
    assert any(first < step for step, first in enumerate(since)), "groups were sampled ahead"


@pytest.mark.parametrize("seed", range(12))
def test_killed_at_random_and_continued(tmp_path, seed):
    chosen = random.Random(100 + seed)
    world = World(seed)
    run = Run(tmp_path, world)
    num_kills = 0
    for _ in range(8):
        world.kill_after = chosen.randrange(1, 25)
        try:
            run.start()
        except Killed:
            num_kills += 1
            if chosen.random() < 0.3:
                newest = max(tmp_path.glob("step_????????"))
                newest.write_bytes(newest.read_bytes() + b"torn")
    world.kill_after = None
    run.start()
    assert num_kills > 2
    check(run)


def test_every_moment_of_a_run_can_be_the_last(tmp_path):
    """One kill at each event of a run that is checkpointed now and then."""
    moment, killed = 0, True
    while killed:
        run = Run(tmp_path / str(moment), World(5, kill_after=moment))
        try:
            run.start()
            killed = False
        except Killed:
            run.world.kill_after = None
            run.start()
        check(run)
        moment += 1
    assert moment > 40


def test_the_replay_of_its_journal_is_the_very_same(tmp_path):
    run = Run(tmp_path / "run", World(1, kill_after=20))
    with pytest.raises(Killed):
        run.start()
    run.world.kill_after = None
    straight = run.start()
    source, told = RecordedSource(tmp_path / "run"), {}
    source.on_ready(lambda step, groups: told.update({step: content(RolloutBatch(step, groups))}))

    def replayed():
        """What each step of a replay trains on, and the fingerprint at its end."""
        replay = JournalledSource(
            Journal(tmp_path / "replay"), source, SIZE, say=[].append, freshness=Freshness(), first_weights=lambda: "f"
        )
        replay.restore(SimpleNamespace(prompts={}, history=""))
        return [content(replay.take(step, step, lambda: None)) for step in range(STEPS)], replay.history

    want = [run.trained[step] for step in range(STEPS)], straight.history
    assert replayed() == want
    until(lambda: len(told) == STEPS - 1)
    assert told == {step: want[0][step] for step in range(1, STEPS)}, "each before it was asked for, but the first"
    assert replayed() == want, "from the journal of the replay"


def killed_run(tmp_path, **options):
    """A run that is killed with groups sampled ahead, and a checkpoint of its last step."""
    for seed in range(50):
        run = Run(tmp_path / str(seed), World(seed), **options)
        source = Ahead(run.world)
        batches = run.around(source)
        for step in range(3):
            batches.take(step, step, lambda: None)
        state = SimpleNamespace(step=3)
        batches.save_position(state)
        run.state = state
        batches.close()
        tickets = state.prompts["tickets"]
        if tickets["since"] < 3 and tickets["weights"] and source.groups[source.first].episodes:
            return run
    raise AssertionError("no seed samples ahead")


def test_other_weights_than_the_checkpoints_do_not_stand_for_what_was_sampled_ahead(tmp_path):
    run = killed_run(tmp_path)
    known = run.world.num_tokens
    run.state.prompts = copy.deepcopy(run.state.prompts)
    weights = run.state.prompts["tickets"]["weights"]
    run.state.prompts["tickets"]["weights"] = dict.fromkeys(weights, "another")
    run.start(num_steps=4)
    assert any("sampled ahead" in line and "other weights sampled them" in line for line in run.said)
    assert all(tokens > known for group in run.trained[3] for one in group for tokens in one[:1])


def test_with_a_lower_bound_what_is_too_old_is_sampled_again(tmp_path):
    run = killed_run(tmp_path)
    run.staleness = 0
    run.start(num_steps=4)
    assert any("sampled ahead" in line for line in run.said)
    versions = {v for one in Journal(run.folder).read(3).batch.episodes for v in one.turns[0].weight_versions}
    assert versions == {3}


def test_a_part_of_a_batch_that_is_gone_is_named(tmp_path):
    run = Run(tmp_path, World(0))
    run.start()
    journal = Journal(tmp_path)
    step = next(s for s in range(STEPS) if "since" in journal.read(s).consumed)
    missing = journal.file(journal.read(step).consumed["since"])
    before = journal.read(step - 1).prompts
    missing.unlink()
    with pytest.raises(JournalError, match=f"a part of its batch is in {missing.name}, which is not there"):
        journal.read(step)
    # A run whose checkpoint is that old goes on: the step is sampled again, as if its own file were gone.
    again = Run(tmp_path, World(1))
    history = journal.read_alone(step).made_by["weights"]
    again.state = SimpleNamespace(prompts=before, history=history, step=step)
    again.start()
    assert f"{missing.name}, which is not there; the record is moved to step_{step:08d}.old-0001" in again.said[0]
    assert sorted(again.trained) == list(range(step, STEPS))

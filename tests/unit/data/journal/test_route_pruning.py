"""Routed experts leave old files while the run goes on: no step waits, and no file that is gone comes back."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import numpy as np
import pytest

from gspo_mega.base import atomic_io
from gspo_mega.base.episodes import Group, RolloutBatch, one_turn_row
from gspo_mega.base.errors import JournalError
from gspo_mega.base.records import Prompt
from gspo_mega.data.journal.journal import Journal, RoutePruning
from gspo_mega.rollout.arrival_order import Freshness
from gspo_mega.train.sources import JournalledSource

NUM_STEPS = 4


@pytest.fixture
def journal(tmp_path):
    journal, prompt = Journal(tmp_path), Prompt("p:0", "p", (1, 2), "text")
    for step in range(NUM_STEPS):
        routes = np.full((3, 4, 2), step, np.uint8)
        row = one_turn_row(f"s{step}", 0, prompt, [3, 4], [1, 1], [-0.5] * 2, [0] * 2, "stop", routed_experts=routes)
        batch = RolloutBatch(step, [Group.from_rows(0, prompt, [row])])
        with journal.begin(step, step, 1, {}) as writer:
            writer.add(batch.episodes[0])
            writer.finish(batch, {})
    return journal


@pytest.fixture
def slow_disk(monkeypatch):
    """(begun, going_on): rewriting a file waits for the second, and says so with the first."""
    begun, going_on, usual = threading.Event(), threading.Event(), atomic_io.write_whole

    def slow(*args, **more):
        begun.set()
        assert going_on.wait(20)
        usual(*args, **more)

    monkeypatch.setattr(atomic_io, "write_whole", slow)
    return begun, going_on


def source_of(journal: Journal, said: list[str]) -> JournalledSource:
    nothing: Any = None  # is sampled
    return JournalledSource(journal, nothing, 1, say=said.append, freshness=Freshness(), prune_routes=True)


def pruned(journal: Journal) -> list[bool]:
    return [journal.has_pruned_routes(step) for step in journal.steps()]


def test_no_step_waits_for_it(journal, slow_disk):
    said = []
    source = source_of(journal, said)
    begun, going_on = slow_disk
    source.on_checkpoint_saved(journal.folder / "step_00000001")
    assert begun.wait(20) and pruned(journal) == [False] * NUM_STEPS
    source.on_checkpoint_saved(journal.folder / "step_00000003")  # a later checkpoint, before the first file is done
    going_on.set()
    source.close()
    assert pruned(journal) == [True, True, True, False] and said == []


def test_a_file_that_is_not_kept_does_not_come_back(journal, slow_disk):
    begun, going_on = slow_disk
    pruning = RoutePruning(journal)
    pruning.begin(2)
    assert begun.wait(20)
    journal.prune(2)
    assert journal.steps() == [0, 2, 3], "the one that is rewritten goes behind that"
    going_on.set()
    pruning.wait()
    assert journal.steps() == [2, 3] and pruned(journal) == [False, False]
    assert not list(journal.folder.glob(".*"))


def test_a_disk_that_refuses_is_told_once_and_the_file_stays(journal, monkeypatch):
    def refuse(*args, **more):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(atomic_io, "write_whole", refuse)
        pruning = RoutePruning(journal)
        pruning.begin(2)
        with pytest.raises(JournalError, match="step_00000000: the rollout journal cannot be written: No space left"):
            pruning.wait()
        said = []
        source = source_of(journal, said)
        source.on_checkpoint_saved(journal.folder / "step_00000002")
        source.close()
        (line,) = said
        assert line.startswith("notice   journal.prune_routes: routed experts stay until the next start:")
    assert pruned(journal) == [False] * NUM_STEPS
    pruning.begin(2)
    pruning.wait()
    assert pruned(journal) == [True, True, False, False]
    assert journal.read(0).batch is not None


def test_only_complete_steps_that_have_routes_are_rewritten(journal, tmp_path):
    """A step that a run is still sampling, or that has nothing to remove, keeps its file byte for byte."""
    prompt, plain = Prompt("p:0", "p", (1, 2), "text"), Journal(tmp_path)
    for step, routes, completes in ((10, None, True), (11, np.ones((3, 4, 2), np.uint8), False)):
        row = one_turn_row("s", 0, prompt, [3, 4], [1, 1], [-0.5] * 2, [0] * 2, "stop", routed_experts=routes)
        batch = RolloutBatch(step, [Group.from_rows(0, prompt, [row])])
        with plain.begin(step, step, 1, {}) as writer:
            writer.add(batch.episodes[0])
            if completes:
                writer.finish(batch, {})
    before = {step: plain.file(step).read_bytes() for step in (10, 11)}
    plain.prune_routes(12)
    assert {step: plain.file(step).read_bytes() for step in (10, 11)} == before
    assert pruned(plain) == [True] * NUM_STEPS + [False, False]


def test_nothing_but_the_routes_leaves_a_file(journal):
    before, size = journal.read(1), journal.file(1).stat().st_size
    journal.prune_routes(2)
    after = journal.read(1)
    (old,), (new,) = before.batch.trajectories, after.batch.trajectories
    assert journal.file(1).stat().st_size < size
    assert old.routed_experts is not None and new.routed_experts is None
    for name in (field.name for field in dataclasses.fields(old) if field.name != "routed_experts"):
        np.testing.assert_equal(getattr(new, name), getattr(old, name), err_msg=name)
    assert journal.has_pruned_routes(1) and journal.read(2).batch.trajectories[0].routed_experts is not None

"""The thread that samples and the one that trains write one journal: neither loses a mark, nor waits for the other's disk."""

from __future__ import annotations

import threading

import pytest
from sampled_ahead_support import AHEAD, STEPS, Run, World

from gspo_mega.base import atomic_io
from gspo_mega.base.episodes import one_turn_episode
from gspo_mega.base.records import Prompt
from gspo_mega.data.journal.episode_log import EpisodeLog
from gspo_mega.data.journal.journal import Journal
from gspo_mega.data.journal.steps import StepWriter
from gspo_mega.train.sources import JournalledSource


@pytest.fixture
def late():
    """A group that comes while a step is recorded: its prompt, and its first episode."""
    prompt = Prompt("train:90", "train", (90,), "text")
    one = one_turn_episode("step000000-g00090-s000", 90, prompt, [5, 7], [-0.5, -1.0], [0, 0], "stop")
    one.reward = 1.0
    return one


def test_a_group_that_is_admitted_while_a_step_is_recorded_keeps_its_record(tmp_path, monkeypatch, late):
    """The thread that samples goes on at any moment, also between two lines of the one that trains."""
    run = Run(tmp_path, World(0))
    threads: list[threading.Thread] = []
    oldest_open = EpisodeLog.oldest_open

    def meanwhile(log, *args, **more):
        found = oldest_open(log, *args, **more)
        if not threads:
            threads.append(threading.Thread(target=lambda: (log.admit(90, late.prompt, 0), log.complete(late))))
            threads[0].start()
            threads[0].join(0.3)
        return found

    monkeypatch.setattr(EpisodeLog, "oldest_open", meanwhile)
    advance = JournalledSource._advance
    monkeypatch.setattr(JournalledSource, "_advance", lambda *args: (threads[0].join(60), advance(*args))[1])
    batches = run.start(num_steps=1)
    assert late.episode_id in batches._log.checksums and 90 in batches._log.numbers()


def test_sampling_does_not_wait_until_a_step_is_on_disk(tmp_path, monkeypatch, late):
    run, waited = Run(tmp_path, World(0)), []
    logs: list[EpisodeLog] = []
    consume, sync = EpisodeLog.consume, atomic_io.sync_descriptor
    monkeypatch.setattr(EpisodeLog, "consume", lambda log, *args: (logs.append(log), consume(log, *args))[1])

    def slow_disk(descriptor, at):
        log = logs[-1]
        thread = threading.Thread(target=lambda: (log.admit(90, late.prompt, 0), log.complete(late)), daemon=True)
        thread.start()
        thread.join(60)
        waited.append(thread.is_alive())
        sync(descriptor, at)

    monkeypatch.setattr(atomic_io, "sync_descriptor", slow_disk)
    run.start(num_steps=1)
    assert waited == [False]
    journal = Journal(tmp_path)
    assert journal.read(0).batch is not None and 90 not in journal.read_alone(0).groups
    assert [one.episode_id for one in journal.read_alone(1).groups[90].episodes] == [late.episode_id]


def test_the_steps_that_are_kept_are_whole_though_the_next_ones_file_is_open(tmp_path, monkeypatch, late):
    """The other thread opens it as soon as the batch is recorded, before what is not kept is removed."""
    run = Run(tmp_path, World(2), keep_last=2)
    settle = StepWriter.settle
    logs: list[EpisodeLog] = []
    consume = EpisodeLog.consume
    monkeypatch.setattr(EpisodeLog, "consume", lambda log, *args: (logs.append(log), consume(log, *args))[1])
    monkeypatch.setattr(StepWriter, "settle", lambda writer: (settle(writer), logs[-1].complete(late))[0])
    run.start()
    journal = Journal(tmp_path)
    assert journal.steps() == [*range(STEPS - 2 - AHEAD, STEPS + 1)]
    assert all(journal.read(step).batch is not None for step in range(STEPS - 2, STEPS))


def test_sampling_does_not_wait_while_a_batch_is_recorded(tmp_path, monkeypatch, late):
    """Nor while the next file, which it needs, reaches the disk. Its marks are in that file, behind the batch."""
    run, waited, seen = Run(tmp_path, World(0)), [], []
    logs: list[EpisodeLog] = []
    consume = EpisodeLog.consume
    monkeypatch.setattr(EpisodeLog, "consume", lambda log, *args: (logs.append(log), consume(log, *args))[1])

    def beside(mark) -> None:
        thread = threading.Thread(target=mark, daemon=True)
        thread.start()
        thread.join(60)
        waited.append(thread.is_alive())

    def slowly(owner, name, mark):
        usual = getattr(owner, name)

        def slow(*args, **more):
            if logs and name not in seen:
                seen.append(name)
                assert name == "finish" or Journal(tmp_path).read_alone(0).consumed, "the batch is recorded first"
                beside(mark)
            return usual(*args, **more)

        monkeypatch.setattr(owner, name, slow)

    slowly(StepWriter, "finish", lambda: logs[-1].admit(90, late.prompt, 0))
    slowly(Journal, "begin", lambda: logs[-1].complete(late))
    run.start(num_steps=1)
    assert (seen, waited) == (["finish", "begin"], [False, False])
    journal = Journal(tmp_path)
    assert journal.read(0).batch is not None and 90 not in journal.read_alone(0).groups
    record = journal.read_alone(1)
    assert record.admitted[90] == 0 and [one.episode_id for one in record.groups[90].episodes] == [late.episode_id]

"""One thread admits and completes while another consumes: every episode is in the log once, and every batch is whole."""

from __future__ import annotations

import threading

import pytest

from gspo_mega.base.episodes import Group, RolloutBatch, one_turn_episode
from gspo_mega.base.errors import JournalError
from gspo_mega.base.records import Prompt
from gspo_mega.data.journal.episode_log import EpisodeLog, FileBegin
from gspo_mega.data.journal.journal import Journal

SIZE, PROMPTS, STEPS = 2, 3, 12


def begin(step: int) -> FileBegin:
    return FileBegin(step, step, {"weights": f"w{step}"})


def episode(number: int, sample: int):
    prompt = Prompt(f"train:{number}", "train", (number,), "text")
    name = f"step000000-g{number:05d}-s{sample:03d}"
    one = one_turn_episode(name, number, prompt, [number, sample], [-0.5, -1.0], [0, 0], "stop")
    one.reward = 1.0
    return one


def test_two_threads_write_one_log(tmp_path):
    log, complete = EpisodeLog(Journal(tmp_path), SIZE), [threading.Event() for _ in range(STEPS * PROMPTS)]
    groups = [[episode(number, sample) for sample in range(SIZE)] for number in range(STEPS * PROMPTS)]
    failed: list[BaseException] = []

    def sample() -> None:
        try:
            for number, ones in enumerate(groups):
                log.admit(number, ones[0].prompt, number // PROMPTS)
                for one in ones:
                    log.complete(one)
                complete[number].set()
        except BaseException as error:
            failed.append(error)
            raise

    log.begin(begin(0), {}, {})
    thread = threading.Thread(target=sample)
    thread.start()
    for step in range(STEPS):
        log.ready(begin(step))
        numbers = range(step * PROMPTS, (step + 1) * PROMPTS)
        assert all(complete[number].wait(20) for number in numbers), failed
        batch = RolloutBatch(step, [Group(number, groups[number][0].prompt, groups[number]) for number in numbers])
        still_open = {number for number in log.numbers() if number >= numbers.stop}
        ended = log.consume(batch, still_open | set(range(numbers.stop, STEPS * PROMPTS)), begin(step + 1))
        ended.write(batch, {"step": step})
    thread.join()
    log.close()
    journal, seen = Journal(tmp_path), []
    for step in range(STEPS):
        record = journal.read(step)
        assert record.num_torn_bytes == 0 and record.made_by == {"weights": f"w{step}"}
        assert [one.episode_id for one in record.batch.episodes] == [
            one.episode_id for ones in groups[step * PROMPTS : (step + 1) * PROMPTS] for one in ones
        ]
        assert record.admitted.items() >= {group.group_id: step for group in record.batch.groups}.items()
        seen += [one.episode_id for group in journal.read_alone(step).groups.values() for one in group.episodes]
    assert sorted(seen) == sorted(one.episode_id for ones in groups for one in ones), "each is written once"
    assert log.checksums == {} and log.numbers() == set(), "nothing is kept of what is consumed"


def test_a_sample_that_comes_after_the_end_is_refused(tmp_path):
    log = EpisodeLog(Journal(tmp_path), SIZE)
    log.begin(begin(0), {}, {})
    log.close()
    with pytest.raises(JournalError, match="after the journal was closed"):
        log.complete(episode(0, 0))


def test_nothing_is_opened_between_two_steps_unless_something_happens(tmp_path):
    log = EpisodeLog(Journal(tmp_path), SIZE)
    log.begin(begin(0), {}, {})
    group = Group(0, episode(0, 0).prompt, [episode(0, sample) for sample in range(SIZE)])
    for one in group.episodes:
        log.complete(one)
    batch = RolloutBatch(0, [group])
    log.consume(batch, set(), begin(1)).write(batch, {})
    assert Journal(tmp_path).steps() == [0]
    log.admit(1, group.prompt, 0)
    assert Journal(tmp_path).steps() == [0, 1] and Journal(tmp_path).read(1).admitted == {1: 0}
    log.close()


def test_groups_of_several_files_are_in_the_order_in_which_they_completed(tmp_path):
    log, journal = EpisodeLog(Journal(tmp_path), SIZE), Journal(tmp_path)
    log.begin(begin(0), {}, {})
    for number in range(5):
        log.admit(number, episode(number, 0).prompt, 0)
    for number, sample in ((3, 1), (1, 0), (1, 1), (4, 0), (0, 1), (0, 0)):
        log.complete(episode(number, sample))
    log.consume(RolloutBatch(0, []), set(range(5)), begin(1)).write(RolloutBatch(0, []), {})
    for number, sample in ((4, 1), (3, 0)):
        log.complete(episode(number, sample))
    log.close()
    record = journal.read_alone(1)
    record.add_record(journal.read_alone(0), set(range(5)))
    assert [number for number, group in record.groups.items() if len(group.episodes) == SIZE] == [1, 0, 4, 3]
    assert [len(group.episodes) for group in record.groups.values()].count(0) == 1
    assert record.checksums.keys() == {one.episode_id for g in record.groups.values() for one in g.episodes}

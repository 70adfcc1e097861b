"""How the records of two files become one, and where a run's groups begin in them."""

from __future__ import annotations

import pytest

from gspo_mega.base.episodes import Episode, Group, RolloutBatch, one_turn_episode
from gspo_mega.base.records import Prompt
from gspo_mega.data.journal.episode_log import EpisodeLog, FileBegin
from gspo_mega.data.journal.journal import Journal
from gspo_mega.data.journal.steps import StepRecord


def prompt(number: int) -> Prompt:
    return Prompt(f"p:{number}", "p", (1, 2), "text")


def episode(number: int, sample: int, token: int = 5, step: int = 0) -> Episode:
    name = f"step{step:06d}-g{number:05d}-s{sample:03d}"
    made = one_turn_episode(name, number, prompt(number), [token, 6], [-1.0, -1.0], [0, 0], "stop")
    made.reward = float(token)
    return made


def record(step: int, episodes: list[Episode], checksum: int, **more) -> StepRecord:
    made = StepRecord(step, step, 2, **more)
    for one in episodes:
        made.groups.setdefault(one.group_id, Group(one.group_id, one.prompt, []))
        made.add_episode(one, checksum)
    return made


def names(made: StepRecord) -> dict[int, list[str]]:
    return {number: [one.episode_id for one in group.episodes] for number, group in made.groups.items()}


def test_an_earlier_file_comes_before_this_one_and_this_ones_samples_stand():
    """Group 1 is in both files, 2 in the earlier one alone, 3 in this one alone, and 4 is not asked for."""
    earlier = record(
        4,
        [episode(4, 0), episode(2, 0), episode(1, 1, token=7), episode(1, 0, token=7)],
        11,
        routes_pruned=True,
        admitted={1: 3, 2: 3, 4: 3},
    )
    own = record(5, [episode(3, 0), episode(1, 1, token=9, step=5)], 22, admitted={3: 5})
    own.add_record(earlier, {1, 2})
    assert names(own) == {
        2: ["step000000-g00002-s000"],
        3: ["step000000-g00003-s000"],
        1: ["step000000-g00001-s000", "step000005-g00001-s001"],
    }
    assert list(own.groups) == [2, 3, 1], "the group that got an episode last is last"
    assert own.groups[1].episodes[1].turns[0].token_ids == [9, 6]
    assert own.routes_pruned and own.admitted == {1: 3, 2: 3, 3: 5}
    assert own.checksums["step000005-g00001-s001"] == 22 and own.checksums["step000000-g00001-s000"] == 11
    untouched = record(5, [episode(3, 0)], 22)
    untouched.add_record(earlier, set())
    assert names(untouched) == {3: ["step000000-g00003-s000"]} and not untouched.routes_pruned


def test_a_checksum_of_this_file_stands_over_the_earlier_one():
    own = record(5, [episode(1, 0)], 22)
    own.add_record(record(4, [episode(1, 0)], 11), {1})
    assert own.checksums == {"step000000-g00001-s000": 22}


@pytest.fixture
def log(tmp_path):
    made = EpisodeLog(Journal(tmp_path), 2)
    yield made
    made.close()


def test_a_batch_says_the_first_file_that_it_needs(log, tmp_path):
    """Group 0 is admitted and complete in the file of step 0; 1 is admitted there and complete in that of step 1, and
    again marked there; 2 is open behind both.
    """
    log.begin(FileBegin(0, 0, {}), {}, {})
    for number in range(3):
        log.admit(number, prompt(number), 0)
    first = [episode(0, 0), episode(0, 1)]
    for one in (*first, episode(1, 0)):
        log.complete(one)
    assert log.numbers() == {0, 1, 2} and log.oldest_open({1, 2}, otherwise=9) == 0
    batch = RolloutBatch(0, [Group(0, prompt(0), first)])
    log.consume(batch, {1, 2}, FileBegin(1, 1, {})).write(batch, {})
    assert log.numbers() == {1, 2} and log.oldest_open(set(), otherwise=9) == 9

    log.admit(1, prompt(1), 1)  # anew, after a restart of its sampling: its records still begin in the first file
    log.complete(episode(1, 1))
    log.admit(3, prompt(3), 1)
    assert log.oldest_open({3}, otherwise=9) == 1 and log.oldest_open({1, 3}, otherwise=9) == 0
    third = [episode(3, 0), episode(3, 1)]
    for one in third:
        log.complete(one)
    both = [episode(1, 0), episode(1, 1)]
    batch = RolloutBatch(1, [Group(1, prompt(1), both), Group(3, prompt(3), third)])
    log.consume(batch, {2}, FileBegin(2, 2, {})).write(batch, {})
    assert set(log.checksums) == set() and log.numbers() == {2}
    found = Journal(tmp_path).read(1)
    assert found is not None and found.batch is not None
    assert [[one.episode_id for one in group.episodes] for group in found.batch.groups] == [
        [one.episode_id for one in both],
        [one.episode_id for one in third],
    ]

"""What a teacher's server said of tokens: recorded with the episode, pruned, in rows, in packs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gspo_mega.base.episodes import Episode, Group, Node, RolloutBatch, build_rows, one_turn_episode
from gspo_mega.base.errors import JournalError, RolloutError
from gspo_mega.base.records import Prompt
from gspo_mega.base.served_scores import ServedScores
from gspo_mega.data.journal.frames import drop_routes
from gspo_mega.data.journal.journal import Journal
from gspo_mega.data.packing import build_micro_batch
from gspo_mega.train.batches import served_scores

PROMPT = Prompt("math:0", "math", (5, 6), "2+2=", answer="4")


def scores(count: int, num_top: int, first: float = 1.0) -> ServedScores:
    values = -(first + np.arange(count, dtype=np.float32))
    ids = np.arange(count * num_top, dtype=np.int32).reshape(count, num_top)
    return ServedScores(values, ids, -ids.astype(np.float32))


def answered(num_top: int = 2) -> Episode:
    episode = one_turn_episode("step000000-g00000-s000", 0, PROMPT, [7, 8, 9], [-1.0] * 3, [0] * 3, "stop", "4")
    episode.reward = 1.0
    assert episode.rows()[0].teacher is None
    episode.take_scores({1: scores(3, num_top)})
    return episode


@pytest.mark.parametrize("num_top", [0, 2])
def test_the_journal_gives_them_back_and_pruning_leaves_those_of_sampled_tokens(tmp_path: Path, num_top: int):
    episode, journal = answered(num_top), Journal(tmp_path)
    batch = RolloutBatch(0, [Group(0, PROMPT, [episode])])
    with journal.begin(0, 0, 1, {}) as writer:
        writer.add(episode)
        writer.finish(batch, {})

    def read() -> ServedScores | None:
        record = journal.read(0)
        assert record is not None and record.batch is not None
        return record.batch.trajectories[0].teacher

    assert read() == scores(3, num_top)
    journal.prune_routes(1)
    assert read() == ServedScores(scores(3, 0).log_probs, *_none(3)) and journal.has_pruned_routes(0) == (num_top > 0)


def _none(count: int) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros((count, 0), np.int32), np.zeros((count, 0), np.float32)


def test_a_record_without_any_loses_nothing():
    assert not drop_routes({"token_ids": np.zeros(1), "teacher_log_probs.1": np.zeros(1, np.float32)})


def branching() -> Episode:
    """A prompt with a first turn, which two branches continue after a word of the environment's."""
    nodes = [
        Node(0, -1, "context", [], [5, 6]),
        Node(1, 0, "sampled", [{}], [7, 8], [-1.0] * 2, [0] * 2, finish_reason="stop"),
        Node(2, 1, "context", [], [9]),
        Node(3, 2, "sampled", [{}], [10], [-1.0], [0], finish_reason="stop"),
        Node(4, 2, "sampled", [{}], [11], [-1.0], [0], finish_reason="stop"),
    ]
    return Episode("e", 0, PROMPT, nodes, reward=1.0)


def test_each_row_has_those_of_the_tokens_that_it_trains():
    episode = branching()
    episode.take_scores({1: scores(2, 1), 3: scores(1, 1, 5.0), 4: scores(1, 1, 6.0)})
    first, second = build_rows(episode)
    assert first.teacher is not None and second.teacher is not None
    assert first.teacher.log_probs.tolist() == [-1.0, -2.0, 0.0, -5.0]  # the third token is the environment's
    assert second.teacher.log_probs.tolist() == [0.0, 0.0, 0.0, -6.0]  # the first turn is trained in the other row
    assert [row.teacher.log_probs.tolist() for row in episode.by_turn().rows() if row.teacher is not None] == [
        [-1.0, -2.0],
        [-5.0],
        [-6.0],
    ]


def test_the_scores_of_some_turns_are_those_of_none():
    episode = branching()
    episode.take_scores({1: scores(2, 1)})
    assert build_rows(episode)[0].teacher is None


def test_they_are_aligned_with_the_labels_in_a_pack():
    def record(prompt: list[int], response: list[int], mask: list[int]) -> dict:
        count = len(response)
        both = {"teacher_log_probs": -np.arange(1.0, 1 + count), "teacher_top_ids": np.full((count, 2), [3, 4])}
        return both | {
            "teacher_top_log_probs": np.full((count, 2), [-0.5, -1.5]),
            "prompt_token_ids": prompt,
            "response_token_ids": response,
            "response_mask": mask,
            "rollout_log_probs": [-1.0] * count,
            "advantage": 1.0,
        }

    keys = ("teacher_log_probs", "teacher_top_ids", "teacher_top_log_probs")
    rows = [record([1, 2], [7, 8, 9], [1, 0, 1]), record([1], [7], [1])]
    pack = build_micro_batch(rows, [0, 1], 4, pack_multiple=16, token_keys=keys, num_top=2)
    assert pack.teacher_log_probs is not None and pack.teacher_top_ids is not None
    assert pack.teacher_log_probs.tolist() == [0, -1, 0, -3, 0, 0, 0, 0, -1] + [0] * 7
    assert np.flatnonzero(pack.loss_mask).tolist() == [1, 3, 8]
    assert pack.teacher_top_ids.shape == (16, 2) and pack.teacher_top_ids[[1, 3, 8]].tolist() == [[3, 4]] * 3
    assert pack.teacher_top_ids.sum() == 3 * 7, "nothing elsewhere"
    filler = build_micro_batch(rows, [], 4, token_keys=keys, num_top=2)
    assert filler.teacher_top_log_probs is not None and filler.teacher_top_log_probs.shape == (4, 2)


def test_a_row_that_was_recorded_without_them_is_refused_by_name():
    row = answered().rows()[0]
    assert served_scores(row, 1).top_ids.shape == (3, 1)
    with pytest.raises(RolloutError, match=r"s000 has a teacher's 2 most likely tokens, and `teacher.url` needs 3"):
        served_scores(row, 3)
    row.teacher = None
    with pytest.raises(RolloutError, match=r"step000000-g00000-s000 has no scores of a teacher's server"):
        served_scores(row, 0)


def test_scores_of_another_number_of_tokens_are_not_recorded(tmp_path: Path):
    episode = answered()
    episode.nodes[1].teacher = scores(2, 2)
    with (
        Journal(tmp_path).begin(0, 0, 1, {}) as writer,
        pytest.raises(JournalError, match="a teacher's scores of 2 tokens for 3"),
    ):
        writer.add(episode)

"""The metrics of a step's episodes: by hand, in the catalogue, and on the console where there are turns."""

from __future__ import annotations

import pytest
from episode_oracle import TREES, recorded_episodes

from gspo_mega.metrics.catalogue import find_metric
from gspo_mega.metrics.reductions import reduced
from gspo_mega.metrics.writer import progress_line
from gspo_mega.train.reports import episode_shapes, staleness_shapes, token_staleness

# Of the trees: rows, tokens of the longest row, tokens of all rows behind their prompts, and of these the trained ones.
# Prompts are of 3, 5 and 7 tokens, and 2 tokens of context come before every turn that follows another.
ROWS = [1, 1, 2, 2, 1, 2, 1]
LONGEST = [3 + 6, 3 + 5 + 2 + 9 + 2 + 4, 3 + 7 + 2 + 8, 5 + 10, 5 + 12 + 2 + 2, 7 + 3 + 2 + 5 + 2 + 7, 7 + 1]
BEHIND = [6, 22, (7 + 2 + 3) + (7 + 2 + 8), 4 + 10, 16, (3 + 2 + 6 + 2 + 4) + (3 + 2 + 5 + 2 + 7), 1]


def test_shapes_by_hand():
    shapes = reduced(episode_shapes(recorded_episodes()))
    turns = [len(tree) for tree in TREES]
    sampled = sum(count for tree in TREES for _, count, _ in tree)
    assert shapes["episode/turns_mean"] == pytest.approx(sum(turns) / 7) and shapes["episode/turns_max"] == 5
    assert shapes["episode/rows_mean"] == pytest.approx(sum(ROWS) / 7)
    assert shapes["episode/context_tokens_mean"] == pytest.approx(sum(LONGEST) / 7)
    assert shapes["episode/context_tokens_max"] == 26
    assert shapes["episode/masked_fraction"] == pytest.approx(1 - sampled / sum(BEHIND))
    assert all(find_metric(name) for name in shapes)


def test_a_row_for_each_turn_trains_all_that_is_behind_its_prompt():
    shapes = reduced(episode_shapes(recorded_episodes().by_turn()))
    assert shapes["episode/rows_mean"] == shapes["episode/turns_mean"]
    assert shapes["episode/masked_fraction"] == 0


@pytest.mark.parametrize("by_turn", [False, True])
def test_staleness_is_of_every_sampled_token_once(by_turn):
    """Two in seven episodes have tokens of two versions: one within a turn, one in two branches."""
    batch = recorded_episodes()
    for number, episode in enumerate(batch.episodes):
        for turn in episode.turns:
            turn.weight_versions = [9 - (number == 5)] * len(turn.token_ids)
    batch.episodes[1].turns[1].weight_versions[4:] = [10] * 5
    branched = batch.episodes[2].turns[-1]
    branched.weight_versions = [7] * len(branched.token_ids)
    batch = batch.by_turn() if by_turn else batch
    found = reduced(staleness_shapes(batch, token_staleness(batch, 10)))
    sampled = sum(count for tree in TREES for _, count, _ in tree)
    older = sum(count for _, count, _ in TREES[5])
    lag = sampled + older - 5 + 2 * len(branched.token_ids)
    assert found["rollout/staleness_mean"] == pytest.approx(lag / sampled) and found["rollout/staleness_max"] == 3
    assert found["rollout/multi_version_fraction"] == pytest.approx(2 / 7)


@pytest.mark.parametrize("turns, shown", [(1.0, False), (1.25, True)])
def test_the_console_shows_turns_where_there_are_several(turns, shown):
    line = progress_line(3, {"reward/mean": 0.5, "episode/turns_mean": turns})
    assert ("turns 1.2" in line) is shown and "reward 0.500" in line

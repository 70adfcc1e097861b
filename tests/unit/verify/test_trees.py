"""The recorded episodes of a certificate: trees that a recorder could make, of the lengths asked for, with branches."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo_mega.base.episodes import check_episode
from gspo_mega.base.errors import PlanError
from gspo_mega.base.records import Prompt
from gspo_mega.config import load_config
from gspo_mega.train.batches import fill_advantages
from gspo_mega.verify.certify.batch import Draws, recorded_batch, redraw
from gspo_mega.verify.certify.trees import recorded_tree, require_room


def config_of(*overrides):
    return load_config("configs/certify_episodes.yaml", overrides, "certify").config


@given(place=st.integers(0, 7), length=st.integers(1, 200))
def test_a_tree_has_the_sampled_tokens_that_were_asked_for(place, length):
    ids = itertools.count(3)
    tree = recorded_tree("e", 0, Prompt("p:0", "p", (1, 2), ""), place, length, lambda n: [next(ids) for _ in range(n)])
    tree.reward = 1.0
    check_episode(tree)
    assert tree.num_sampled_tokens == length and all(len(node.token_ids) >= 1 for node in tree.turns)
    assert sum(row.weight for row in tree.rows()) == pytest.approx(1)
    assert max(row.num_tokens for row in tree.rows()) <= 2 + length + 8
    if length >= 4:
        assert (tree.num_turns, len(tree.rows())) == [(1, 1), (3, 1), (3, 2), (4, 3)][place % 4]


@pytest.mark.parametrize("scope", ["trajectory", "turn"])
def test_the_batch_has_branches_and_advantages_of_turns(scope):
    config = config_of(f"objective.scope={scope}")
    batch = recorded_batch(config, 500)
    rows = [len(episode.rows()) for episode in batch.episodes]
    turns = [episode.num_turns for episode in batch.episodes]
    assert rows == turns if scope == "turn" else {1, 2, 3} <= set(rows) and max(turns) == 4
    assert any(len(set(row.token_advantages) - {0.0}) > 1 for row in batch.trajectories) is (scope == "trajectory")
    again = recorded_batch(config, 500)
    fill_advantages(again, config, 0)
    assert [row.token_advantages for row in again.trajectories] == [row.token_advantages for row in batch.trajectories]


def test_a_token_that_is_unwanted_draws_its_own_episode_again():
    config = config_of()
    batch, draws = recorded_batch(config, 500), Draws.first(config)
    numbers = [n for n, episode in enumerate(batch.episodes) for _ in episode.rows()]
    branched = next(n for n in numbers if numbers.count(n) == 3)
    marks = [[False] * (row.num_tokens - 1) for row in batch.trajectories]
    last = max(row for row, number in enumerate(numbers) if number == branched)
    marks[last][-1] = True
    assert redraw(batch, [np.array(m) for m in marks], draws)
    assert sum(draws.responses) == draws.responses[branched] == 1 and sum(draws.prompts) == 0
    other = recorded_batch(config, 500, draws)
    changed = [a.nodes != b.nodes for a, b in zip(batch.episodes, other.episodes, strict=True)]
    assert changed == [n == branched for n in range(len(batch.episodes))]


def test_episodes_that_are_too_long_for_the_configuration_are_refused():
    require_room(config_of())
    with pytest.raises(PlanError, match="episodes.max_tokens: 127, but the recorded episodes .* up to 128 tokens"):
        require_room(config_of("episodes.max_tokens=127"))

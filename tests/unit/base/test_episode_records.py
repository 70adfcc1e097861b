"""The rows of an episode's tree: every sampled token is trained in exactly one of them, weights add up to 1, routes
cover the row. Faults: a token trained twice, a tree that no recorder makes.
"""

from __future__ import annotations

import collections
from fractions import Fraction

import numpy as np
import pytest
from episode_trees import TASK, context, episodes, routed, sampled
from hypothesis import given, settings

from gspo_mega.base import episodes as episode_records
from gspo_mega.base.episodes import Episode, build_rows, check_episode, leaf_ids, one_turn_episode, one_turn_row
from gspo_mega.base.records import Trajectory


def check_rows(episode: Episode, rows: list[Trajectory]) -> None:
    """What must hold of the rows of any tree."""
    trained: collections.Counter[float] = collections.Counter()
    num_sampled = sum(len(node.token_ids) for node in episode.turns)
    shares = []
    for row, leaf in zip(rows, leaf_ids(episode.nodes), strict=True):
        lengths = {
            len(values)
            for values in (row.response_token_ids, row.response_mask, row.rollout_log_probs, row.weight_versions)
        }
        assert lengths == {row.num_response_tokens}
        assert [*row.prompt.token_ids, *row.response_token_ids] == episode.tokens(leaf)
        assert all(p == 0.0 for p, active in zip(row.rollout_log_probs, row.response_mask, strict=True) if not active)
        trained.update(p for p, active in zip(row.rollout_log_probs, row.response_mask, strict=True) if active)
        shares.append(Fraction(sum(row.response_mask), num_sampled))
        assert row.weight == float(shares[-1])
        covered = [place for start, end in row.turns for place in range(start, end)]
        assert covered == [place for place, active in enumerate(row.response_mask) if active]
        for (start, end), node_id in zip(row.turns, row.turn_nodes, strict=True):
            assert row.response_token_ids[start:end] == episode.nodes[node_id].token_ids
            assert row.weight_versions[start:end] == episode.nodes[node_id].weight_versions
        if row.routed_experts is not None:
            assert row.routed_experts.shape[0] == row.num_tokens - 1
            assert row.routed_experts[:, 0, 0].tolist() == list(range(row.num_tokens - 1))
    # A token's log-prob names it (`episode_trees.sampled`), so a count of 1 for each is "exactly one row".
    assert trained == collections.Counter(p for node in episode.turns for p in node.log_probs)
    assert sum(shares) == 1


@given(episodes())
@settings(max_examples=150, deadline=None)
def test_every_sampled_token_is_in_exactly_one_row_with_mask_1(episode):
    check_episode(episode)
    rows = episode.rows()
    check_rows(episode, rows)
    assert [row.branch for row in rows] == list(range(len(rows)))
    assert rows[0].trajectory_id == episode.episode_id
    assert len({row.trajectory_id for row in rows}) == len(rows)
    assert {row.episode_id for row in rows} == {episode.episode_id}
    assert episode.num_branches == len(rows) - 1
    assert episode.response_text == rows[0].response_text
    assert all((row.routed_experts is None) == (episode.turns[0].routed_experts is None) for row in rows)


def _branched() -> Episode:
    """Turn 1, then two continuations of it; one of them ended with a tool's answer behind which nothing was sampled."""
    nodes = [
        context(0, -1, [3, 1, 4]),
        sampled(1, 0, [20, 21], version=4),
        context(2, 1, [8]),
        sampled(3, 2, [22], version=5, finish_reason="length"),
        context(4, 1, [9, 9], cause="edited"),
        sampled(5, 4, [23, 24, 25], version=5),
        context(6, 5, [7]),
    ]
    return routed(Episode("e", 0, TASK, nodes, reward=0.5, correct=True, reward_parts={"judge": 0.5}))


def test_rows_of_a_branched_episode_by_hand():
    first, second = _branched().rows()
    assert first.prompt is TASK
    assert first.response_token_ids == [20, 21, 8, 22]
    assert first.response_mask == [1, 1, 0, 1]
    assert first.rollout_log_probs == [-1.0, -1.001, 0.0, -3.0]
    assert first.weight_versions == [4, 4, 0, 5]
    assert (first.turns, first.turn_nodes, first.weight, first.finish_reason) == (
        [(0, 2), (3, 4)],
        [1, 3],
        0.5,
        "length",
    )
    assert second.response_token_ids == [20, 21, 9, 9, 23, 24, 25]
    assert second.response_mask == [0, 0, 0, 0, 1, 1, 1]
    assert second.weight_versions == [4, 4, 0, 0, 5, 5, 5]
    assert (second.turns, second.turn_nodes, second.weight, second.branch) == ([(4, 7)], [5], 0.5, 1)
    assert second.trajectory_id == "e-b001"
    assert (second.reward, second.correct, second.reward_parts) == (0.5, True, {"judge": 0.5})
    assert _branched().is_truncated


def test_a_tree_with_two_roots_gives_rows_with_prompts_of_their_own():
    nodes = [context(0, -1, [3]), sampled(1, 0, [20]), context(2, -1, [5, 6], cause="edited"), sampled(3, 2, [21])]
    first, second = Episode("e", 0, TASK, nodes).rows()
    assert (first.prompt.token_ids, second.prompt.token_ids) == ((3,), (5, 6))
    assert first.prompt.prompt_id == second.prompt.prompt_id == TASK.prompt_id


def test_rows_follow_the_reward_that_the_episode_gets_later():
    episode = _branched()
    rows = episode.rows()
    episode.reward, episode.reward_error = None, "judge: it hung"
    assert episode.rows() == rows
    assert [(row.reward, row.reward_error) for row in rows] == [(None, "judge: it hung")] * 2
    assert not any(row.is_scored for row in rows)


def test_one_turn_is_the_row_that_it_always_was():
    routes = np.arange(4 * 2 * 2, dtype=np.int32).reshape(4, 2, 2)
    episode = one_turn_episode("s", 2, TASK, [5, 6], [-0.5, -0.25], [1, 2], "stop", "yes", routed_experts=routes)
    check_episode(episode)
    [row] = episode.rows()
    expected = one_turn_row("s", 2, TASK, [5, 6], [1, 1], [-0.5, -0.25], [1, 2], "stop", "yes", routed_experts=routes)
    assert vars(row) == vars(expected)
    assert row.prompt is TASK
    assert row.weight == 1.0


def test_an_episode_of_a_row_returns_that_row():
    row = one_turn_row("s", 2, TASK, [5, 6], [1, 0], [-0.5, 0.0], [1, 1], "length", reward=1.0)
    episode = Episode.from_row(row)
    assert episode.rows() == [row]
    assert episode.rows()[0] is row
    assert (episode.reward, row.response_mask) == (1.0, [1, 0])


def test_an_episode_in_which_nothing_was_sampled_has_no_row():
    episode = Episode("e", 0, TASK, [context(0, -1, [3])], failure="the agent never asked")
    check_episode(episode)
    assert (episode.rows(), episode.response_text, episode.is_truncated) == ([], "", False)


def test_a_row_that_trains_a_shared_token_again_is_noticed(monkeypatch):
    """Injected fault: every path masks all its own turns."""

    def careless(episode: Episode) -> list[Trajectory]:
        rows = build_rows(episode)
        rows[1].response_mask = [1, 1, *rows[1].response_mask[2:]]
        rows[1].rollout_log_probs = [-1.0, -1.001, *rows[1].rollout_log_probs[2:]]
        return rows

    monkeypatch.setattr(episode_records, "build_rows", careless)
    episode = _branched()
    with pytest.raises(AssertionError):
        check_rows(episode, episode.rows())


def _broken(place: int, **values) -> Episode:
    episode = _branched()
    for name, value in values.items():
        setattr(episode.nodes[place], name, value)
    return episode


@pytest.mark.parametrize(
    ("episode", "message"),
    [
        (_broken(2, parent=3), "node 2: its parent 3 does not precede it"),
        (_broken(2, node_id=7), "node 2: its node_id is 7"),
        (_broken(1, log_probs=[-1.0]), "node 1: 1 log_probs for 2 tokens"),
        (_broken(1, weight_versions=[]), "node 1: 0 weight_versions for 2 tokens"),
        (_broken(1, finish_reason="abort"), "node 1: finish_reason is 'abort'"),
        (_broken(1, parent=-1), "node 1: a sampled turn has a context before it"),
        (_broken(1, messages=[]), "node 1: a sampled turn is one message, not 0"),
        (_broken(5, token_ids=[]), "node 5: a sampled turn has at least one token"),
        (_broken(5, routed_experts=np.zeros((4, 2, 2), np.int32)), "node 5: routes of 4 positions; 5 come after"),
        (_broken(2, log_probs=[0.0]), "node 2: a context node has no log-probs"),
        (_broken(6, parent=3, token_ids=[]), "node 6: follows a turn that ended by length"),
        (_broken(4, kind="tool"), "node 4: kind is 'tool'"),
        (
            Episode("e", 0, TASK, [context(0, -1, [3])], reward=1.0),
            "has a reward and no sampled turn",
        ),
    ],
)
def test_trees_that_no_recorder_makes_are_refused(episode, message):
    with pytest.raises(ValueError, match=message):
        check_episode(episode)

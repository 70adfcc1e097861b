"""The trainer's difference of each token: kept by node, for the tokens that it was measured of, and gone with its step."""

import numpy as np
import pytest
from episode_trees import context, sampled
from test_journal import make_group

from gspo_mega.base.episodes import Episode, Group, RolloutBatch
from gspo_mega.base.errors import JournalError
from gspo_mega.base.records import Prompt
from gspo_mega.data.journal.journal import Journal
from gspo_mega.data.journal.steps import TokenGaps, token_gaps_file, write_token_gaps


def part(*triples):
    rows, places, gaps = zip(*triples, strict=True)
    return {"rows": np.array(rows, np.int32), "places": np.array(places, np.int32), "gaps": np.array(gaps, np.float16)}


def tree():
    """Two branches behind the same first turn: the second row has its tokens, too, and does not train them."""
    prompt = Prompt("train:0", "train", (1, 2), "1 + 1", answer="2")
    nodes = [context(0, -1, [1, 2]), sampled(1, 0, [10, 11]), context(2, 1, [3]), sampled(3, 2, [12])]
    nodes += [context(4, 1, [4, 5]), sampled(5, 4, [13, 14])]
    return Episode("step000000-g00000-s000", 0, prompt, nodes, reward=1.0)


def test_parts_of_ranks_come_back_by_node(tmp_path):
    episode, other = tree(), make_group(1, size=1)
    first, second = episode.rows()
    assert first.response_token_ids == [10, 11, 3, 12] and second.response_mask == [0, 0, 0, 0, 1, 1]
    batch = RolloutBatch(4, [Group(0, episode.prompt, [episode]), other])
    parts = [part((0, 2, 0.5), (0, 5, -0.25), (1, 7, 2e-6)), part((1, 6, 1.0), (2, 3, 0.125), (2, 4, 0.0))]
    write_token_gaps(tmp_path, batch, parts)
    found = TokenGaps(tmp_path, 4)
    values = {node: gaps.tolist() for node, gaps in found.of(episode).items()}
    assert values[1][0] == 0.5 and np.isnan(values[1][1]), "a token that no rank measured"
    assert values[3] == [-0.25] and values[5] == [1.0, pytest.approx(2e-6, rel=0.02)]
    assert found.of(other.episodes[0])[1].tolist() == [0.125, 0.0]
    episode.nodes[3].token_ids = [99]
    assert found.of(episode) == {}, "the step was sampled again"
    assert TokenGaps(tmp_path, 5).of(other.episodes[0]) == {}


def test_an_empty_batch(tmp_path):
    write_token_gaps(tmp_path, RolloutBatch(0, []), [])
    assert TokenGaps(tmp_path, 0).of(tree()) == {}


def test_they_go_with_their_step(tmp_path):
    journal = Journal(tmp_path)
    for step in (0, 1):
        group = make_group(step)
        with journal.begin(step, step, 2, {step: group}) as writer:
            writer.finish(RolloutBatch(step, [group]), {})
        write_token_gaps(tmp_path, RolloutBatch(step, [group]), [])
    journal.prune(1)
    assert journal.steps() == [1]
    assert not token_gaps_file(tmp_path, 0).exists() and token_gaps_file(tmp_path, 1).exists()


def test_a_folder_that_is_gone_is_named(tmp_path):
    with pytest.raises(JournalError, match=r"step_00000004\.gaps: cannot be written: No such file"):
        write_token_gaps(tmp_path / "gone", RolloutBatch(4, [make_group(1)]), [])

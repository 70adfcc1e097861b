"""The sets of kept tokens on their way from an episode's turns into a pack, a journal and a rank."""

from __future__ import annotations

import numpy as np
import pytest

from gspo_mega.base.episodes import Episode, Group, Node, RolloutBatch, check_episode, one_turn_episode
from gspo_mega.base.errors import RolloutError
from gspo_mega.base.records import MicroBatch, Prompt
from gspo_mega.base.sampling_masks import SamplingMasks
from gspo_mega.data.journal.journal import Journal
from gspo_mega.data.packing import build_micro_batch
from gspo_mega.train.batches import MiniBatch, has_masks
from gspo_mega.train.scatter import decode, encode

PROMPT = Prompt("p:0", "p", (1, 2), "text")


def turns() -> Episode:
    """Two turns on one path, and a branch that shares the first."""
    first, second, third = (
        SamplingMasks.of([[5, 9], [6]]),
        SamplingMasks.of([[7, 300]]),
        SamplingMasks.of([[8], [2, 9]]),
    )

    def said(node_id, parent, tokens, masks):
        message = [{"role": "assistant", "content": ""}]
        values = ([-0.5] * len(tokens), [0] * len(tokens))
        return Node(node_id, parent, "sampled", message, tokens, *values, None, "stop", sampling_masks=masks)

    nodes = [
        Node(0, -1, "context", [], [1, 2]),
        said(1, 0, [5, 6], first),
        Node(2, 1, "context", [], [3, 3, 3]),
        said(3, 2, [7], second),
        Node(4, 1, "context", [], [4], cause="edited"),
        said(5, 4, [8, 9], third),
    ]
    return Episode("e", 0, PROMPT, nodes)


def sets_of(masks: SamplingMasks) -> list[list[int]]:
    return [part.tolist() for part in np.split(masks.ids(), np.cumsum(masks.counts)[:-1])]


def test_rows_have_the_sets_of_the_turns_that_they_train():
    episode = turns()
    check_episode(episode)
    first, second = episode.rows()
    assert sets_of(first.sampling_masks) == [[5, 9], [6], [], [], [], [7, 300]]
    assert sets_of(second.sampling_masks) == [[], [], [], [8], [2, 9]]  # the shared turn is trained in the first row
    assert [sets_of(row.sampling_masks) for row in episode.by_turn().rows()] == [
        [[5, 9], [6]],
        [[7, 300]],
        [[8], [2, 9]],
    ]
    episode.nodes[3].sampling_masks = None
    with pytest.raises(ValueError, match="only some of its turns"):
        Episode("e", 0, PROMPT, episode.nodes).rows()


@pytest.mark.parametrize(
    ("node", "masks", "match"),
    [(0, SamplingMasks.none(2), "masks or finish"), (1, SamplingMasks.of([[5]]), "1 sampling")],
)
def test_a_tree_with_other_masks_than_tokens_is_refused(node, masks, match):
    episode = turns()
    episode.nodes[node].sampling_masks = masks
    with pytest.raises(ValueError, match=match):
        check_episode(episode)


def test_an_episode_of_a_row_has_its_masks_and_a_batch_forgets_them():
    masks = SamplingMasks.of([[5, 9], [6, 1]])
    row = one_turn_episode("s", 0, PROMPT, [5, 6], [-0.5] * 2, [0, 0], "stop", sampling_masks=masks).rows()[0]
    again = Episode.from_row(row)
    assert row.sampling_masks == masks == again.nodes[1].sampling_masks
    row.response_mask, row.response_token_ids = [1, 0], [5, 6]
    assert Episode.from_row(row).nodes[1].sampling_masks == masks.between(0, 1)
    batch = RolloutBatch(0, [Group(0, PROMPT, [again])])
    batch.drop_routes()
    assert again.nodes[1].sampling_masks is None and row.sampling_masks is None


def journal_of(folder, episode: Episode) -> Journal:
    journal = Journal(folder)
    episode.reward = 1.0
    with journal.begin(0, 0, 1, {}) as writer:
        writer.add(episode)
        writer.finish(RolloutBatch(0, [Group(0, PROMPT, [episode])]), {})
    return journal


def test_the_journal_keeps_them_until_they_are_pruned(tmp_path):
    episode = turns()
    journal = journal_of(tmp_path, episode)
    read = journal.read(0).batch.episodes[0]
    assert [n.sampling_masks for n in read.nodes] == [n.sampling_masks for n in episode.nodes]
    assert read == episode
    size = journal.file(0).stat().st_size
    journal.prune_routes(1)
    assert journal.has_pruned_routes(0) and journal.file(0).stat().st_size < size
    (pruned,) = journal.read(0).batch.episodes
    assert all(n.sampling_masks is None for n in pruned.nodes) and pruned.rows()[0].sampling_masks is None


def record(prompt, tokens, mask, sets) -> dict:
    return dict(
        prompt_token_ids=prompt,
        response_token_ids=tokens,
        response_mask=mask,
        rollout_log_probs=[-1.0] * len(tokens),
        sampling_masks=None if sets is None else SamplingMasks.of(sets),
    )


def masks_of(pack: MicroBatch) -> list[list[int]]:
    return sets_of(SamplingMasks(pack.mask_counts, pack.mask_codes))


def test_a_pack_has_each_set_where_its_token_is_the_label():
    records = [
        record([1, 2, 3], [7, 8], [1, 1], [[7, 9], [8]]),
        record([4], [5, 6, 5], [0, 1, 0], [[5], [6, 400], [5, 1]]),  # masked tokens leave their sets out
        record([4, 4], [5], [0], None),
    ]
    pack = build_micro_batch(records, [1, 0, 2], 4, pack_multiple=16, with_masks=True)
    assert pack.labels.tolist() == [5, 6, 5, 0, 2, 3, 7, 8, 0, 0, 0, 0, 4, 5, 0, 0]
    assert masks_of(pack) == [[], [6, 400], [], [], [], [], [7, 9], [8], [], [], [], [], [], [], [], []]
    assert (pack.mask_counts > 0).tolist() == (pack.loss_mask > 0).tolist()
    filler = build_micro_batch(records, [], 4, pack_multiple=8, with_masks=True)
    assert len(filler.mask_counts) == filler.num_tokens == 8 and filler.mask_codes.size == 0
    assert build_micro_batch(records, [0], 4).mask_counts is None


def test_a_pack_is_the_same_after_its_way_to_a_rank():
    pack = build_micro_batch([record([1, 2], [7, 8], [1, 1], [[7, 900], [8]])], [0], 4, with_masks=True)
    (got,) = MiniBatch.from_wire(decode(encode(MiniBatch(1.0, [pack]).to_wire()))).micro_batches
    assert masks_of(got) == [[], [7, 900], [8], []]


def test_rows_without_masks_are_refused_where_others_or_the_run_have_them():
    def rows(*masks):
        return [
            one_turn_episode(f"s{i}", 0, PROMPT, [5], [-0.5], [0], "stop", sampling_masks=one).rows()[0]
            for i, one in enumerate(masks)
        ]

    some = SamplingMasks.of([[5, 6]])
    assert has_masks(rows(some, some), [1, 1], True) and has_masks(rows(some), [1], False)
    assert not has_masks(rows(None, None), [1, 1], False) and has_masks(rows(None, some), [0, 1], True)
    with pytest.raises(RolloutError, match=r"trajectory s1 has no sampling masks, and 1 others of its batch have"):
        has_masks(rows(some, None), [1, 1], False)
    with pytest.raises(RolloutError, match=r"s0 has no sampling masks, which `rollout\.top_k` asks"):
        has_masks(rows(None), [1], True)

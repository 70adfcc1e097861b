"""Episodes of several turns and branches to shards: every sampled token once, whole episodes in a mini-batch, weights,
and the advantage of every token against plain loops over the tree.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict

import numpy as np
import pytest
from episode_oracle import turn_credit
from episode_trees import context, episodes, sampled
from hypothesis import given, settings
from hypothesis import strategies as st
from run_configs import make_config
from test_assemble import make_batch

from gspo_mega.base.episodes import Episode, Group, RolloutBatch
from gspo_mega.base.records import Prompt
from gspo_mega.config.derived import least_of_group
from gspo_mega.plan.layout import Layout
from gspo_mega.train.batches import MiniBatch, assemble, fill_advantages, fill_turn_advantages, scored_batch
from gspo_mega.train.scatter import decode, encode

LAYOUT = Layout(
    world_size=2,
    tensor=1,
    pipeline=1,
    virtual_pipeline=None,
    context=1,
    data=2,
    expert=1,
    expert_tensor=1,
    expert_data=2,
    sequence_parallel=False,
    stage_layers=(2,),
    padded_vocab_size=512,
    sequence_multiple_tokens=1,
    pack_multiple_tokens=1,
    mini_batch_sequences=(8, 8),
    attention_crossover_tokens=8192,
    equal_packs=False,
)


def config_of(**sections):
    batch = dict(prompts_per_step=4, group_size=4, num_mini_batches=2, micro_batch_tokens=256)
    return make_config(**{"batch": batch, **sections})


def by_turn(**sections):
    return config_of(algorithm="gspo_token", advantage=dict(turns="return_to_go"), **sections)


@st.composite
def batches(draw) -> RolloutBatch:
    groups, number = [], 0
    for group_id in range(draw(st.integers(1, 3))):
        members = []
        for _ in range(draw(st.integers(2, 4))):
            one = draw(episodes(most_nodes=8, with_routes=False))
            for node in one.turns:
                node.reward = None if node.reward is None else round(node.reward, 2)
            members.append(
                dataclasses.replace(one, episode_id=f"e{number}", group_id=group_id, reward=round(one.reward, 2))
            )
            number += 1
        groups.append(Group(group_id, members[0].prompt, members))
    return RolloutBatch(0, groups)


def packed_rows(shards: list[list[MiniBatch]]):
    """(mini-batch, row of the batch, its tokens, labels, mask, values of the sequence, token advantages)."""
    for shard in shards:
        for m, mini_batch in enumerate(shard):
            for pack in mini_batch.micro_batches:
                for s, row in enumerate(pack.trajectory_index.tolist()):
                    span = slice(int(pack.cu_seqlens[s]), int(pack.cu_seqlens[s + 1]))
                    values = {name: column[s] for name, column in pack.sequence.items()}
                    credit_of = None if pack.token_advantages is None else pack.token_advantages[span]
                    if row < 0:
                        assert not pack.loss_mask[span].any() and (credit_of is None or not credit_of.any())
                    else:
                        yield (
                            m,
                            row,
                            pack.token_ids[span],
                            pack.labels[span],
                            pack.loss_mask[span] > 0,
                            values,
                            credit_of,
                        )


@settings(deadline=None, max_examples=40)
@given(batch=batches(), scope=st.sampled_from(["trajectory", "turn"]), credit=st.booleans())
def test_every_sampled_token_is_trained_once_with_its_turns_advantage(batch, scope, credit):
    make = by_turn if credit else config_of
    config = make(objective=dict(scope=scope))
    trained = scored_batch(batch, least_of_group(config), config.objective.scope)
    fill_advantages(trained, config, 0)
    shards = assemble(trained, config, LAYOUT, 0)
    rows, numbers = trained.trajectories, [i for i, e in enumerate(trained.episodes) for _ in e.rows()]
    advantage_of = turn_credit(trained) if credit else None

    seen: dict[int, Counter] = defaultdict(Counter)
    mini_batch_of, weights = defaultdict(set), defaultdict(float)
    for m, row, tokens, labels, active, values, credit_of in packed_rows(shards):
        episode = trained.episodes[numbers[row]]
        mini_batch_of[numbers[row]].add(m)
        weights[numbers[row]] += values["weight"]
        assert values["length"] == active.sum() and values["group_size"] >= 1
        # The whole path up to a sampled token is what precedes it.
        path = [*rows[row].prompt.token_ids, *rows[row].response_token_ids]
        assert tokens[: len(path)].tolist() == path
        for (start, end), node_id in zip(rows[row].turns, rows[row].turn_nodes, strict=True):
            first = len(rows[row].prompt.token_ids) + start - 1
            node = episode.nodes[node_id]
            assert labels[first : first + end - start].tolist() == node.token_ids
            assert active[first : first + end - start].all()
            assert path[: first + 1] == episode.tokens(node.parent)
            seen[numbers[row]][node_id] += 1
            if credit_of is not None:
                want = advantage_of[numbers[row], node_id]
                np.testing.assert_allclose(credit_of[first : first + end - start], want, rtol=1e-9, atol=1e-9)
        assert active.sum() == sum(end - start for start, end in rows[row].turns)
        assert scope == "trajectory" or len(rows[row].turns) == 1
        if credit:
            assert credit_of is not None and not credit_of[~active].any()
        else:
            assert credit_of is None
    for number, episode in enumerate(trained.episodes):
        assert seen[number] == Counter(node.node_id for node in episode.turns)
        assert len(mini_batch_of[number]) == 1, "branches of an episode are in one mini-batch"
        assert weights[number] == pytest.approx(1, abs=1e-12)
    for m, mini_batch in enumerate(shards[0]):
        members = {number for number, of in mini_batch_of.items() if of == {m}}
        assert mini_batch.denominator == len(members), "episodes are counted, not rows"
        assert members


def two_branches(episode_id: str, group_id: int, reward: float) -> Episode:
    """Root - turn 1 of 3 tokens - turn 3 of 1 token, and beside turn 1 a second branch from the root: turn 4 of 2."""
    nodes = [
        context(0, -1, [3, 1, 4]),
        sampled(1, 0, [11, 12, 13], reward=0.5),
        context(2, 1, [5, 6]),
        sampled(3, 2, [14]),
        sampled(4, 0, [15, 16], cause="resampled"),
    ]
    return Episode(episode_id, group_id, Prompt("t:0", "t", (3, 1, 4), ""), nodes, reward=reward)


def one_turn(episode_id: str, group_id: int, reward: float) -> Episode:
    nodes = [context(0, -1, [3, 1, 4]), sampled(1, 0, [21, 22])]
    return Episode(episode_id, group_id, Prompt("t:0", "t", (3, 1, 4), ""), nodes, reward=reward)


def hand_made() -> RolloutBatch:
    return RolloutBatch(
        0, [Group(0, Prompt("t:0", "t", (3, 1, 4), ""), [two_branches("a", 0, 1.0), one_turn("b", 0, 0.0)])]
    )


def test_weights_and_advantages_by_hand():
    batch, config = hand_made(), by_turn(batch=dict(prompts_per_step=1, group_size=2, num_mini_batches=1))
    fill_advantages(batch, config, 0)
    # R: turn 3 has the final reward .5, so has turn 4; turn 1 its own .5 and turn 3's .5. Episode a: 3/6 R=1, 3/6 R=.5.
    # mu = (.75 + 0) / 2 = .375; sigma^2 = ((.5 * .625^2 + .5 * .125^2) + .375^2) / 2 = .171875
    sd = 0.171875**0.5
    a, b = batch.episodes
    assert [row.weight for row in a.rows()] == [4 / 6, 2 / 6] and [row.weight for row in b.rows()] == [1.0]
    first, second = a.rows()
    np.testing.assert_allclose(first.token_advantages, [0.625 / sd] * 3 + [0, 0] + [0.125 / sd], rtol=1e-12)
    np.testing.assert_allclose(second.token_advantages, [0.125 / sd] * 2, rtol=1e-12)
    np.testing.assert_allclose(b.rows()[0].token_advantages, [-0.375 / sd] * 2, rtol=1e-12)
    assert first.advantage == pytest.approx((3 * 0.625 + 0.125) / 4 / sd)
    (mini_batch,) = assemble(batch, config, LAYOUT, 0)[0]
    assert mini_batch.denominator == 2


def test_the_control_leaves_rewards_of_turns_out():
    batch = hand_made()
    reward = dict(functions=(dict(function="exact_match"),), permute_in_batch=True)
    config = by_turn(reward=reward)
    fill_turn_advantages(batch.episodes, [0.0, 1.0], config.reward, config.advantage)
    assert {a for row in batch.episodes[0].rows() for a in row.token_advantages} == {-1.0, 0.0}
    assert set(batch.episodes[1].rows()[0].token_advantages) == {1.0}


def wire_of(shards):
    return [[mini_batch.to_wire() for mini_batch in shard] for shard in shards]


@pytest.mark.parametrize("sections", [dict(objective=dict(scope="turn")), {}])
def test_episodes_of_one_turn_are_packed_as_rows_whatever_the_scope(sections):
    plain, other = (make_batch([4, 3, 4], np.random.default_rng(3)) for _ in range(2))
    config = config_of()
    fill_advantages(plain, config, 0)
    changed = config_of(**sections)
    trained = scored_batch(other, least_of_group(changed), changed.objective.scope)
    fill_advantages(trained, changed, 0)
    one, two = (encode(wire_of(assemble(b, config, LAYOUT, 0))) for b in (plain, trained))
    assert one.tobytes() == two.tobytes()
    for _, _, _, _, _, values, credit_of in packed_rows(assemble(plain, config, LAYOUT, 0)):
        assert values["weight"] == 1.0 and credit_of is None


def test_token_advantages_survive_the_wire():
    batch, config = hand_made(), by_turn(batch=dict(prompts_per_step=1, group_size=2, num_mini_batches=1))
    fill_advantages(batch, config, 0)
    wire = wire_of(assemble(batch, config, LAYOUT, 0))
    back = [[MiniBatch.from_wire(m) for m in decode(encode(shard))] for shard in wire]
    packs = [pack for rank in back for m in rank for pack in m.micro_batches]
    assert sum(float(np.abs(pack.token_advantages).sum()) for pack in packs) > 0
    assert all(pack.token_advantages.shape == pack.labels.shape for pack in packs)


def test_versions_are_in_the_packs_only_where_something_is_stale():
    config = config_of(batch=dict(prompts_per_step=1, group_size=2, num_mini_batches=1))

    def packs(versions: dict[tuple[str, int], int], weight_version: int | None):
        batch = hand_made()
        for episode in batch.episodes:
            for node in episode.turns:
                node.weight_versions = [versions.get((episode.episode_id, node.node_id), 3)] * len(node.token_ids)
        fill_advantages(batch, config, 0)
        shards = assemble(batch, config, LAYOUT, 0, weight_version=weight_version)
        return batch, [pack for shard in shards for m in shard for pack in m.micro_batches]

    for weight_version in (None, 3):  # the context's tokens have version 0, which nobody sampled
        assert all(pack.versions is None and pack.version_index is None for pack in packs({}, weight_version)[1])
    assert all(pack.versions.tolist() == [3] and not pack.version_index.any() for pack in packs({}, 4)[1])
    batch, mixed = packs({("a", 3): 5, ("b", 1): 4}, 5)
    rows = batch.trajectories
    for pack in mixed:
        assert pack.versions.tolist() == [3, 4, 5]
        for s, row in enumerate(pack.trajectory_index.tolist()):
            span = slice(int(pack.cu_seqlens[s]), int(pack.cu_seqlens[s + 1]))
            active = pack.loss_mask[span] > 0
            want = [v for v, mask in zip(rows[row].weight_versions, rows[row].response_mask, strict=True) if mask]
            assert row < 0 or pack.versions[pack.version_index[span][active]].tolist() == want
            assert not pack.version_index[span][~active].any()

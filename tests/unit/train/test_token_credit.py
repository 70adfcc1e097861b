"""What a critic's advantages are made of: a reward for every token, groups of one, and which rows were cut off."""

from __future__ import annotations

import numpy as np
import pytest
from episode_trees import context, sampled
from hypothesis import given, settings
from test_assemble import make_batch
from test_assemble_episodes import LAYOUT, batches, config_of

from gspo_mega.base.episodes import ENDED_BY_LIMIT, Episode, Group, RolloutBatch, leaf_ids
from gspo_mega.base.errors import RewardError
from gspo_mega.base.records import Prompt
from gspo_mega.config.derived import least_of_group
from gspo_mega.train.batches import MiniBatch, assemble, fill_advantages, scored_batch
from gspo_mega.train.scatter import decode, encode


def ppo(**sections):
    return config_of(algorithm="ppo", **sections)


@settings(deadline=None, max_examples=30)
@given(batch=batches())
def test_every_tokens_reward_against_a_loop_over_the_tree(batch):
    config = ppo()
    trained = scored_batch(batch, least_of_group(config), config.objective.scope)
    fill_advantages(trained, config, 0)
    for episode in trained.episodes:
        last = set(leaf_ids(episode.nodes))
        left = episode.reward - sum(node.reward or 0.0 for node in episode.turns)
        for row in episode.rows():
            wanted = np.zeros(len(row.response_token_ids))
            for (_, end), node_id in zip(row.turns, row.turn_nodes, strict=True):
                wanted[end - 1] = (episode.nodes[node_id].reward or 0.0) + (left if node_id in last else 0.0)
            np.testing.assert_allclose(row.token_rewards, wanted, atol=1e-12)
            assert row.advantage is None and row.token_advantages is None


def test_packs_carry_rewards_and_the_flag_of_rows_that_were_cut_off_through_a_message():
    config = ppo(critic=dict(aggregation="sequence_mean_token_mean"), objective=dict(aggregation="token_mean"))
    batch = scored_batch(make_batch([1, 3], np.random.default_rng(3)), least_of_group(config), config.objective.scope)
    assert [len(group.episodes) for group in batch.groups] == [1, 3], "a critic needs no second response"
    batch.trajectories[1].finish_reason = "length"
    batch.episodes[2].info[ENDED_BY_LIMIT] = "context_full"
    fill_advantages(batch, config, 0)
    cut, seen = {1, 2}, set()
    for shard in assemble(batch, config, LAYOUT, 0):
        for mini_batch in shard:
            again = MiniBatch.from_wire(decode(encode(mini_batch.to_wire())))
            assert again.value_denominator == mini_batch.value_denominator == 2.0
            assert again.denominator > 2, "the policy's average is over tokens"
            for pack in again.micro_batches:
                assert not pack.token_rewards[pack.loss_mask == 0].any()
                for s, row in enumerate(pack.trajectory_index.tolist()):
                    assert pack.sequence["truncated"][s] == float(row in cut)
                    if row >= 0:
                        span = slice(int(pack.cu_seqlens[s]), int(pack.cu_seqlens[s + 1]))
                        rewards = pack.token_rewards[span][pack.loss_mask[span] > 0]
                        assert rewards[-1] == batch.trajectories[row].reward and not rewards[:-1].any()
                        seen.add(row)
    assert seen == {0, 1, 2, 3}


def test_permuted_rewards_leave_the_turns_own_out():
    prompt = Prompt("s:0", "s", (1, 2), "text")
    nodes = [context(0, -1, (1, 2)), sampled(1, 0, (5, 6)), context(2, 1, (3,)), sampled(3, 2, (7,))]
    nodes[1].reward = 0.25
    episode = Episode("e", 0, prompt, nodes, reward=1.0)
    batch = RolloutBatch(0, [Group(0, prompt, [episode])])
    for permuted, wanted in ((False, [0.0, 0.25, 0.0, 0.75]), (True, [0.0, 0.0, 0.0, 1.0])):
        config = ppo(reward=dict(permute_in_batch=permuted))
        fill_advantages(scored_batch(batch, least_of_group(config), config.objective.scope), config, 0)
        assert episode.rows()[0].token_rewards == wanted


def test_a_batch_without_any_reward_is_named_with_a_critic_too():
    batch = make_batch([2], np.random.default_rng(0))
    for row in batch.trajectories:
        row.reward, row.reward_error = None, "the scorer failed"
    for episode in batch.episodes:
        episode.reward, episode.reward_error = None, "the scorer failed"
    with pytest.raises(RewardError, match="no group of its rollout batch has a reward. The first"):
        scored_batch(batch, 1, "trajectory")


def test_without_a_critic_packs_carry_neither():
    config = config_of()
    batch = scored_batch(make_batch([4], np.random.default_rng(0)), least_of_group(config), config.objective.scope)
    fill_advantages(batch, config, 0)
    for shard in assemble(batch, config, LAYOUT, 0):
        for mini_batch in shard:
            assert mini_batch.value_denominator == 0.0
            assert all(m.token_rewards is None and "truncated" not in m.sequence for m in mini_batch.micro_batches)

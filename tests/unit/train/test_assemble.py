"""Rollout batch to shards: every trajectory once, global denominators, advantages by group."""

import json
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_configs import make_config

from gspo_mega.base.episodes import Group, RolloutBatch, one_turn_row
from gspo_mega.base.errors import RewardError
from gspo_mega.base.records import Prompt
from gspo_mega.config.derived import least_of_group
from gspo_mega.config.schema import Config
from gspo_mega.data.demonstrations import DemonstratedRow, Demonstration
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.plan import resolve_layout
from gspo_mega.train.batches import MiniBatch, assemble, assemble_supervised, fill_advantages, scored_batch
from gspo_mega.train.scatter import decode, encode

SHAPE = dict(
    architectures=["Qwen3ForCausalLM"],
    model_type="qwen3",
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=64,
    max_position_embeddings=256,
    rope_theta=1e4,
    rms_norm_eps=1e-6,
    hidden_act="silu",
    tie_word_embeddings=False,
    attention_bias=False,
    eos_token_id=2,
    dtype="float32",
)


def two_mini_batches(**sections) -> Config:
    return make_config(
        **{
            "batch": dict(prompts_per_step=4, group_size=4, num_mini_batches=2, micro_batch_tokens=128),
            "data": dict(max_prompt_tokens=16),
            "rollout": dict(max_new_tokens=32),
            **sections,
        }
    )


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shape")
    (folder / "config.json").write_text(json.dumps(SHAPE))
    return read_model_spec(folder)


def make_batch(sizes: list[int], rng: np.random.Generator) -> RolloutBatch:
    groups = []
    for group_id, size in enumerate(sizes):
        prompt = Prompt(f"s:{group_id}", "s", tuple(range(1, int(rng.integers(2, 9)))), "text")
        rows = []
        for sample in range(size):
            length = int(rng.integers(1, 30))
            rows.append(
                one_turn_row(
                    f"{group_id}-{sample}",
                    group_id,
                    prompt,
                    [int(t) for t in rng.integers(3, 64, length)],
                    [1] * length,
                    [float(x) for x in rng.normal(-3, 1, length)],
                    [0] * length,
                    "stop",
                    reward=float(rng.integers(0, 2)),
                )
            )
        groups.append(Group.from_rows(group_id, prompt, rows))
    return RolloutBatch(0, groups)


@settings(deadline=None, max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    ranks=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 10_000),
)
def test_every_trajectory_reaches_one_rank_once(spec, sizes, ranks, seed):
    config = two_mini_batches(cluster=dict(ranks_per_node=ranks))
    layout = resolve_layout(config, spec)
    batch = make_batch(sizes, np.random.default_rng(seed))
    fill_advantages(batch, config, 0)
    shards = assemble(batch, config, layout, 0)
    trajectories = batch.trajectories
    num_mini_batches = min(2, len(trajectories))
    assert [len(s) for s in shards] == [num_mini_batches] * ranks

    seen: Counter[int] = Counter()
    for m in range(num_mini_batches):
        parts = [shard[m] for shard in shards]
        assert len({len(p.micro_batches) for p in parts}) == 1, "ranks run different numbers of micro-batches"
        assert len({p.denominator for p in parts}) == 1
        rows = [int(r) for p in parts for b in p.micro_batches for r in b.trajectory_index if r >= 0]
        assert parts[0].denominator == len(rows)
        seen.update(rows)
        for part in parts:
            for pack in part.micro_batches:
                check_pack(pack, trajectories)
    assert seen == Counter(range(len(trajectories)))


def check_pack(pack, trajectories):
    for s, row in enumerate(pack.trajectory_index.tolist()):
        span = slice(int(pack.cu_seqlens[s]), int(pack.cu_seqlens[s + 1]))
        active = pack.loss_mask[span] > 0
        if row < 0:
            assert not active.any()
            continue
        t = trajectories[row]
        assert pack.labels[span][active].tolist() == t.response_token_ids
        assert np.allclose(pack.rollout_log_probs[span][active], t.rollout_log_probs)
        assert pack.sequence["advantage"][s] == t.advantage
        assert pack.sequence["length"][s] == t.num_response_tokens


def test_advantages_are_by_group_and_known(spec):
    config = two_mini_batches()
    batch = make_batch([4, 2, 1], np.random.default_rng(0))
    for episode, reward in zip(batch.episodes, [1, 0, 0, 0, 1, 1, 1]):
        episode.reward = float(reward)
    fill_advantages(batch, config, 0)
    got = [t.advantage for t in batch.trajectories]
    # mean 1/4, population variance 3/16
    assert np.allclose(got, [math.sqrt(3), *[-1 / math.sqrt(3)] * 3, 0, 0, 0], rtol=1e-12)


@pytest.mark.parametrize("aggregation", ["sequence_mean_token_mean", "token_mean", "group_mean_token_mean"])
def test_a_failed_scoring_is_trained_on_as_if_it_had_not_been_sampled(spec, aggregation):
    """Seven rewards of -1 and a crash are a constant group; the crash is in no statistic, no pack and no
    denominator.
    """
    config = two_mini_batches(
        algorithm="custom",
        objective=dict(ratio="sequence", aggregation=aggregation),
        batch=dict(prompts_per_step=3, group_size=8, num_mini_batches=1, micro_batch_tokens=128),
    )
    layout = resolve_layout(config, spec)
    with_failures, without = (make_batch([8, 3, 2], np.random.default_rng(5)) for _ in range(2))
    for batch in (with_failures, without):
        for episode, reward in zip(batch.episodes, [-1] * 8 + [0, 1, 0, 1, 0]):
            episode.reward = float(reward)
    failed = {"0-3", "1-2", "2-0"}  # of the last group one is left: nothing to compare it with
    for episode in with_failures.episodes:
        if episode.episode_id in failed:
            episode.reward, episode.reward_error = None, "judge: the scoring process ended (signal SIGSEGV)"
    without.groups.pop()
    for group in without.groups:
        group.episodes = [episode for episode in group.episodes if episode.episode_id not in failed]
    trained = scored_batch(with_failures, least_of_group(config), config.objective.scope)
    assert [len(g.trajectories) for g in trained.groups] == [7, 2] and len(with_failures.trajectories) == 13
    for batch in (trained, without):
        fill_advantages(batch, config, 0)
    assert [t.advantage for t in trained.trajectories] == [0.0] * 7 + [-1.0, 1.0]
    one, other = (encode(wire_of(assemble(batch, config, layout, 0))) for batch in (trained, without))
    assert one.tobytes() == other.tobytes(), "shards and denominators, to the bit"


def test_a_batch_without_rewards_is_refused():
    batch = make_batch([2, 2], np.random.default_rng(6))
    for episode in batch.episodes[1:]:
        episode.reward_error = "judge: it hung"  # as an older record has it: with a reward of 0
    with pytest.raises(
        RewardError, match=r"step 1: no group of its rollout batch has two rewards.*\n  0-1 .s:0.: judge: it hung"
    ):
        scored_batch(batch, 2, "trajectory")


def test_permuted_rewards_keep_the_batch_and_lose_the_trajectory(spec):
    plain, control = (
        two_mini_batches(),
        two_mini_batches(reward=dict(functions=(dict(function="exact_match"),), permute_in_batch=True)),
    )
    batch = make_batch([8] * 8, np.random.default_rng(1))
    fill_advantages(batch, plain, 3)
    honest = np.array([t.advantage for t in batch.trajectories])
    fill_advantages(batch, control, 3)
    dealt = np.array([t.advantage for t in batch.trajectories])
    assert not np.allclose(honest, dealt)
    assert abs(np.corrcoef(honest, dealt)[0, 1]) < 0.5
    again = [t.advantage for t in batch.trajectories]
    fill_advantages(batch, control, 3)
    assert again == [t.advantage for t in batch.trajectories], "the control is not reproducible"
    assert [t.reward for t in batch.trajectories] == [t.reward for t in batch.trajectories]


@pytest.mark.parametrize(
    ("aggregation", "expected"), [("sequence_mean_token_mean", 3), ("token_mean", 6), ("group_mean_token_mean", 2)]
)
def test_denominator_counts_what_the_aggregation_averages_over(spec, aggregation, expected):
    config = two_mini_batches(
        algorithm="custom",
        objective=dict(ratio="sequence", aggregation=aggregation),
        batch=dict(prompts_per_step=2, group_size=2, num_mini_batches=1, micro_batch_tokens=128),
    )
    batch = make_batch([2, 2], np.random.default_rng(2))
    for t, mask in zip(batch.trajectories, [[1, 1], [0, 0], [1, 0, 1], [1, 1]]):
        t.response_mask, t.response_token_ids = mask, [5] * len(mask)
        t.rollout_log_probs, t.weight_versions = [-1.0] * len(mask), [0] * len(mask)
    fill_advantages(batch, config, 0)
    (shard,) = assemble(batch, config, resolve_layout(config, spec), 0)
    assert shard[0].denominator == expected
    sizes = {
        int(r): int(g) for b in shard[0].micro_batches for r, g in zip(b.trajectory_index, b.sequence["group_size"])
    }
    assert sizes == {0: 1, 1: 1, 2: 2, 3: 2}, "a fully masked trajectory counts in its group"


def wire_of(shards):
    return [[mini_batch.to_wire() for mini_batch in shard] for shard in shards]


def test_shards_survive_the_wire(spec):
    config = two_mini_batches(cluster=dict(ranks_per_node=4), parallel=dict(tensor=2))
    layout = resolve_layout(config, spec)
    batch = make_batch([4, 4], np.random.default_rng(3))
    fill_advantages(batch, config, 0)
    sent = assemble(batch, config, layout, 0)
    shards = [[MiniBatch.from_wire(m) for m in decode(encode(shard))] for shard in wire_of(sent)]
    index, wanted = (
        [[b.trajectory_index.tolist() for m in shard for b in m.micro_batches] for shard in both]
        for both in (shards, sent)
    )
    assert len(shards) == 2 and index == wanted and index[0] != index[1]
    assert all(b.token_ids.shape[0] % 2 == 0 for shard in shards for m in shard for b in m.micro_batches)


def test_supervised_batch_has_the_tokens_of_all_demonstrations_as_denominator(spec):
    config = two_mini_batches(cluster=dict(ranks_per_node=2))
    layout = resolve_layout(config, spec)
    demonstrations = [Demonstration.of_one_turn(f"d:{i}", (3, 4, 5), range(6, 8 + i)) for i in range(7)]
    shards = assemble_supervised(demonstrations, config.batch, config.run, layout, 0)
    tokens = sum(2 + i for i in range(7))
    assert [s[0].denominator for s in shards] == [tokens, tokens]
    assert sum(int(b.loss_mask.sum()) for s in shards for b in s[0].micro_batches) == tokens


def test_supervised_turns_are_learned_and_what_stands_between_them_is_not(spec):
    config = two_mini_batches(cluster=dict(ranks_per_node=2))
    layout = resolve_layout(config, spec)
    turns = DemonstratedRow((3, 4, 5), (6, 7, 8, 9, 10), (1, 1, 0, 0, 1))
    branch = DemonstratedRow((3, 4), (11, 12), (0, 1))
    demonstrations = [Demonstration("d:0", (turns, branch)), Demonstration.of_one_turn("d:1", (3,), (4, 5))]
    shards = assemble_supervised(demonstrations, config.batch, config.run, layout, 0)
    assert [s[0].denominator for s in shards] == [6.0, 6.0]
    packs = [b for s in shards for b in s[0].micro_batches]
    learned = sorted(int(label) for b in packs for label in b.labels[b.loss_mask > 0])
    assert learned == [4, 5, 6, 7, 10, 12]

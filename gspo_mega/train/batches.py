"""From a rollout batch to every rank's shard: advantages, mini-batches, packs, global denominators. Runs on rank 0,
which is the only rank that sees the whole batch. Uses no process group; `scatter.py` sends the shards.

The order of use is: `scored_batch` leaves out what has no reward, `fill_advantages` sets the advantages of the rows,
and `assemble` makes the mini-batches of every rank. `assemble_supervised` does the same for demonstrations.

A row is what is packed: a branch of an episode, or a turn. The rows of an episode are in one mini-batch, on any
data-parallel ranks, and statistics count episodes. `algorithm/advantages.py` has the mathematics; this file decides
which token gets which reward or advantage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from gspo_mega.algorithm.advantages import decoupled_advantages, group_advantages, token_rewards, turn_advantages
from gspo_mega.algorithm.covariance import trajectory_key
from gspo_mega.algorithm.hooks import AdvantageInputs, load_advantage, user_advantages
from gspo_mega.algorithm.objective import mini_batch_denominator
from gspo_mega.base.episodes import ENDED_BY_LIMIT, Episode, RolloutBatch, leaf_ids
from gspo_mega.base.errors import RewardError, RolloutError
from gspo_mega.base.records import MicroBatch, Trajectory
from gspo_mega.base.served_scores import ServedScores
from gspo_mega.config.derived import (
    REWARDS_NEEDED,
    critic_of,
    has_sampling_masks,
    has_served_teacher,
    leaves_out_by_covariance,
    num_served_top,
    teachers,
)
from gspo_mega.config.schema import Advantage, Batch, Config, Reward, Run
from gspo_mega.data.demonstrations import Demonstration
from gspo_mega.data.forest import SharePrefixes
from gspo_mega.data.packing import RankPlan, build_micro_batch, plan_rollout_batch, shareable_tokens
from gspo_mega.plan.layout import Layout


@dataclass
class MiniBatch:
    """One data-parallel rank's part of one optimizer step. The loss is divided by `denominator`, which is counted over
    all ranks; the loss of the critic, if there is one, by `value_denominator`. `num_repeated_prefixes`: how often a
    prompt is computed again because its rows are in several packs of the mini-batch, on all ranks; 0 unless packs share
    prefixes.
    """

    denominator: float
    micro_batches: list[MicroBatch]
    value_denominator: float = 0.0
    num_repeated_prefixes: int = 0

    def to_wire(self) -> dict[str, Any]:
        return {**vars(self), "micro_batches": [dict(vars(m)) for m in self.micro_batches]}

    @classmethod
    def from_wire(cls, value: dict[str, Any]) -> MiniBatch:
        return cls(**{**value, "micro_batches": [MicroBatch(**m) for m in value["micro_batches"]]})


def scored_batch(batch: RolloutBatch, least: int, scope: Literal["trajectory", "turn"]) -> RolloutBatch:
    """The part of a batch that a step trains on: the episodes with a reward, in groups of at least `least` of them
    (`least_of_group`). `scope`: `objective.scope`; their rows are their branches, or their turns.

    The other episodes enter no statistic of their group and no denominator. A failed scoring is not an outcome of the
    policy, unlike a response that the mismatch correction rejects; if it counted in the denominator, failures of the
    scorer would shrink the step. Raises RewardError if nothing is left.
    """
    scored = batch.scored(least)
    if not scored.groups:
        failed = [
            f"\n  {one.episode_id} ({one.prompt.prompt_id}): {one.reward_error}"
            for one in batch.episodes
            if not one.is_scored
        ]
        raise RewardError(
            f"step {batch.step + 1}: no group of its rollout batch has {REWARDS_NEEDED[least]}. The"
            f" first failures:{''.join(failed[:5])}"
        )
    return scored.by_turn() if scope == "turn" else scored


def fill_advantages(batch: RolloutBatch, config: Config, step: int) -> None:
    """Set `advantage` of every row of a scored batch from the rewards of its group's episodes (arXiv:2507.18071, Eq.
    6). With `advantage.turns: return_to_go` each row also gets `token_advantages`, and `advantage` is their mean. With
    a critic, the advantages need its values and are not known yet, so the rows get `token_rewards` instead.

    `reward.permute_in_batch` first shuffles the episodes' rewards over the whole batch, so that the policy cannot learn
    from them, as the control of an experiment. Rewards of turns are then left out.
    """
    episodes = batch.episodes
    order = np.arange(len(episodes))
    if config.reward.permute_in_batch:
        order = np.random.default_rng((config.run.seed, step)).permutation(order)
    rewards = np.array([episode.reward for episode in episodes], dtype=np.float64)[order]
    if critic_of(config.algorithm, config.critic) is not None:
        fill_token_rewards(episodes, rewards.tolist(), config.reward)
        return
    if config.advantage.turns == "return_to_go":
        fill_turn_advantages(episodes, rewards.tolist(), config.reward, config.advantage)
        return
    inputs = advantage_inputs(episodes, rewards, order, config.reward, step)
    if config.advantage.rewards == "separate":
        named = {name: inputs.weights[name] for name in inputs.weights if name in inputs.parts}
        advantages = decoupled_advantages(inputs.parts, named, inputs.group_ids, config.advantage.std_ddof)
    elif config.advantage.function is not None:
        advantages = user_advantages(load_advantage(config.advantage.function), inputs)
    else:
        advantages = group_advantages(
            torch.from_numpy(rewards),
            torch.tensor([episode.group_id for episode in episodes]),
            std_ddof=config.advantage.std_ddof,
            divide_by_std=config.advantage.divide_by_std,
            baseline=config.advantage.baseline,
            std_over=config.advantage.std_over,
        )
    for episode, advantage in zip(episodes, advantages.tolist(), strict=True):
        for row in episode.rows():
            row.advantage, row.token_advantages = advantage, None


def advantage_inputs(
    episodes: Sequence[Episode], rewards: np.ndarray, order: np.ndarray, reward: Reward, step: int
) -> AdvantageInputs:
    """What a function of the whole batch gets: `rewards` [N] float64 of the scored `episodes`, and what is known of
    them. `order` [N] int: whose rewards they are, as `reward.permute_in_batch` permutes them; the parts follow it.
    """
    names = dict.fromkeys(name for episode in episodes for name in episode.reward_parts)
    parts = {
        name: torch.tensor(
            [episodes[k].reward_parts.get(name, float("nan")) for k in order.tolist()], dtype=torch.float64
        )
        for name in names
    }
    return AdvantageInputs(
        rewards=torch.from_numpy(rewards),
        group_ids=torch.tensor([episode.group_id for episode in episodes], dtype=torch.int64),
        parts=parts,
        weights={one.name or one.function: one.weight for one in reward.functions},
        lengths=torch.tensor([episode.num_sampled_tokens for episode in episodes], dtype=torch.int64),
        step=step,
    )


def fill_token_rewards(episodes: Sequence[Episode], rewards: Sequence[float], reward: Reward) -> None:
    """Set `token_rewards` and `is_truncated` of every row of the scored `episodes`, and clear their `advantage`, which
    is not known yet. `rewards`: the total of each episode.

    A row is a path to one of the episode's ends. The last token of each turn that the row trains gets that turn's
    reward, and the last token of the row also gets the total less the rewards of all turns. With
    `reward.permute_in_batch` the totals are those of other episodes, and the turns have no rewards of their own.
    """
    for episode, total in zip(episodes, rewards, strict=True):
        given = {node.node_id: node.reward or 0.0 for node in episode.turns}
        if reward.permute_in_batch:
            given = dict.fromkeys(given, 0.0)
        left = total - sum(given.values())
        for row in episode.rows():
            row.advantage, row.token_advantages = None, None
            row.is_truncated = row.finish_reason == "length" or ENDED_BY_LIMIT in episode.info
            values = np.zeros(len(row.response_token_ids), np.float64)
            active = np.asarray(row.response_mask, bool)
            turns = [(end, node) for (start, end), node in zip(row.turns, row.turn_nodes, strict=True) if end > start]
            if turns:
                ends = [int(active[:end].sum()) for end, _ in turns]
                own = [given[node] for _, node in turns]
                own[-1] += left
                values[active] = token_rewards(int(active.sum()), ends, own).numpy()
            row.token_rewards = values.tolist()


def fill_turn_advantages(
    episodes: Sequence[Episode], rewards: Sequence[float], reward: Reward, advantage: Advantage
) -> None:
    """Set `token_advantages` of every row of the scored `episodes`, and `advantage` to their mean over the row's own
    tokens, or to 0 if the row has none. `rewards`: the total of each episode.

    The total less the rewards of all turns belongs to the last turn of every branch. With
    `reward.permute_in_batch` the totals are those of other episodes, and the turns have no rewards of their own.
    """
    own_rewards: list[float] = []
    parents: list[int] = []
    places: list[dict[int, int]] = []  # for each episode, the index of its turns by node id
    owners: list[int] = []
    for number, (episode, total) in enumerate(zip(episodes, rewards, strict=True)):
        place_of = {node.node_id: len(own_rewards) + k for k, node in enumerate(episode.turns)}
        given = {node.node_id: node.reward or 0.0 for node in episode.turns}
        if reward.permute_in_batch:
            given = dict.fromkeys(given, 0.0)
        left = total - sum(given.values())
        last = set(leaf_ids(episode.nodes))
        for node in episode.turns:
            above = node.parent
            while above >= 0 and above not in place_of:
                above = episode.nodes[above].parent
            parents.append(place_of[above] if above >= 0 else -1)
            own_rewards.append(given[node.node_id] + (left if node.node_id in last else 0.0))
            owners.append(number)
        places.append(place_of)
    advantages = turn_advantages(
        torch.tensor(own_rewards, dtype=torch.float64),
        parents=torch.tensor(parents, dtype=torch.int64),
        episode_ids=torch.tensor(owners, dtype=torch.int64),
        group_ids=torch.tensor([episodes[owner].group_id for owner in owners], dtype=torch.int64),
        num_tokens=torch.tensor(
            [len(node.token_ids) for episode in episodes for node in episode.turns], dtype=torch.int64
        ),
        discount=advantage.turn_discount,
        std_ddof=advantage.std_ddof,
        divide_by_std=advantage.divide_by_std,
    ).tolist()
    for episode, place_of in zip(episodes, places, strict=True):
        for row in episode.rows():
            values = [0.0] * len(row.response_token_ids)
            total, count = 0.0, 0
            for (start, end), node_id in zip(row.turns, row.turn_nodes, strict=True):
                value = advantages[place_of[node_id]]
                values[start:end] = [value] * (end - start)
                total, count = total + value * (end - start), count + end - start
            row.token_advantages, row.advantage = values, total / max(count, 1)


def plan_batch(batch: RolloutBatch, config: Config, layout: Layout, step: int) -> list[RankPlan]:
    """The rows of `batch` that each data-parallel rank works on, by mini-batch and pack. If the batch has fewer
    episodes than `batch.num_mini_batches`, it has one mini-batch per episode. Where prefixes are shared, groups are in
    mini-batches whole, and the same holds of them.
    """
    share = config.batch.share_prefixes
    shares = share != "off"
    num_mini_batches = min(config.batch.num_mini_batches, len(batch.groups if shares else batch.episodes))
    lengths = [t.num_tokens for t in batch.trajectories]
    unit_of = _group_of_rows(batch) if shares else _episode_of_rows(batch)
    shareable = [shareable_tokens(_record(t), share) for t in batch.trajectories] if shares else ()
    routes = [t.routed_experts for t in batch.trajectories] if shares and config.moe.routing_replay == "R3" else ()
    return _plan(lengths, num_mini_batches, config.batch, config.run, layout, step, unit_of, share, shareable, routes)


def _episode_of_rows(batch: RolloutBatch) -> list[int]:
    return [number for number, episode in enumerate(batch.episodes) for _ in episode.rows()]


def _group_of_rows(batch: RolloutBatch) -> list[int]:
    return [number for number, group in enumerate(batch.groups) for _ in group.trajectories]


def _plan(
    lengths: list[int],
    num_mini_batches: int,
    batch: Batch,
    run: Run,
    layout: Layout,
    step: int,
    unit_of: Sequence[int] | None = None,
    share_prefixes: SharePrefixes = "off",
    shareable: Sequence[Sequence[int]] = (),
    routes: Sequence[np.ndarray | None] = (),
) -> list[RankPlan]:
    return plan_rollout_batch(
        lengths,
        unit_of=unit_of,
        num_mini_batches=num_mini_batches,
        budget_tokens=batch.micro_batch_tokens,
        pad_multiple=layout.sequence_multiple_tokens,
        num_data_parallel=layout.data,
        seed=run.seed,
        step=step,
        attention_crossover_tokens=layout.attention_crossover_tokens,
        pack_multiple=layout.pack_multiple_tokens,
        synchronised_packs=layout.synchronised_packs,
        share_prefixes=share_prefixes,
        shareable=shareable,
        routes=routes,
    )


def assemble(
    batch: RolloutBatch,
    config: Config,
    layout: Layout,
    step: int,
    plans: list[RankPlan] | None = None,
    weight_version: int | None = None,
) -> list[list[MiniBatch]]:
    """The mini-batches of every data-parallel rank for `batch`, whose advantages are filled: [data rank][mini-batch].

    `trajectory_index` of the packs is the row in `batch.trajectories`. `plans`: use this packing instead of the one of
    `plan_batch`; it must keep the rows of an episode together in a mini-batch. `weight_version`: the version of the
    weights that are trained; None if it does not matter. Routed experts are added later, by `Parcels`.
    """
    trajectories, episode_of = batch.trajectories, _episode_of_rows(batch)
    plans = plans or plan_batch(batch, config, layout, step)
    records = [_record(t) for t in trajectories]
    if config.batch.share_prefixes != "off" and config.moe.routing_replay == "R3":
        for record, t in zip(records, trajectories, strict=True):
            record["routed_experts"] = t.routed_experts
    num_tokens = [int(np.asarray(t.response_mask, bool).sum()) for t in trajectories]
    episode_tokens: Counter[int] = Counter()
    for episode, count in zip(episode_of, num_tokens, strict=True):
        episode_tokens[episode] += count
    critic = critic_of(config.algorithm, config.critic)
    by_sequence: tuple[str, ...] = ("advantage", "group_size", "weight")
    by_token: tuple[str, ...] = ("token_advantages",) if config.advantage.turns == "return_to_go" else ()
    if critic is not None:
        by_sequence, by_token = (*by_sequence, "truncated"), ("token_rewards",)
        for record in records:
            record["advantage"] = 0.0  # until the critic's values are known
    with_masks = has_masks(trajectories, num_tokens, has_sampling_masks(config.rollout))
    if leaves_out_by_covariance(config.algorithm):
        by_sequence = (*by_sequence, "draw")
        for record, t in zip(records, trajectories, strict=True):
            record["draw"] = trajectory_key(config.run.seed, step, t.trajectory_id)
    num_top = num_served_top(config.teacher)
    named = teachers(config.teacher)
    if any(one.source is not None for one in named):
        by_sequence = (*by_sequence, "teacher")
        number_of = {one.source: number for number, one in enumerate(named)}
        for record, t in zip(records, trajectories, strict=True):
            record["teacher"] = number_of.get(t.prompt.source, -1)
    if has_served_teacher(config.teacher):
        tops = ("teacher_top_ids", "teacher_top_log_probs") if num_top else ()
        by_token = (*by_token, "teacher_log_probs", *tops)
        is_served = {one.source: one.is_served for one in named}
        for record, t, count in zip(records, trajectories, num_tokens, strict=True):
            served = is_served.get(None, is_served.get(t.prompt.source, False)) and count > 0
            scores = served_scores(t, num_top) if served else ServedScores.none(t.num_response_tokens, num_top)
            record["teacher_log_probs"] = scores.log_probs
            record["teacher_top_ids"], record["teacher_top_log_probs"] = scores.top_ids, scores.top_log_probs
    versions = sorted({v for t in trajectories for v in _versions_of(t)})
    if len(versions) > 1 or (weight_version is not None and versions not in ([], [weight_version])):
        by_token = (*by_token, "version_index")
        place = {version: index for index, version in enumerate(versions)}
        for record, t in zip(records, trajectories, strict=True):
            record["version_index"] = [place.get(version, 0) for version in t.weight_versions]
    shards: list[list[MiniBatch]] = [[] for _ in plans]
    for m in range(len(plans[0].mini_batches)):
        packs_of = [plan.mini_batches[m] for plan in plans]
        active = [i for packs in packs_of for pack in packs for i in pack if num_tokens[i]]
        group_of = {episode_of[i]: trajectories[i].group_id for i in active}
        sizes = Counter(group_of.values())
        for i in active:
            records[i]["group_size"] = sizes[trajectories[i].group_id]
            records[i]["weight"] = num_tokens[i] / episode_tokens[episode_of[i]]
        denominator = mini_batch_denominator(
            config.objective.aggregation,
            lengths=[episode_tokens[episode] for episode in group_of],
            group_ids=list(group_of.values()),
        )
        value_denominator = 0.0
        if critic is not None:
            value_denominator = mini_batch_denominator(
                critic.aggregation,
                lengths=[episode_tokens[episode] for episode in group_of],
                group_ids=list(group_of.values()),
            )
        repeated = _num_repeated(packs_of, trajectories) if config.batch.share_prefixes != "off" else 0
        sharing = config.batch.share_prefixes
        packed = _packed(records, packs_of, layout, by_sequence, by_token, with_masks, sharing, num_top)
        for shard, micro_batches in zip(shards, packed, strict=True):
            for micro_batch in micro_batches:
                micro_batch.versions = np.array(versions, np.int64) if "version_index" in by_token else None
            shard.append(MiniBatch(denominator, micro_batches, value_denominator, repeated))
    return shards


def _num_repeated(packs_of: list[list[list[int]]], trajectories: Sequence[Trajectory]) -> int:
    """How often a prompt is in a further pack of a mini-batch. `packs_of`: the rows of each pack, by rank."""
    in_packs = [{trajectories[row].prompt.token_ids for row in pack} for packs in packs_of for pack in packs]
    return sum(map(len, in_packs)) - len(set().union(*in_packs))


def assemble_supervised(
    demonstrations: list[Demonstration], batch: Batch, run: Run, layout: Layout, step: int
) -> list[list[MiniBatch]]:
    """One mini-batch of demonstrations for every data-parallel rank. The loss is the mean over the assistant's tokens,
    regardless of the number of turns.
    """
    rows = [row for demonstration in demonstrations for row in demonstration.rows]
    records = [
        {
            "prompt_token_ids": row.prompt_token_ids,
            "response_token_ids": row.response_token_ids,
            "response_mask": np.array(row.response_mask),
            "rollout_log_probs": np.zeros(len(row.response_token_ids)),
        }
        for row in rows
    ]
    plans = _plan([row.num_tokens for row in rows], 1, batch, run, layout, step)
    denominator = float(sum(row.num_learned for row in rows))
    packs_of = [plan.mini_batches[0] for plan in plans]
    return [[MiniBatch(denominator, micro_batches)] for micro_batches in _packed(records, packs_of, layout)]


def _packed(
    records: list[dict[str, Any]],
    packs_of: list[list[list[int]]],
    layout: Layout,
    sequence_keys: tuple[str, ...] = (),
    token_keys: tuple[str, ...] = (),
    with_masks: bool = False,
    share_prefixes: SharePrefixes = "off",
    num_top: int = 0,
) -> list[list[MicroBatch]]:
    """The micro-batches of every data-parallel rank, the same number on each. `packs_of`: the rows of `records` in each
    pack, by rank.
    """

    def build(rows: list[int], pack_multiple: int) -> MicroBatch:
        return build_micro_batch(
            records,
            rows,
            layout.sequence_multiple_tokens,
            sequence_keys,
            pack_multiple,
            token_keys,
            with_masks,
            share_prefixes,
            num_top,
        )

    count = max(len(packs) for packs in packs_of)
    count += -count % layout.micro_batches_multiple
    filled = [packs + [[]] * (count - len(packs)) for packs in packs_of]
    packed = [[build(rows, layout.pack_multiple_tokens) for rows in packs] for packs in filled]
    if layout.equal_packs:
        for k in range(count):
            longest = max(micro_batches[k].num_computed for micro_batches in packed)
            for packs, micro_batches in zip(filled, packed, strict=True):
                micro_batches[k] = build(packs[k], longest)
    return packed


def has_masks(trajectories: Sequence[Trajectory], num_tokens: Sequence[int], required: bool) -> bool:
    """Return whether the tokens of these rows were sampled from sets of kept tokens. `num_tokens`: how many tokens of
    each row are trained. Raises RolloutError naming a row that lacks its sets, if they are `required` or others have
    theirs: its log-probs are of another distribution than those of the others.
    """
    trained = [t for t, count in zip(trajectories, num_tokens, strict=True) if count]
    lacking = [t.trajectory_id for t in trained if t.sampling_masks is None]
    if not lacking or (len(lacking) == len(trained) and not required):
        return bool(trained) and not lacking
    raise RolloutError(
        f"trajectory {lacking[0]} has no sampling masks"
        + (
            ", which `rollout.top_k` asks the servers for; one that was recorded without them, or from whose record"
            " journal.prune_routes removed them, cannot be trained with it. Valid: `rollout.top_k: -1`, or new samples"
            if required
            else f", and {len(trained) - len(lacking)} others of its batch have"
        )
    )


def served_scores(trajectory: Trajectory, num_top: int) -> ServedScores:
    """Return what a teacher's server said of a row that is trained. Raises RolloutError naming the row if it was
    recorded without that, or without as many of the teacher's most likely tokens.
    """
    scores = trajectory.teacher
    if scores is not None and scores.num_top >= num_top:
        return replace(scores, top_ids=scores.top_ids[:, :num_top], top_log_probs=scores.top_log_probs[:, :num_top])
    lacks = "no scores of a teacher's server" if scores is None else f"a teacher's {scores.num_top} most likely tokens"
    raise RolloutError(
        f"trajectory {trajectory.trajectory_id} has {lacks}, and `teacher.url` needs"
        f" {f'{num_top} at each place' if num_top else 'them'}: it was recorded without, or journal.prune_routes"
        " removed them. Valid: a teacher with `path`, or new samples"
    )


def _versions_of(trajectory: Trajectory) -> list[int]:
    """The weight versions of the tokens that are trained, sorted."""
    versions = np.asarray(trajectory.weight_versions, np.int64)
    return np.unique(versions[np.asarray(trajectory.response_mask, bool)]).tolist()


def _record(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "prompt_token_ids": trajectory.prompt.token_ids,
        "response_token_ids": trajectory.response_token_ids,
        "response_mask": trajectory.response_mask,
        "rollout_log_probs": trajectory.rollout_log_probs,
        "sampling_masks": trajectory.sampling_masks,
        "advantage": trajectory.advantage,
        "token_advantages": trajectory.token_advantages,
        "token_rewards": trajectory.token_rewards,
        "truncated": float(trajectory.is_truncated),
        "group_size": 1,
        "weight": 1.0,
    }

"""From a rollout batch to every rank's shard: advantages, mini-batches, packs, global denominators.

Runs on rank 0, which alone sees the whole batch. Uses no process group; sending is `runtime/rank_link.py`'s.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gspo_mega.algorithm.advantages import group_advantages
from gspo_mega.algorithm.aggregation import mini_batch_denominator
from gspo_mega.config.schema import Config
from gspo_mega.data.demonstrations import Demonstration
from gspo_mega.data.expert_routes import packed_routes
from gspo_mega.data.packing import RankPlan, build_micro_batch, plan_rollout_batch
from gspo_mega.errors import RewardError
from gspo_mega.plan.layout import Layout
from gspo_mega.records import MicroBatch, RolloutBatch, Trajectory


@dataclass
class MiniBatch:
    """One data-parallel rank's part of one optimizer step. `denominator` is global: the loss is divided by it."""

    denominator: float
    micro_batches: list[MicroBatch]

    def to_wire(self) -> dict[str, Any]:
        return {"denominator": self.denominator, "micro_batches": [dict(vars(m)) for m in self.micro_batches]}

    @classmethod
    def from_wire(cls, value: dict[str, Any]) -> MiniBatch:
        return cls(value["denominator"], [MicroBatch(**m) for m in value["micro_batches"]])


def fill_advantages(batch: RolloutBatch, config: Config, step: int) -> None:
    """Set `advantage` of every trajectory of a scored batch from its group's rewards (arXiv:2507.18071, Eq. 6).

    `reward.permute_in_batch` first shuffles the rewards over the whole batch, so that the policy cannot learn from
    them: the control of an experiment.
    """
    trajectories = batch.trajectories
    rewards = np.array([t.reward for t in trajectories], dtype=np.float64)
    if config.reward.permute_in_batch:
        rewards = np.random.default_rng((config.run.seed, step)).permutation(rewards)
    advantages = group_advantages(
        torch.from_numpy(rewards),
        torch.tensor([t.group_id for t in trajectories]),
        std_ddof=config.advantage.std_ddof,
        divide_by_std=config.advantage.divide_by_std,
    )
    for trajectory, advantage in zip(trajectories, advantages.tolist(), strict=True):
        trajectory.advantage = advantage


def scored_batch(batch: RolloutBatch) -> RolloutBatch:
    """The trajectories that a step trains on: those with a reward, in groups of at least two.

    The others enter no statistic of their group and no denominator. A failed scoring is no outcome of the policy,
    unlike a response that the mismatch correction rejects; if it counted in the denominator, failures of the scorer
    would shrink the step. Raises RewardError where nothing is left.
    """
    scored = batch.scored()
    if not scored.groups:
        failed = [
            f"\n  {t.trajectory_id} ({t.prompt.prompt_id}): {t.reward_error}"
            for t in batch.trajectories
            if not t.is_scored
        ]
        raise RewardError(
            f"step {batch.step + 1}: no group of its rollout batch has two rewards. The first"
            f" failures:{''.join(failed[:5])}"
        )
    return scored


def plan_batch(trajectories: list[Trajectory], config: Config, layout: Layout, step: int) -> list[RankPlan]:
    """The rows of `trajectories` that each data-parallel rank works on, by mini-batch and pack."""
    num_mini_batches = min(config.batch.num_mini_batches, len(trajectories))
    return _plan([t.num_tokens for t in trajectories], num_mini_batches, config, layout, step)


def _plan(lengths: list[int], num_mini_batches: int, config: Config, layout: Layout, step: int) -> list[RankPlan]:
    return plan_rollout_batch(
        lengths,
        num_mini_batches=num_mini_batches,
        budget_tokens=config.batch.micro_batch_tokens,
        pad_multiple=layout.sequence_multiple_tokens,
        num_data_parallel=layout.data,
        seed=config.run.seed,
        step=step,
        attention_crossover_tokens=layout.attention_crossover_tokens,
        pack_multiple=layout.pack_multiple_tokens,
        synchronised_packs=layout.synchronised_packs,
    )


def assemble(
    batch: RolloutBatch, config: Config, layout: Layout, step: int, plans: list[RankPlan] | None = None
) -> list[list[MiniBatch]]:
    """Mini-batches of every data-parallel rank for `batch`, whose advantages are filled: [data rank][mini-batch].

    `trajectory_index` of the packs is the row in `batch.trajectories`. A batch with fewer trajectories than
    mini-batches gets one mini-batch per trajectory. `plans`: a packing other than `plan_batch`'s.
    """
    trajectories = batch.trajectories
    plans = plans or plan_batch(trajectories, config, layout, step)
    records = [_record(t) for t in trajectories]
    shards: list[list[MiniBatch]] = [[] for _ in plans]
    for m in range(len(plans[0].mini_batches)):
        packs_of = [plan.mini_batches[m] for plan in plans]
        active = [i for packs in packs_of for pack in packs for i in pack if any(trajectories[i].response_mask)]
        sizes = Counter(trajectories[i].group_id for i in active)
        for i in active:
            records[i]["group_size"] = sizes[trajectories[i].group_id]
        denominator = mini_batch_denominator(
            config.objective.aggregation,
            lengths=[sum(trajectories[i].response_mask) for i in active],
            group_ids=[trajectories[i].group_id for i in active],
        )
        for shard, micro_batches in zip(
            shards, _packed(records, packs_of, layout, ("advantage", "group_size")), strict=True
        ):
            for micro_batch in micro_batches:
                micro_batch.routed_experts = packed_routes(micro_batch, trajectories, config.moe.routing_replay == "R3")
            shard.append(MiniBatch(denominator, micro_batches))
    return shards


def assemble_supervised(
    demonstrations: list[Demonstration], config: Config, layout: Layout, step: int
) -> list[list[MiniBatch]]:
    """One mini-batch of demonstrations for every data-parallel rank; the loss is the mean over their tokens."""
    records = [
        {
            "prompt_token_ids": d.prompt_token_ids,
            "response_token_ids": d.response_token_ids,
            "response_mask": np.ones(len(d.response_token_ids)),
            "rollout_log_probs": np.zeros(len(d.response_token_ids)),
        }
        for d in demonstrations
    ]
    lengths = [len(d.prompt_token_ids) + len(d.response_token_ids) for d in demonstrations]
    plans = _plan(lengths, 1, config, layout, step)
    denominator = float(sum(len(d.response_token_ids) for d in demonstrations))
    packs_of = [plan.mini_batches[0] for plan in plans]
    return [[MiniBatch(denominator, micro_batches)] for micro_batches in _packed(records, packs_of, layout)]


def for_ranks(shards: list[list[MiniBatch]], layout: Layout) -> list[list[dict[str, Any]]]:
    """The wire form of each global rank's shard: that of its data-parallel rank."""
    wire = [[m.to_wire() for m in shard] for shard in shards]
    return [wire[layout.coordinates(rank).data] for rank in range(layout.world_size)]


def _packed(
    records: list[dict[str, Any]], packs_of: list[list[list[int]]], layout: Layout, sequence_keys: tuple[str, ...] = ()
) -> list[list[MicroBatch]]:
    """The micro-batches of every data-parallel rank, the same number on each, from its packs of rows of `records`."""

    def build(rows: list[int], pack_multiple: int) -> MicroBatch:
        return build_micro_batch(records, rows, layout.sequence_multiple_tokens, sequence_keys, pack_multiple)

    count = max(len(packs) for packs in packs_of)
    count += -count % layout.micro_batches_multiple
    filled = [packs + [[]] * (count - len(packs)) for packs in packs_of]
    packed = [[build(rows, layout.pack_multiple_tokens) for rows in packs] for packs in filled]
    if layout.equal_packs:
        for k in range(count):
            longest = max(micro_batches[k].num_tokens for micro_batches in packed)
            for packs, micro_batches in zip(filled, packed, strict=True):
                micro_batches[k] = build(packs[k], longest)
    return packed


def _record(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "prompt_token_ids": trajectory.prompt.token_ids,
        "response_token_ids": trajectory.response_token_ids,
        "response_mask": trajectory.response_mask,
        "rollout_log_probs": trajectory.rollout_log_probs,
        "advantage": trajectory.advantage,
        "group_size": 1,
    }

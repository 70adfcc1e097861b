"""The metrics of PPO's critic, from the parts of all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gspo_mega.algorithm.value_loss import VALUE_SUMS, explained_variance
from gspo_mega.base.rollout_batch import RolloutBatch
from gspo_mega.engine.megatron_optimizer import StepResult
from gspo_mega.metrics.reduction import reduced
from gspo_mega.train.critic_step import CriticPart

_TOKENS, _CLIPPED, _LOSS = VALUE_SUMS.index("value_tokens"), len(VALUE_SUMS), len(VALUE_SUMS) + 1


def critic_metrics(
    parts: Sequence[CriticPart], results: Sequence[StepResult], num_critic_steps: int, kl_coefficient: float
) -> dict[str, float]:
    """`results`: of the value steps, which all ranks share."""
    old = np.sum([part.old_sums for part in parts], axis=0)
    steps = np.sum([part.step_sums for part in parts], axis=0)
    sums: dict[str, float] = dict(zip(VALUE_SUMS, old.tolist(), strict=True))
    count = max(sums["value_tokens"], 1.0)
    norms = [result.grad_norm for result in results]
    metrics = {
        # The loss of each mini-batch has its own denominator: over the step it is their mean.
        "critic/value_loss": float(steps[:, _LOSS].mean()),
        "critic/clip_fraction": float(steps[:, _CLIPPED].sum() / max(steps[:, _TOKENS].sum(), 1.0)),
        "critic/value_mean": sums["value_sum"] / count,
        "critic/return_mean": sums["return_sum"] / count,
        **reduced({"critic/grad_norm": norms, "critic/grad_norm_max": norms}),
        "critic/lr": results[-1].lr,
        "critic/num_optimizer_steps": num_critic_steps,
        "critic/num_skipped": sum(result.skipped for result in results),
    }
    if (explained := explained_variance(sums)) is not None:
        metrics["critic/explained_variance"] = explained
    if kl_coefficient > 0:
        gap, tokens = np.sum([part.penalty for part in parts], axis=0).tolist()
        metrics["critic/kl_reference"] = gap / max(tokens, 1.0)
    return metrics


def fill_mean_advantages(batch: RolloutBatch, parts: Sequence[CriticPart]) -> None:
    """Set `advantage` of every row to the mean of its tokens'; 0 where it has none."""
    rows = batch.trajectories
    for row in rows:
        row.advantage = 0.0
    for part in parts:
        for place, advantage in zip(part.rows.tolist(), part.advantages.tolist(), strict=True):
            rows[place].advantage = advantage

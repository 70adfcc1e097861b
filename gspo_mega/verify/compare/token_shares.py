"""Measure how strongly an objective pulls at each response and token: its gradient with respect to their log-probs.

Also compute what needs no model: clip fractions, dropped responses, the effective number of responses. The gradient is
that of the function that training calls, for the whole batch at once.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from gspo_mega.algorithm.diagnostics import policy_metrics, policy_sums
from gspo_mega.algorithm.objective import mini_batch_denominator, policy_objective
from gspo_mega.algorithm.terms import objective_settings
from gspo_mega.base.episodes import RolloutBatch
from gspo_mega.config.algorithms import AlgorithmName
from gspo_mega.config.schema import Objective


@dataclass(frozen=True)
class TokenLogProbs:
    """Log-probs of every response token of a batch, concatenated, [sum R] float64 nats; arbitrary at masked tokens."""

    policy: np.ndarray
    old: np.ndarray
    server: np.ndarray


@dataclass(frozen=True)
class Pull:
    """One algorithm on one batch. Fractions are as in `policy_metrics`. `dropped`: ids of trajectories with A != 0 and
    no gradient at all; `weakened`: ids of those with no gradient at some of their tokens. `num_effective`:
    (sum g)^2 / sum g^2 over the trajectories, where g is the sum of |dJ / d log pi| over a trajectory's tokens.
    """

    objective: float
    clip_fraction: float
    clip_fraction_high: float
    clip_fraction_low: float
    token_clip_fraction: float
    clip_fraction_positive: float | None
    clip_fraction_negative: float | None
    num_with_advantage: int
    num_effective: float
    dropped: list[str]
    weakened: list[str]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def pull_of(algorithm: AlgorithmName, objective: Objective, batch: RolloutBatch, log_probs: TokenLogProbs) -> Pull:
    """Return what `objective` does with `batch`, whose advantages are filled in."""
    rows = batch.trajectories
    settings = objective_settings(algorithm, objective)
    active = [int(np.asarray(row.response_mask, bool).sum()) for row in rows]
    episode_of = [number for number, episode in enumerate(batch.episodes) for _ in episode.rows()]
    tokens_of: Counter[int] = Counter()
    group_of: dict[int, int] = {}
    for row, count, episode in zip(rows, active, episode_of, strict=True):
        tokens_of[episode] += count
        if count:
            group_of[episode] = row.group_id
    sizes = Counter(group_of.values())
    segment_ids = torch.repeat_interleave(
        torch.arange(len(rows)), torch.tensor([row.num_response_tokens for row in rows], dtype=torch.int64)
    )
    mask = torch.tensor(np.concatenate([np.asarray(row.response_mask, bool) for row in rows]))
    advantages = torch.tensor([row.advantage for row in rows], dtype=torch.float64)
    token_advantages = None
    if rows[0].token_advantages is not None:
        token_advantages = torch.tensor(np.concatenate([np.asarray(row.token_advantages) for row in rows]))
    branch_weights = torch.tensor(
        [count / max(tokens_of[episode], 1) for count, episode in zip(active, episode_of, strict=True)],
        dtype=torch.float64,
    )
    lengths = torch.tensor(active)
    policy = torch.from_numpy(log_probs.policy).clone().requires_grad_()
    output = policy_objective(
        settings,
        log_probs=policy,
        old_log_probs=torch.from_numpy(log_probs.old),
        rollout_log_probs=torch.from_numpy(log_probs.server),
        mask=mask,
        segment_ids=segment_ids,
        num_sequences=len(rows),
        advantages=advantages,
        lengths=lengths,
        denominator=mini_batch_denominator(
            settings.aggregation, [tokens_of[episode] for episode in group_of], list(group_of.values())
        ),
        token_advantages=token_advantages,
        group_sizes=torch.tensor([max(sizes[row.group_id], 1) for row in rows]),
        branch_weights=branch_weights,
    )
    output.objective_sum.backward()
    assert policy.grad is not None  # backward() has filled it
    pulls = policy.grad.abs()
    strength = torch.zeros(len(rows), dtype=torch.float64).index_add(0, segment_ids, pulls)
    silent = torch.zeros(len(rows)).index_add(0, segment_ids, (mask & (pulls == 0)).float())
    if token_advantages is None:
        has_advantage = (advantages != 0) & (lengths > 0)
    else:
        named = (mask & (token_advantages != 0)).float()
        has_advantage = torch.zeros(len(rows)).index_add(0, segment_ids, named) > 0
    shown = policy_metrics(
        policy_sums(
            output,
            mask=mask,
            segment_ids=segment_ids,
            lengths=lengths,
            advantages=advantages,
            token_advantages=token_advantages,
            branch_weights=branch_weights,
        )
    )
    squares = float(strength.square().sum())

    def ids(chosen: torch.Tensor) -> list[str]:
        return [row.trajectory_id for row, is_chosen in zip(rows, chosen.tolist(), strict=True) if is_chosen]

    return Pull(
        objective=shown["objective"],
        clip_fraction=shown["clip_fraction"],
        clip_fraction_high=shown["clip_fraction_high"],
        clip_fraction_low=shown["clip_fraction_low"],
        token_clip_fraction=shown["token_clip_fraction"],
        clip_fraction_positive=shown.get("clip_fraction_positive"),
        clip_fraction_negative=shown.get("clip_fraction_negative"),
        num_with_advantage=int(has_advantage.sum()),
        num_effective=float(strength.sum()) ** 2 / squares if squares > 0 else 0.0,
        dropped=ids(has_advantage & (strength == 0)),
        weakened=ids(has_advantage & (strength > 0) & (silent > 0)),
    )

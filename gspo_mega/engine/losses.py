"""What happens to a micro-batch's log-probs on the last pipeline stage: the old pass, the policy loss, the
supervised loss.

Each is a callable from (batch, log-probs, entropies) to a `PassOutput`. The maths is `gspo_mega.algorithm`;
here it meets the context-parallel group and the report. Reports are this rank's part: sums over the tokens it
holds, added up over context- and data-parallel ranks by whoever gathers them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from gspo_mega.algorithm.diagnostics import policy_sums
from gspo_mega.algorithm.mismatch import SUM_NAMES, mismatch_sums, sequence_mismatch_weights
from gspo_mega.algorithm.objective import ObjectiveSettings, policy_objective
from gspo_mega.algorithm.ratio import check_finite, segment_sum
from gspo_mega.algorithm.supervised import supervised_loss
from gspo_mega.engine.context_parallel import sum_over_context
from gspo_mega.engine.device_batch import DeviceBatch
from gspo_mega.engine.process_groups import ParallelGroups
from gspo_mega.errors import NumericsError


@dataclass
class OldLogProbs:
    """What the old pass leaves for the training passes of one micro-batch, on last-stage ranks.

    `log_probs` [N] float32 nats for this rank's active tokens; `weights` [S] float64 and `keep` [S] bool
    correct the gap between the two engines (1 and True where no correction is asked for).
    """

    log_probs: torch.Tensor
    weights: torch.Tensor
    keep: torch.Tensor


@dataclass
class PassOutput:
    """Of one micro-batch. `loss`: the scalar this rank back-propagates, None in a forward-only pass. `columns`:
    per-sequence parts [S] or [S, K]; `totals`: parts of the whole [K]. `old`: of the old pass."""

    loss: torch.Tensor | None = None
    columns: dict[str, torch.Tensor] = field(default_factory=dict)
    totals: dict[str, torch.Tensor] = field(default_factory=dict)
    old: OldLogProbs | None = None


def require_finite(batch: DeviceBatch, **tensors: torch.Tensor) -> None:
    """Raise NumericsError naming the trajectory of the first non-finite active token."""
    bad = check_finite(torch.ones_like(batch.sequence_ids), batch.sequence_ids, **tensors)
    if bad is not None:
        raise NumericsError(
            f"{bad.tensor} is {bad.value} at an active token of trajectory {int(batch.trajectory_index[bad.segment])} "
            f"of the rollout batch (token id {int(batch.labels[bad.token])}); training on it would spoil the weights"
        )


@dataclass
class OldPass:
    """Trainer log-probs at the start of a rollout batch, and the correction of the gap to the server's."""

    groups: ParallelGroups
    correction: str
    cap: float

    def __call__(self, batch: DeviceBatch, log_probs: torch.Tensor, entropies: torch.Tensor) -> PassOutput:
        require_finite(batch, old_log_probs=log_probs, rollout_log_probs=batch.rollout_log_probs)
        active = torch.ones_like(batch.sequence_ids)
        sums, maxima = mismatch_sums(
            log_probs, batch.rollout_log_probs, active, batch.sequence_ids, batch.num_sequences, token_cap=self.cap
        )
        gap = sum_over_context(sums[:, SUM_NAMES.index("log_ratio")], self.groups.context)
        mean_gap = gap / batch.sequence["length"].double().clamp(min=1.0)
        weights, keep = sequence_mismatch_weights(mean_gap, self.correction, self.cap)
        columns = {
            "mismatch_sums": sums,
            "mismatch_maxima": maxima,
            "entropy_sum": segment_sum(entropies.double(), batch.sequence_ids, batch.num_sequences),
            "mismatch_weight": weights,
        }
        return PassOutput(columns=columns, old=OldLogProbs(log_probs, weights, keep))


@dataclass
class PolicyLoss:
    """The clipped objective of one mini-batch.

    `old` holds the old pass of its micro-batches in order, or None where it was skipped because old is current
    (one optimizer step a rollout batch). With `use_rollout` the server's log-probs are taken for old, and the
    engine gap is part of the ratio instead of being corrected.
    """

    groups: ParallelGroups
    settings: ObjectiveSettings
    denominator: float
    old_pass: OldPass
    use_rollout: bool
    old: list[OldLogProbs] | None
    next_index: int = 0

    def __call__(self, batch: DeviceBatch, log_probs: torch.Tensor, entropies: torch.Tensor) -> PassOutput:
        require_finite(batch, log_probs=log_probs)
        columns: dict[str, torch.Tensor] = {}
        if self.old is not None:
            old = self.old[self.next_index]
            self.next_index += 1
        else:
            measured = self.old_pass(batch, log_probs.detach(), entropies)
            columns, old = measured.columns, measured.old
        if self.use_rollout:
            old = OldLogProbs(batch.rollout_log_probs, torch.ones_like(old.weights), torch.ones_like(old.keep))
        shared = dict(
            mask=torch.ones_like(batch.sequence_ids),
            segment_ids=batch.sequence_ids,
            advantages=batch.sequence["advantage"],
            lengths=batch.sequence["length"],
            keep=old.keep,
        )
        out = policy_objective(
            self.settings,
            log_probs=log_probs,
            old_log_probs=old.log_probs,
            num_sequences=batch.num_sequences,
            denominator=self.denominator,
            sequence_weights=old.weights,
            group_sizes=batch.sequence["group_size"],
            reduce_sequences=lambda sums: sum_over_context(sums, self.groups.context),
            **shared,
        )
        return PassOutput(
            loss=out.loss,
            columns=columns | {"log_s": out.sequence_log_ratio},
            totals={"policy_sums": policy_sums(out, **shared)},
        )


@dataclass
class SupervisedLoss:
    """Mean negative log-prob of the demonstration tokens of one mini-batch (`denominator`: their global number)."""

    denominator: float

    def __call__(self, batch: DeviceBatch, log_probs: torch.Tensor, entropies: torch.Tensor) -> PassOutput:
        require_finite(batch, log_probs=log_probs)
        loss = supervised_loss(log_probs, torch.ones_like(batch.sequence_ids), self.denominator)
        totals = torch.stack([log_probs.detach().double().sum(), entropies.double().sum()])
        return PassOutput(loss=loss, totals={"supervised_sums": totals})

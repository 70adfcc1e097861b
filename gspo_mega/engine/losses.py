"""What happens to a micro-batch's log-probs on the last pipeline stage: the old pass, the policy loss, the
supervised loss.

Each is a callable from (batch, log-probs, entropies) to a `PassOutput`. The maths is
`gspo_mega.algorithm`; here it meets the context-parallel group and the per-sequence report.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from gspo_mega.algorithm.mismatch import sequence_mismatch_weights
from gspo_mega.algorithm.objective import ObjectiveSettings, policy_objective
from gspo_mega.algorithm.ratio import check_finite, segment_sum
from gspo_mega.engine.context_parallel import sum_over_context
from gspo_mega.engine.device_batch import DeviceBatch
from gspo_mega.engine.process_groups import ParallelGroups
from gspo_mega.errors import NumericsError


@dataclass
class OldLogProbs:
    """What the old pass leaves for the training passes of one micro-batch, on last-stage ranks.

    `log_probs` [N] float32 nats for this rank's active tokens; `weights` and `keep` [S] correct the gap
    between the two engines (1 and True where no correction is asked for).
    """

    log_probs: torch.Tensor
    weights: torch.Tensor
    keep: torch.Tensor


@dataclass
class PassOutput:
    """`loss`: scalar this rank back-propagates (None in a forward-only pass). `sequences`: arrays [S] for the
    report, global over context parallelism. `old`: of the old pass."""

    loss: torch.Tensor | None = None
    sequences: dict[str, torch.Tensor] = field(default_factory=dict)
    old: OldLogProbs | None = None


def require_finite(batch: DeviceBatch, **tensors: torch.Tensor) -> None:
    """Raise NumericsError naming the trajectory of the first non-finite active token."""
    mask = torch.ones_like(batch.sequence_ids)
    bad = check_finite(mask, batch.sequence_ids, **tensors)
    if bad is not None:
        raise NumericsError(
            f"{bad.tensor} is {bad.value} at an active token of trajectory {int(batch.trajectory_index[bad.segment])} "
            f"of the rollout batch (token id {int(batch.labels[bad.token])}); training on it would spoil the weights"
        )


def _engine_gap(batch: DeviceBatch, log_probs: torch.Tensor, entropies: torch.Tensor, groups: ParallelGroups) -> dict[str, torch.Tensor]:
    """Per-sequence sums [S] over active tokens of d = trainer - rollout: d, d^2, |d|, e^d - 1 - d, entropy; max |d|.

    One all-reduce over context ranks for the sums and one for the maximum.
    """
    gap = (log_probs - batch.rollout_log_probs).double()
    columns = (gap, gap**2, gap.abs(), torch.expm1(gap) - gap, entropies.double())
    sums = torch.stack([segment_sum(c, batch.sequence_ids, batch.num_sequences) for c in columns])
    sums = sum_over_context(sums, groups.context)
    largest = torch.zeros(batch.num_sequences, dtype=torch.float64, device=gap.device)
    largest.scatter_reduce_(0, batch.sequence_ids, gap.abs(), "amax")
    if groups.context.size > 1:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=groups.context.group)
    names = ("gap_sum", "gap_squared_sum", "gap_abs_sum", "gap_k3_sum", "entropy_sum")
    return {**dict(zip(names, sums)), "gap_abs_max": largest}


@dataclass
class OldPass:
    """Trainer log-probs at the start of a rollout batch, and the correction of the gap to the server's."""

    groups: ParallelGroups
    correction: str
    cap: float

    def __call__(self, batch: DeviceBatch, log_probs: torch.Tensor, entropies: torch.Tensor) -> PassOutput:
        require_finite(batch, old_log_probs=log_probs, rollout_log_probs=batch.rollout_log_probs)
        report = _engine_gap(batch, log_probs, entropies, self.groups)
        mean_gap = report["gap_sum"] / batch.sequence["length"].double().clamp(min=1.0)
        weights, keep = sequence_mismatch_weights(mean_gap, self.correction, self.cap)
        report["mismatch_weight"], report["mismatch_keep"] = weights, keep.double()
        return PassOutput(sequences=report, old=OldLogProbs(log_probs, weights, keep))


@dataclass
class PolicyLoss:
    """The clipped objective of one mini-batch. `old` is None when its old pass was skipped (one optimizer step
    a rollout batch: old is current) or when the server's log-probs are used as they are (`use_rollout`)."""

    groups: ParallelGroups
    settings: ObjectiveSettings
    denominator: float
    old_pass: OldPass
    use_rollout: bool
    old: list[OldLogProbs] | None
    next_index: int = 0

    def __call__(self, batch: DeviceBatch, log_probs: torch.Tensor, entropies: torch.Tensor) -> PassOutput:
        require_finite(batch, log_probs=log_probs)
        report: dict[str, torch.Tensor] = {}
        if self.old is not None:
            old = self.old[self.next_index]
            self.next_index += 1
        else:
            measured = self.old_pass(batch, log_probs.detach(), entropies)
            report, old = measured.sequences, measured.old
        if self.use_rollout:
            old = OldLogProbs(batch.rollout_log_probs, torch.ones_like(old.weights), torch.ones_like(old.keep))
        lengths = batch.sequence["length"]
        out = policy_objective(
            self.settings,
            log_probs=log_probs,
            old_log_probs=old.log_probs,
            mask=torch.ones_like(batch.sequence_ids),
            segment_ids=batch.sequence_ids,
            num_sequences=batch.num_sequences,
            advantages=batch.sequence["advantage"],
            lengths=lengths,
            denominator=self.denominator,
            keep=old.keep,
            sequence_weights=old.weights,
            group_sizes=batch.sequence["group_size"],
            reduce_sequences=lambda sums: sum_over_context(sums, self.groups.context),
        )
        report |= {"log_s": out.sequence_log_ratio}
        report |= self._shared(batch, out)
        return PassOutput(loss=out.loss, sequences=report)

    def _shared(self, batch: DeviceBatch, out) -> dict[str, torch.Tensor]:
        """Objective terms and clipped tokens per sequence, summed over context ranks (reports only)."""
        if self.settings.ratio == "sequence":
            tokens = batch.sequence["length"].double()
            flags = {"clipped_high": out.clipped_high * tokens, "clipped_low": out.clipped_low * tokens}
            flags["dual_clipped"] = out.dual_clipped * tokens
            terms = out.sequence_terms
            if self.groups.context.size > 1:
                terms = terms.clone()
                dist.all_reduce(terms, group=self.groups.context.group)
            return {"objective": terms, **flags}
        flags = [out.clipped_high, out.clipped_low, out.dual_clipped]
        counts = [segment_sum(f.double(), batch.sequence_ids, batch.num_sequences) for f in flags]
        sums = sum_over_context(torch.stack([out.sequence_terms, *counts]), self.groups.context)
        return dict(zip(("objective", "clipped_high", "clipped_low", "dual_clipped"), sums))


@dataclass
class SupervisedLoss:
    """Mean negative log-prob of the demonstration tokens of one mini-batch (`denominator`: their global number)."""

    groups: ParallelGroups
    denominator: float

    def __call__(self, batch: DeviceBatch, log_probs: torch.Tensor, entropies: torch.Tensor) -> PassOutput:
        require_finite(batch, log_probs=log_probs)
        sums = segment_sum(log_probs.double(), batch.sequence_ids, batch.num_sequences)
        loss = -sums.sum() / self.denominator
        columns = torch.stack([sums.detach(), segment_sum(entropies.double(), batch.sequence_ids, batch.num_sequences)])
        columns = sum_over_context(columns, self.groups.context)
        return PassOutput(loss=loss, sequences={"log_prob_sum": columns[0], "entropy_sum": columns[1]})

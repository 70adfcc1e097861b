"""What happens to a micro-batch's log-probs on the last pipeline stage: the old pass, the policy loss, the
supervised loss.

Each is a callable from (batch, log-probs, entropies) to a `PassOutput`; entropies are computed only for one whose
`wants_entropy` is true, and None otherwise. The maths is `gspo_mega.algorithm`; here it meets the context-parallel
group and the report. Reports are this rank's part: sums over the tokens it holds, added up over context- and
data-parallel ranks by whoever gathers them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from gspo_mega.algorithm.diagnostics import policy_sums
from gspo_mega.algorithm.kl import Estimator, reference_kl
from gspo_mega.algorithm.mismatch import SUM_NAMES, Correction, mismatch_sums, sequence_mismatch_weights
from gspo_mega.algorithm.objective import ObjectiveSettings, policy_objective
from gspo_mega.algorithm.ratio import check_finite, segment_sum
from gspo_mega.algorithm.supervised_loss import supervised_loss
from gspo_mega.engine.context_parallel import sum_over_context, with_known_sum
from gspo_mega.engine.device_batch import DeviceBatch
from gspo_mega.engine.process_groups import ParallelGroups
from gspo_mega.errors import NumericsError


@dataclass
class OldLogProbs:
    """What the old pass leaves for the training passes of one micro-batch, on last-stage ranks.

    `log_probs` [N] float32 nats for this rank's active tokens; `weights` [S] float64 and `keep` [S] bool
    correct the gap between the two engines (1 and True where no correction is asked for). `gap_sums` [S] float64
    nats: that gap, trainer - rollout, added up over the whole of each sequence.
    """

    log_probs: torch.Tensor
    weights: torch.Tensor
    keep: torch.Tensor
    gap_sums: torch.Tensor


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


def _wanted(entropies: torch.Tensor | None) -> torch.Tensor:
    if entropies is None:
        raise ValueError("the entropies were not computed; the loss has to say `wants_entropy`")
    return entropies


@dataclass
class OldPass:
    """Trainer log-probs at the start of a rollout batch, and the correction of the gap to the server's."""

    groups: ParallelGroups
    correction: Correction
    cap: float
    wants_entropy: ClassVar[bool] = True

    def __call__(self, batch: DeviceBatch, log_probs: torch.Tensor, entropies: torch.Tensor | None) -> PassOutput:
        columns, old = self.measure(batch, log_probs, entropies)
        return PassOutput(columns=columns, old=old)

    def measure(
        self, batch: DeviceBatch, log_probs: torch.Tensor, entropies: torch.Tensor | None
    ) -> tuple[dict[str, torch.Tensor], OldLogProbs]:
        """The columns and what the training passes need, in tensors as `OldLogProbs` and `PassOutput` have them."""
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
            "entropy_sum": segment_sum(_wanted(entropies).double(), batch.sequence_ids, batch.num_sequences),
            "mismatch_weight": weights,
        }
        return columns, OldLogProbs(log_probs, weights, keep, gap)


@dataclass
class KlTerm:
    """A KL term to a reference policy, added to the loss. `reference`: for each micro-batch [N] float32 nats of this
    rank's active tokens under it."""

    coefficient: float
    estimator: Estimator
    reference: list[torch.Tensor]


@dataclass
class PolicyLoss:
    """The clipped objective of one mini-batch, with the KL term to a reference policy where there is one.

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
    kl: KlTerm | None = None
    next_index: int = 0

    @property
    def wants_entropy(self) -> bool:
        """Where the old pass was skipped, its metrics come from here."""
        return self.old is None

    def __call__(self, batch: DeviceBatch, log_probs: torch.Tensor, entropies: torch.Tensor | None) -> PassOutput:
        require_finite(batch, log_probs=log_probs)
        columns: dict[str, torch.Tensor] = {}
        index, self.next_index = self.next_index, self.next_index + 1
        if self.old is not None:
            old, known = self.old[index], None
        else:
            columns, old = self.old_pass.measure(batch, log_probs.detach(), entropies)
            # Old is current, or the server's: what the log-ratio sums to is 0, or the gap that has just been shared.
            known = old.gap_sums if self.use_rollout else torch.zeros_like(old.gap_sums)
        if self.use_rollout:
            old = OldLogProbs(
                batch.rollout_log_probs, torch.ones_like(old.weights), torch.ones_like(old.keep), old.gap_sums
            )
            columns = {name: old.weights if name == "mismatch_weight" else values for name, values in columns.items()}

        def reduce_sequences(sums: torch.Tensor) -> torch.Tensor:
            """With an old pass or without, one all-reduce over the context ranks a micro-batch."""
            return sum_over_context(sums, self.groups.context) if known is None else with_known_sum(sums, known)

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
            reduce_sequences=reduce_sequences,
            **shared,
        )
        loss, totals = out.loss, {"policy_sums": policy_sums(out, **shared)}
        if self.kl is not None:
            kl = reference_kl(
                self.settings,
                self.kl.estimator,
                log_probs=log_probs,
                reference_log_probs=self.kl.reference[index],
                mask=shared["mask"],
                segment_ids=batch.sequence_ids,
                num_sequences=batch.num_sequences,
                lengths=batch.sequence["length"],
                denominator=self.denominator,
                keep=old.keep,
                sequence_weights=old.weights,
                group_sizes=batch.sequence["group_size"],
            )
            loss = loss + self.kl.coefficient * kl.value
            totals["kl_sums"] = kl.sums
        return PassOutput(loss=loss, columns=columns | {"log_s": out.sequence_log_ratio}, totals=totals)


@dataclass
class SupervisedLoss:
    """Mean negative log-prob of the demonstration tokens of one mini-batch (`denominator`: their global number)."""

    denominator: float
    wants_entropy: ClassVar[bool] = True

    def __call__(self, batch: DeviceBatch, log_probs: torch.Tensor, entropies: torch.Tensor | None) -> PassOutput:
        require_finite(batch, log_probs=log_probs)
        loss = supervised_loss(log_probs, torch.ones_like(batch.sequence_ids), self.denominator)
        totals = torch.stack([log_probs.detach().double().sum(), _wanted(entropies).double().sum()])
        return PassOutput(loss=loss, totals={"supervised_sums": totals})

"""The correction of the engine gap over a whole rollout batch: one decision, the same on all ranks.

Brings the sums of all old passes together over the data-parallel ranks, applies `algorithm.correction` to them in the
batch's order, and writes each response's weight back where its training pass finds it. Owns no formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from gspo_mega.algorithm.correction import CorrectionRule, correct
from gspo_mega.engine.process_groups import ParallelGroups, device


@dataclass
class GapSums:
    """What the correction needs of the S sequences of one micro-batch; whole sequences, the same on all context ranks.

    `rows` [S] int64: trajectory of the rollout batch, -1 for filler. `sums` [S] float64 nats, of `exact_sums`;
    `lengths` [S] float64 active tokens; `num_vetoes` [S] float64 tokens above the veto.
    """

    rows: torch.Tensor
    sums: torch.Tensor
    lengths: torch.Tensor
    num_vetoes: torch.Tensor


@dataclass
class SequenceCorrection:
    """The correction of the S sequences of one micro-batch. `weights` [S] float64 and `keep` [S] bool as in
    `CorrectionResult`; `deviations`, `centre` [S] float64 nats, the centre being one number for the whole batch.
    """

    weights: torch.Tensor
    keep: torch.Tensor
    deviations: torch.Tensor
    centre: torch.Tensor


def correct_batch(rule: CorrectionRule, gaps: Sequence[GapSums], groups: ParallelGroups) -> list[SequenceCorrection]:
    """The correction of each micro-batch of `gaps`, which are all of this rank's in the rollout batch.

    Every row's numbers come from one data-parallel rank and are added to zeros, so the decision is bit for bit the same
    in every layout that gives the same log-probs. Collective over the data group. Raises NumericsError naming a
    trajectory whose sum is not finite.
    """
    num_rows = torch.tensor(max((int(gap.rows.max()) for gap in gaps), default=-1) + 1, device=device())
    if groups.data.size > 1:
        dist.all_reduce(num_rows, op=dist.ReduceOp.MAX, group=groups.data.group)
    table = torch.zeros(3, int(num_rows), dtype=torch.float64, device=device())
    for gap in gaps:
        real = gap.rows >= 0
        table[:, gap.rows[real]] = torch.stack([gap.sums, gap.lengths, gap.num_vetoes])[:, real]
    if groups.data.size > 1:
        dist.all_reduce(table, group=groups.data.group)
    # On the host: the centre is found by bisection, and the table is small.
    result = correct(rule, *table.cpu().unbind())
    corrections = []
    for gap in gaps:
        real, rows = gap.rows >= 0, gap.rows.clamp(min=0)
        weights, keep, deviations = (
            values.to(gap.sums.device)[rows] for values in (result.weights, result.keep, result.deviations)
        )
        corrections.append(
            SequenceCorrection(
                weights=torch.where(real, weights, 1.0),
                keep=keep | ~real,
                deviations=torch.where(real, deviations, 0.0),
                centre=torch.full_like(gap.sums, result.centre),
            )
        )
    return corrections

"""What a pass over a mini-batch reports of this rank: values per sequence, sums, and each token's gap if asked for.

Owns how the outputs of micro-batches become one report. The values are the losses'; ranks' parts are put together by
`algorithm.columns` and the runtime.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add

import numpy as np
import torch

from gspo_mega.base.records import MicroBatch
from gspo_mega.engine.device_batch import held_rows
from gspo_mega.engine.losses import PassOutput
from gspo_mega.engine.process_groups import ParallelGroups


@dataclass
class PassReport:
    """This rank's part of the report of one pass over a mini-batch; empty on ranks that report nothing.

    `trajectory_index` [n] int64: rows of the rollout batch; `columns` per sequence, [n] or [n, K] float64; `totals` [K]
    float64. Context-parallel ranks name the same rows and add up. `routing`, from every rank: sums over this rank's
    layers with experts and its positions; the sum over all ranks is complete. `tokens`, where the pass keeps gaps: of
    the N active tokens held here, `rows` [N] int32 of the rollout batch, `places` [N] int32 in the row's prompt and
    response, `gaps` [N] float16 nats: trainer - server.
    """

    trajectory_index: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    totals: dict[str, np.ndarray] = field(default_factory=dict)
    routing: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def of(
        cls, micro_batches: Sequence[MicroBatch], outputs: Sequence[PassOutput], groups: ParallelGroups
    ) -> PassReport:
        if not groups.reports:
            return cls()
        index = np.concatenate([m.trajectory_index for m in micro_batches])
        real = index >= 0
        columns = {
            n: torch.cat([o.columns[n] for o in outputs]).double().cpu().numpy()[real] for n in outputs[0].columns
        }
        totals = {n: reduce(add, (o.totals[n] for o in outputs)).double().cpu().numpy() for n in outputs[0].totals}
        return cls(index[real], columns, totals, tokens=_token_gaps(micro_batches, outputs, groups))


def _token_gaps(
    micro_batches: Sequence[MicroBatch], outputs: Sequence[PassOutput], groups: ParallelGroups
) -> dict[str, np.ndarray]:
    if any(output.gaps is None for output in outputs):
        return {}
    rows, places = [], []
    for one in micro_batches:
        held, active = held_rows(one, groups)
        at = held[active].numpy()
        rows.append(one.trajectory_index[one.sequence_ids[at]].astype(np.int32))
        places.append((one.position_ids[at] + 1).astype(np.int32))  # a position predicts the token behind it
    gaps = torch.cat([output.gaps for output in outputs if output.gaps is not None]).cpu().numpy()
    return {"rows": np.concatenate(rows), "places": np.concatenate(places), "gaps": gaps}

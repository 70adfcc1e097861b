"""A pass's values of a recorded batch in one order, whatever the layout: those of all ranks, by trajectory."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from gspo_mega.base.records import MicroBatch
from gspo_mega.engine.critic import gather_pack
from gspo_mega.engine.process_groups import ParallelGroups


def token_values(packs: list[MicroBatch], parts: list[torch.Tensor], groups: ParallelGroups) -> np.ndarray | None:
    """[tokens] float64, of every active token, on rank 0. `parts`: this rank's [N] of each of its packs; empty on a rank
    without the last stage. Collective.
    """
    whole = [gather_pack(pack, part, groups) for pack, part in zip(packs, parts, strict=False)]
    rows = {}
    for pack, values in zip(packs, whole, strict=False):
        owners = pack.trajectory_index[pack.sequence_ids[pack.loss_mask > 0]]
        rows |= {int(row): values.double().numpy()[owners == row] for row in pack.trajectory_index if row >= 0}
    return _joined(rows, groups)


def row_values(packs: list[MicroBatch], parts: list[torch.Tensor], groups: ParallelGroups) -> np.ndarray | None:
    """[trajectories] float64 on rank 0, from one value for each sequence of a pack. Collective."""
    rows = {}
    for pack, values in zip(packs, parts, strict=False):
        rows |= {int(row): values[place].double().numpy()[None] for place, row in enumerate(pack.trajectory_index)}
    return _joined({row: value for row, value in rows.items() if row >= 0}, groups)


def _joined(rows: dict[int, np.ndarray], groups: ParallelGroups) -> np.ndarray | None:
    mine = rows if groups.reports and groups.context.rank == 0 else {}
    gathered: list = [None] * groups.world.size
    dist.all_gather_object(gathered, mine, group=groups.host.group)
    if groups.world.rank:
        return None
    found = {row: part for one in gathered for row, part in one.items()}
    assert sorted(found) == list(range(len(found)))
    return np.concatenate([found[row] for row in sorted(found)])

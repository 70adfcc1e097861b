"""What ranks run in the tests of fitting a reward model: a rank of `gspo-mega reward-model --ranks`, in a rank pool."""

from __future__ import annotations

import json
from pathlib import Path

import torch.distributed as dist
from layout_jobs import layout_config

from gspo_mega.base.errors import GspoMegaError
from gspo_mega.base.run_folder import Attempt
from gspo_mega.train.context import WorkerContext
from gspo_mega.train.fit_scores import run_fit


def fit(folder: str, parallel: dict, attempt: str, work: dict, **sections) -> dict | str | None:
    """What rank 0 returns, None from others, or why it failed."""
    ranks = {"ranks_per_node": dist.get_world_size()}
    config = layout_config(folder, {"expert_tensor": 1, **parallel}, cluster=ranks, **sections)
    place = Attempt(Path(attempt))
    if dist.get_rank() == 0:
        place.path.mkdir(parents=True)
        place.work_file.write_text(json.dumps(work))
    dist.barrier()
    is_lead = dist.get_rank() == 0
    context = WorkerContext(config, place.path, place.path, is_lead, lambda line: None, lambda: None)
    try:
        return run_fit(context)
    except GspoMegaError as error:
        return str(error)

"""What ranks run in the tests of the end of process groups."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path

import torch.distributed as dist
from layout_jobs import run_layout
from reference_jobs import kl_run

from gspo_mega.engine.process_groups import create_groups, destroy_groups


def threads_after(folder: str, layouts: list[dict]) -> dict:
    """This rank's number of threads before any layout, in the first one, and after each; those of gloo's sockets in the
    first one; and its groups at the end.
    """
    gc.collect()
    counts = dict(before=_threads(), after=[])
    groups = create_groups(**{k: v for k, v in layouts[0].items() if k != "optimizer"})
    counts["within"], counts["of_sockets"] = _threads(), _threads("gloo_tcp_loop")
    destroy_groups()
    del groups
    for layout in layouts:
        optimizer = dict(lr=1e-3, **layout.get("optimizer", {}))
        run_layout(folder, {k: v for k, v in layout.items() if k != "optimizer"}, optimizer=optimizer)
        gc.collect()
        counts["after"].append(_threads())
    kl_run(folder, folder, {}, steps=1)  # with a second, frozen model
    gc.collect()
    counts["after"].append(_threads())
    counts["groups"] = len(dist.distributed_c10d._world.pg_map)
    return counts


def _threads(name: str | None = None) -> int:
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return len(names) if name is None else names.count(name)


def die_by_a_signal(marks: str, times: int) -> str:
    """Rank 1 kills itself the first `times` times that this is called, beside ranks that wait for it; else an answer."""
    rank = dist.get_rank()
    if rank == 1 and len(os.listdir(marks)) < times:
        Path(marks, str(len(os.listdir(marks)))).touch()
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()
    return f"rank {rank}"

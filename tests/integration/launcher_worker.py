"""The real shell of a rank around work of our own: launcher_worker.py WORK [the launcher's arguments]."""

import os
import sys
import time

from gspo_mega.base.errors import DataError
from gspo_mega.train import worker
from gspo_mega.train.context import StopRequest

RANK = int(os.environ["RANK"])


def fail_while_others_wait(context):
    """Rank 1 fails with rank 0 in a collective that never ends by itself."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    context.console("rank 0 sits in a collective")
    if RANK == 1:
        time.sleep(0.5)
        raise DataError("train.jsonl:7: not JSON")
    dist.all_reduce(torch.ones(1))
    return


def hang_while_one_dies(context):
    """Rank 1 dies without a word; its connections stay open to nobody."""
    import signal

    import torch
    import torch.distributed as dist

    dist.barrier()
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))
    return


def add_up(context):
    import torch
    import torch.distributed as dist

    total = torch.tensor([RANK + 1.0])
    dist.all_reduce(total)
    context.console(f"{context.config.run.name}: {int(os.environ['WORLD_SIZE'])} ranks, sum {total.item():g}")
    return {"sum": total.item()} if RANK == 0 else None


def stop_in_order(context):
    context.console("waiting for a stop")
    stop = StopRequest(context.attempt_dir)
    while stop.check() is None:
        time.sleep(0.05)
    return {"stopped": stop.check()}


def spin(until):
    while time.monotonic() < until:
        pass


def spin_while_others_wait(context):
    """Rank 1 is busy with nothing, in Python, with rank 0 in a collective."""
    import torch
    import torch.distributed as dist

    from gspo_mega.base import progress

    dist.barrier()
    progress.enter("train")
    if RANK == 1:
        spin(time.monotonic() + 1000)
    dist.all_reduce(torch.ones(1))
    return


def stop_while_others_wait(context):
    """Rank 1 is stopped (SIGSTOP), with rank 0 in a collective."""
    import signal

    import torch
    import torch.distributed as dist

    from gspo_mega.base import progress

    dist.barrier()
    progress.enter("train")
    if RANK == 1:
        time.sleep(1.5)
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(1))
    return


def slow_but_steady(context):
    """Takes far longer than any bound, and gets something done all the time; the others wait."""
    import torch
    import torch.distributed as dist

    from gspo_mega.base import progress

    progress.enter("train")
    if RANK == 1:
        for _ in range(30):
            time.sleep(0.2)
            progress.beat()
    dist.all_reduce(torch.ones(1))
    return {"sum": 1} if RANK == 0 else None


if __name__ == "__main__":
    work = sys.argv.pop(1)
    worker.ENTRY_POINTS = {"train": (__name__, work)}
    worker.main()

"""One all-reduce between machines, for `gspo-mega doctor`, which starts this program once on each machine.

    python -m gspo_mega.launcher.all_reduce_probe --rank R --world N --address A --port P

It uses the rendezvous of the ranks, and is the only file of the doctor that imports torch. If all went well, it prints
a line that names what worked and exits with 0; otherwise it ends with an error's text.
"""

from __future__ import annotations

import argparse
import sys
import time
from datetime import timedelta

from gspo_mega.train.worker import rendezvous

_NUM_ELEMENTS = 1 << 20


def main() -> None:
    """Collective: one process per machine. Raises SystemExit for a wrong sum; errors of torch pass through."""
    parser = argparse.ArgumentParser(prog="gspo_mega.launcher.all_reduce_probe")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--address", required=True, help="address of rank 0")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--gpu", action="store_true", help="also test NCCL, on the first GPU")
    parser.add_argument("--seconds", type=float, default=600.0, help="longest wait for the other machines")
    args = parser.parse_args()
    timeout = timedelta(seconds=args.seconds)

    import torch
    import torch.distributed as dist

    store = rendezvous(args.address, args.port, args.rank, args.world, timeout, serve=args.rank == 0)
    if args.gpu:
        torch.cuda.set_device(0)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if args.gpu else "gloo",
        store=store,
        rank=args.rank,
        world_size=args.world,
        timeout=timeout,
    )
    worked = []
    for name, device in (("gloo", "cpu"), *((("NCCL", "cuda"),) if args.gpu else ())):
        tensor = torch.full((_NUM_ELEMENTS,), float(args.rank + 1), device=device)
        started = time.monotonic()
        dist.all_reduce(tensor)
        total = float(tensor[-1])
        expected = args.world * (args.world + 1) / 2
        if total != expected:
            raise SystemExit(f"{name}: the sum over {args.world} machines is {total}, not {expected}")
        worked.append(
            f"{name} all-reduce of {tensor.nbytes >> 20} MiB over {args.world} machines in"
            f" {time.monotonic() - started:.2f} s"
        )
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.write("; ".join(worked) + "\n")


if __name__ == "__main__":
    main()

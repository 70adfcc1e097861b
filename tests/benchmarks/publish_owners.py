"""Sending weights of four ranks to 1, 2, 4 and 8 receivers by gloo: gathered on rank 0 and sent from there, against
sent by each rank that has them.

    python tests/benchmarks/publish_owners.py [--megabytes 64] [--rounds 5]

Ranks and receivers are processes; each rank has a quarter of the tensors whole, as pipeline stages and expert ranks do.
`given`: what a rank gives to the receivers' group, in versions of the model; `written`: what rank 0's process
wrote to sockets, in versions.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator
from types import SimpleNamespace

import torch
import torch.distributed as dist
from publish import DEADLINE, NUM_TENSORS, Receiver, written

from gspo_mega.sync.broadcast import GroupSender
from gspo_mega.sync.broadcast_group import OwnTensors
from gspo_mega.sync.remote_sender import OrderChannel, RemoteSender, serve_send_orders
from gspo_mega.sync.servers import Deadline, Fleet

NUM_RANKS = 4
EACH = NUM_TENSORS // NUM_RANKS
Named = list[tuple[str, torch.Tensor]]


def host_group(rank: int, store: str) -> SimpleNamespace:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS)
    return SimpleNamespace(group=dist.group.WORLD, ranks=tuple(range(NUM_RANKS)))


def order(what: str = "") -> str:
    """Rank 0's word, on all ranks."""
    told = [what]
    dist.broadcast_object_list(told, 0)
    return told[0]


def other(rank: int, store: str, mine: Named, bucket_bytes: int) -> None:
    """The process of a rank that is not rank 0."""
    channel, own = OrderChannel(host_group(rank, store), 0), OwnTensors(rank)
    while (way := order()) != "end":
        if way == "owners":
            serve_send_orders(own, channel, iter(mine), bucket_bytes)
        else:
            for _, tensor in mine:
                dist.send(tensor, 0)
    own.close()


def arriving(mine: Named) -> Iterator[tuple[str, torch.Tensor]]:
    yield from mine
    for number in range(EACH, NUM_TENSORS):
        tensor = torch.empty_like(mine[0][1])
        dist.recv(tensor, number // EACH)
        yield str(number), tensor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    elements = arguments.megabytes * 2**20 // 4 // NUM_TENSORS
    tensors = [torch.randn(elements) for _ in range(NUM_TENSORS)]
    digests = [hashlib.blake2b(tensor.numpy().data, digest_size=8).hexdigest() for tensor in tensors]
    size, bucket_bytes = 4 * elements * NUM_TENSORS, 4 * elements
    owned = [[(str(n), tensors[n]) for n in range(rank * EACH, (rank + 1) * EACH)] for rank in range(NUM_RANKS)]
    receivers = [Receiver(number, digests, elements) for number in range(8)]
    store = tempfile.mktemp()
    context = multiprocessing.get_context("fork")
    for rank in range(1, NUM_RANKS):
        context.Process(target=other, args=(rank, store, owned[rank], bucket_bytes), daemon=True).start()
    host = host_group(0, store)
    others = [RemoteSender(rank, OrderChannel(host, rank)) for rank in range(1, NUM_RANKS)]

    print("| receivers | way | given by rank 0 | by one rank at most | written | s |")
    print("|---|---|---|---|---|---|")
    for count in (1, 2, 4, 8):
        chosen = receivers[:count]
        ways = {
            "gathered": GroupSender("127.0.0.1", "gloo", bucket_bytes, DEADLINE),
            "owners": GroupSender("127.0.0.1", "gloo", bucket_bytes, DEADLINE, others=others),
        }
        found: dict[str, list[tuple[float, ...]]] = {way: [] for way in ways}
        for number in range(arguments.rounds + 1):
            for way, sender in ways.items():
                before, fleet = sender.bytes_by_rank.copy(), Fleet(chosen, Deadline(DEADLINE))
                wrote = written()
                order(way)
                start = time.perf_counter()
                sender.send(fleet, chosen, iter(owned[0]) if way == "owners" else arriving(owned[0]), number)
                seconds = time.perf_counter() - start
                fleet.close()
                assert not fleet.failed, fleet.failed
                given = sender.bytes_by_rank - before
                bytes_moved = (given[0], max(given.values()), written() - wrote)
                if number:  # the first makes the groups
                    found[way].append((*(part / size for part in bytes_moved), seconds))
        for way, sender in ways.items():
            given, most, wrote, seconds = (statistics.median(c) for c in zip(*found[way], strict=True))
            print(f"| {count} | {way} | {given:.2f} | {most:.2f} | {wrote:.2f} | {seconds:.3f} |", flush=True)
            if way == "gathered":
                sender.close()
    order("end")


if __name__ == "__main__":
    main()

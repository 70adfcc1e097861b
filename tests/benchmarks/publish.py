"""Sending weights to 1, 2, 4 and 8 receivers by gloo: one group for all of them against a group each, and gathering
beside sending.

    python tests/benchmarks/publish.py [--megabytes 64] [--rounds 5]

Each receiver is a process that takes each bucket inside its request's handler, as SGLang does, and compares its
checksum. `bytes`: what rank 0 gives to groups, in versions; `written`: what its process wrote to sockets, in versions
(gloo passes a broadcast on by a tree: rank 0 sends to the first of each doubling). Tensors come from a gather that
takes as long as sending them to one receiver. `model`: the plan's formula, from gathering and sending measured alone.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import statistics
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from gspo_mega.sync.broadcast import GroupSender
from gspo_mega.sync.servers import Deadline, Fleet

DEADLINE = 60.0
NUM_TENSORS = 16


def receive(pipe: Connection, digests: list[str], elements: int) -> None:
    """One receiver's process."""
    torch.set_num_threads(1)
    limit = timedelta(seconds=DEADLINE)
    groups: dict[str, dist.ProcessGroup] = {}
    content = torch.zeros(elements)
    while True:
        what, *more = pipe.recv()
        if what == "join":
            host, port, rank, size, name = more
            store = dist.TCPStore(host, port, size, False, timeout=limit, wait_for_workers=False)
            inner = dist.PrefixStore("cpu/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store)))
            groups[name] = dist.ProcessGroupGloo(inner, rank, size, limit)
        elif what == "leave":
            groups.pop(more[0], None)
        elif what == "take":
            number, name = more
            groups[name].broadcast(content, 0).wait()
            if hashlib.blake2b(content.numpy().data, digest_size=8).hexdigest() != digests[number]:
                pipe.send("other bytes than were sent")
                continue
        pipe.send("")


class Receiver:
    """The control of one receiver."""

    tensor_parallel = 1
    generation = 1

    def __init__(self, number: int, digests: list[str], elements: int) -> None:
        self.server_id = f"receiver-{number}"
        self._lock = threading.Lock()
        self._pipe, there = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        context.Process(target=receive, args=(there, digests, elements), daemon=True).start()

    def _ask(self, *what) -> None:
        with self._lock:
            self._pipe.send(what)
            answer = self._pipe.recv()
        assert not answer, f"{self.server_id}: {answer}"

    def init_group(self, *, master_address, master_port, rank_offset, world_size, group_name, **_) -> None:
        self._ask("join", master_address, master_port, rank_offset, world_size, group_name)

    def destroy_group(self, group_name: str, **_) -> None:
        self._ask("leave", group_name)

    def update_from_distributed(self, names, dtypes, shapes, group_name, **_) -> None:
        self._ask("take", int(names[0]), group_name)

    def begin_update(self, **_) -> None: ...

    end_update = begin_update

    def set_weight_version(self, weight_version: int, **_) -> None: ...


def written() -> int:
    """Bytes that this process has written."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("wchar")))


def gathered(tensors: list[torch.Tensor], seconds: float) -> Iterator[tuple[str, torch.Tensor]]:
    for number, tensor in enumerate(tensors):
        time.sleep(seconds / len(tensors))
        yield str(number), tensor


def send(sender: GroupSender, receivers: list, tensors: list[torch.Tensor], gather_seconds: float) -> float:
    fleet = Fleet(receivers, Deadline(DEADLINE))
    start = time.perf_counter()
    sender.send(fleet, receivers, gathered(tensors, gather_seconds), 1)
    seconds = time.perf_counter() - start
    fleet.close()
    assert not fleet.failed, fleet.failed
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    elements = arguments.megabytes * 2**20 // 4 // NUM_TENSORS
    tensors = [torch.randn(elements) for _ in range(NUM_TENSORS)]
    digests = [hashlib.blake2b(tensor.numpy().data, digest_size=8).hexdigest() for tensor in tensors]
    size = 4 * elements * NUM_TENSORS
    receivers = [Receiver(number, digests, elements) for number in range(8)]

    print("| receivers | groups | bytes | written | s | sent while gathered, s | one after the other, s | model, s |")
    print("|---|---|---|---|---|---|---|---|")
    gather_seconds = None
    for count in (1, 2, 4, 8):
        ways = {"a group each": 1, "one group": None}
        senders = {way: GroupSender("127.0.0.1", "gloo", 4 * elements, DEADLINE, per) for way, per in ways.items()}
        found: dict[str, list[tuple[float, float, float]]] = {way: [] for way in ways}
        for sender in senders.values():
            send(sender, receivers[:count], tensors, 0)  # groups are made
        given = {way: sender.num_bytes_sent for way, sender in senders.items()}
        for _ in range(arguments.rounds):
            for way, sender in senders.items():
                before = written()
                alone = send(sender, receivers[:count], tensors, 0)
                out = written() - before
                gather_seconds = gather_seconds or alone
                found[way].append((alone, out / size, send(sender, receivers[:count], tensors, gather_seconds)))
        for way, sender in senders.items():
            alone, out, beside = (statistics.median(column) for column in zip(*found[way], strict=True))
            sent = (sender.num_bytes_sent - given[way]) / (2 * arguments.rounds * size)
            model = max(alone, gather_seconds or 0) + min(alone, gather_seconds or 0) / NUM_TENSORS
            print(
                f"| {count} | {way} | {sent:.0f} | {out:.1f} | {alone:.3f} | {beside:.3f} |"
                f" {alone + (gather_seconds or 0):.3f} | {model:.3f} |",
                flush=True,
            )
            sender.close()


if __name__ == "__main__":
    main()

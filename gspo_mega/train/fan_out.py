"""One message to many ranks: rank 0 sends it once, and its receivers pass it on among themselves.

The receivers form a tree, in which each rank sends to two others; they pass a chunk on while the next one comes. What
rank 0 sends does not depend on how many receivers there are. All of it goes over the host group, rank to rank: no
further process groups are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from gspo_mega.engine.process_groups import Group

CHUNK_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Place:
    """A receiver's place: the rank that it receives from, and those that it sends to."""

    parent: int
    children: tuple[int, ...]

    @classmethod
    def of(cls, rank: int, receivers: Sequence[int], source: int) -> Place:
        """`receivers`: all of a message's, of which `rank` is one; `source` sends to the first of them."""
        index = receivers.index(rank)
        parent = receivers[(index - 1) // 2] if index else source
        return cls(parent, tuple(receivers[2 * index + 1 : 2 * index + 3]))


class Sending:
    """A message on its way to one rank. It must not change before `wait` has returned."""

    def __init__(self, message: np.ndarray, rank: int, host: Group) -> None:
        self._works = [_start(torch.tensor([len(message)], dtype=torch.int64), rank, host)]
        self._works += [_start(chunk, rank, host) for chunk in torch.from_numpy(message).split(CHUNK_BYTES)]

    def wait(self) -> None:
        """Returns once the message may change."""
        for work in self._works:
            work.wait()


def receive(place: Place, host: Group) -> np.ndarray:
    """The next message from the parent, [bytes] uint8, when the children have it, too."""
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, src=place.parent, group=host.group)
    works = [_start(size, child, host) for child in place.children]
    message = torch.empty(int(size), dtype=torch.uint8)
    for chunk in message.split(CHUNK_BYTES):
        dist.recv(chunk, src=place.parent, group=host.group)
        works += [_start(chunk, child, host) for child in place.children]
    for work in works:
        work.wait()
    return message.numpy()


def _start(tensor: torch.Tensor, rank: int, host: Group) -> dist.Work:
    work = dist.isend(tensor, dst=rank, group=host.group)
    assert work is not None, "this rank is not in the host group"
    return work

"""The hashes of one publish: every tensor that is verified is hashed once, as it is sent or written.

A publisher passes each tensor that this rank owns to `add`, as it is sent, and all ranks then exchange what they have
with `collect`. `SentDigests` has the trainer's own digests, of every tensor by the name under which it is sent
(`verify: replicas`). `SentChecksums` has the checksums that servers must report, by the server's names (`verify:
tensors`). The same bytes leave the rank and are hashed, so a fault of the gather is not found here but by
`checkpoint/shard_check.py`.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from gspo_mega.checkpoint.collectives import all_gather_json
from gspo_mega.checkpoint.gather import PolicyTensors
from gspo_mega.checkpoint.hf_export import tensor_digest
from gspo_mega.checkpoint.quantized import PublishedForm
from gspo_mega.sync.verify import ExpectedChecksums, ServerTensors, server_tensor_name


@dataclass(frozen=True)
class Hashed:
    """What all ranks hashed: hexadecimal hashes by name, the bytes of all ranks together, and the seconds of the rank
    that took longest.
    """

    hashes: dict[str, str]
    num_bytes: int
    seconds: float


class Hashes(Protocol):
    """What is hashed of one publish, on one rank."""

    def add(self, name: str, tensor: torch.Tensor) -> str | None:
        """Hash a tensor, whole as it is sent and local, if it is verified. Tensors come in the order of the table.
        Returns its SHA-256 (hexadecimal), or None if the tensor has no hash of its own.
        """
        ...

    def collect(self) -> Hashed:
        """Return what all ranks hashed. Collective over all ranks, once, after the last `add`."""
        ...


class SentDigests:
    """The SHA-256 of each tensor that is sent, under the name with which it is sent."""

    def __init__(self, policy: PolicyTensors, tensors: ServerTensors, chosen: Collection[str] | None) -> None:
        """`chosen`: the server's tensors that are verified; None for all."""
        self._policy, self._names, self._chosen = policy, tensors.names, chosen
        self._found: dict[str, str] = {}
        self._num_bytes, self._seconds = 0, 0.0

    def add(self, name: str, tensor: torch.Tensor) -> str | None:
        if self._chosen is not None and self._names[name] not in self._chosen:
            return None
        begun = time.perf_counter()
        self._found[name] = digest = tensor_digest(tensor)
        self._seconds += time.perf_counter() - begun
        self._num_bytes += tensor.nbytes
        return digest

    def collect(self) -> Hashed:
        return _together(self._policy, self._found, self._num_bytes, self._seconds)


class SentChecksums:
    """The checksums that servers must report, which are of fused tensors.

    A server's tensor is hashed on its home, the rank that has its first part. Parts that another rank sends, which only
    experts of several expert-parallel ranks have, are kept in the host's memory and go to the home in `collect`.
    """

    def __init__(
        self,
        policy: PolicyTensors,
        form: PublishedForm,
        expected: ExpectedChecksums,
        chosen: Collection[str] | None,
    ) -> None:
        """`chosen`: the server's tensors that are verified; None for all."""
        self._policy, self._expected = policy, expected
        self._homes: dict[str, int] = {}
        self._later: dict[str, tuple[int, int, torch.dtype, tuple[int, ...]]] = {}
        self._kept: dict[str, torch.Tensor] = {}
        self._num_bytes, self._seconds = 0, 0.0
        self._chosen: set[str] = set()
        spread: set[str] = set()
        for entry, _ in policy.stored():
            server, owner = server_tensor_name(policy.spec, entry), policy.owner(entry)
            home = self._homes.setdefault(server, owner)
            if home != owner:
                spread.add(server)
            for name, (dtype, shape) in form.described(entry).items():
                if chosen is None or expected.names[name] in chosen:
                    self._chosen.add(name)
                    if server in spread:  # this part and those after it wait for the parts before them
                        self._later[name] = (owner, home, dtype, shape)

    def add(self, name: str, tensor: torch.Tensor) -> str | None:
        if name in self._later:
            self._kept[name] = tensor.detach().to("cpu", copy=True)
        elif name in self._chosen:
            self._hash(name, tensor)
        return None

    def _hash(self, name: str, tensor: torch.Tensor) -> None:
        begun = time.perf_counter()
        self._expected.add(name, tensor)
        self._seconds += time.perf_counter() - begun
        self._num_bytes += tensor.nbytes

    def collect(self) -> Hashed:
        host, me = self._policy.groups.host, self._policy.groups.world.rank
        # All ranks go through these parts in the same order, so no two ranks wait for each other.
        for name, (owner, home, dtype, shape) in self._later.items():
            tensor = self._kept.pop(name, None)
            if owner == me != home:
                assert tensor is not None, f"{name} was due"
                dist.send(tensor.contiguous().view(-1).view(torch.uint8), host.ranks[home], group=host.group)
            elif home == me != owner:
                tensor = torch.empty(shape, dtype=dtype)
                dist.recv(tensor.view(-1).view(torch.uint8), host.ranks[owner], group=host.group)
            if home == me:
                assert tensor is not None, f"{name} was due"
                self._hash(name, tensor)
        return _together(self._policy, self._expected.checksums(), self._num_bytes, self._seconds)


def _together(policy: PolicyTensors, mine: dict[str, str], num_bytes: int, seconds: float) -> Hashed:
    parts = all_gather_json([mine, num_bytes, seconds], policy.groups.host)
    return Hashed(
        {name: value for found, _, _ in parts for name, value in found.items()},
        sum(count for _, count, _ in parts),
        max(taken for _, _, taken in parts),
    )

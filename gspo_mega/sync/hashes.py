"""What one publish verifies, and the hashes of that: a tensor is hashed once, as it is sent or written.

A publisher passes each tensor that this rank owns to `add`, as it is sent, and all ranks then exchange what they have
with `collect`. `SentDigests` has the trainer's own digests, of every tensor by the name under which it is sent
(`verify: replicas`). `SentChecksums` has the checksums that servers must report, by the server's names (`verify:
tensors`). The same bytes leave the rank and are hashed, so a fault of the gather is not found here but by
`checkpoint/shard_check.py`.

`Rotation` says which tensors these are (`publish.verify_all_every`). It divides them into as many parts of about equal
bytes as the key says, in the order of the model's table, so that a part has whole layers where it can. Publishes verify
the parts in turns. `skipped` writes the rest as SGLang's weight checker takes it: as pieces of names, and a tensor
whose name has such a piece in it is not hashed.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Mapping
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
        """Hash a tensor if it is verified. It is local, and whole as it is sent; call this in the order of the table.
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


_LAYER = re.compile(r".*?\.layers\.\d+\.")


class Rotation:
    """The tensors of a server in `num_parts` parts. Each tensor is in at least one of them."""

    def __init__(self, sizes: Mapping[str, int], num_parts: int) -> None:
        """`sizes`: the bytes of each of the server's tensors, by name, in the order of the table."""
        units = _units(sizes)
        total = sum(sizes.values())
        parts: list[list[str]] = [[] for _ in range(num_parts)]
        before = 0
        for unit in units:
            size = sum(sizes[name] for name in unit)
            middle = before + size / 2
            parts[min(num_parts - 1, int(middle * num_parts / max(1, total)))] += unit
            before += size
        # With fewer tensors than parts, or a very large tensor: no publish is left without one to verify.
        self._parts = [
            frozenset(part or units[index * len(units) // num_parts] if units else ())
            for index, part in enumerate(parts)
        ]

    def part(self, turn: int, num_turns: int = 1) -> frozenset[str]:
        """Return the names of the tensors that the publish number `turn` verifies, if each is verified in `num_turns`
        publishes in a row.
        """
        return frozenset().union(*(self._parts[(turn + more) % len(self._parts)] for more in range(num_turns)))


def _units(names: Iterable[str]) -> list[list[str]]:
    """Return the tensors that can only be chosen together: those whose name begins with another one's, such as scales.

    Skipping `x.weight` would also skip `x.weight_scale`, because a piece of its name is enough.
    """
    names = list(names)
    root, units = "", {}
    roots = {name: (root := name if not root or not name.startswith(root) else root) for name in sorted(names)}
    for name in names:
        units.setdefault(roots[name], []).append(name)
    return list(units.values())


def skipped(names: Iterable[str], chosen: Collection[str]) -> list[str]:
    """Return pieces of names that occur in all of `names` that are not chosen, and in none that is: a layer's beginning
    for a whole layer, and otherwise the tensor's whole name.
    """
    kept_layers = {layer[0] for name in chosen if (layer := _LAYER.match(name)) is not None}
    pieces: dict[str, None] = {}
    for name in names:
        if name not in chosen:
            layer = _LAYER.match(name)
            pieces[name if layer is None or layer[0] in kept_layers else layer[0]] = None
    return list(pieces)

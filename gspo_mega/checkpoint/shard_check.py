"""A check of the gather: does a whole tensor consist of what the ranks hold?

A publish hashes the tensors that it sends, so a fault of the gather would be in the checksum that servers must report,
and comparing with servers could not find it. `ShardCheck` finds it: every rank sums its own parameters, the sums travel
as JSON over the host group and not with the tensors, and the rank that has a whole tensor sums each rank's rows and
columns of it again. The sums are computed on the parameter's device. They find faults, not attacks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import cache

import torch

from gspo_mega.base.errors import PublishError
from gspo_mega.checkpoint.collectives import all_gather_json
from gspo_mega.checkpoint.gather import PolicyTensors
from gspo_mega.checkpoint.hf_folder import part_of
from gspo_mega.models.parameter_names import tensor_group
from gspo_mega.models.tensors import TensorEntry, parameter_blocks

_CHUNK_WORDS = 2**18
# Odd, so that no chunk's sum is lost.
_CHUNK_FACTOR = 0x5851F42D4C957F2D
_SHOWN = 5


class ShardCheck:
    """The sums of what the ranks hold of some tensors, against which `over` compares whole ones, once."""

    def __init__(self, policy: PolicyTensors, dtype: torch.dtype, names: Collection[str] | None = None) -> None:
        """Sum this rank's shares in `dtype`, in which they are gathered. `names`: the tensors to check, as files have
        them; None for all. Collective over all ranks.
        """
        self._policy = policy
        self._parts = {whole.name: parts for whole, parts in policy.stored() if names is None or whole.name in names}
        chosen = {part.name for parts in self._parts.values() for part in parts}
        places: list[tuple[str, int, int]] = []
        sums: list[torch.Tensor] = []
        for entries, share in policy.shares(dtype, chosen):
            for entry in entries:
                group = tensor_group(policy.groups, entry)
                blocks = parameter_blocks(policy.spec, entry, group.size, group.rank)
                places.append((entry.name, group.rank, len(blocks)))
                sums += [position_sum(share.narrow(b.dim, b.local_start, b.length)) for b in blocks]
        values, mine = iter(_values(sums)), {}
        for name, rank, count in places:
            mine[name] = [rank, [next(values) for _ in range(count)]]
        self._compared: list[tuple[str, int]] = []
        self._found: list[torch.Tensor] = []
        self._wanted: list[int] = []
        self._sums: dict[str, dict[int, list[int]]] = {}
        for found in all_gather_json(mine, policy.groups.host):
            for name, (rank, of_blocks) in found.items():
                self._sums.setdefault(name, {})[rank] = of_blocks

    def over(self, tensors: Iterator[tuple[TensorEntry, torch.Tensor]]) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
        """Yield (entry, tensor) as `PolicyTensors.owned` does. After the last one, because other ranks take part in all
        of them, raises PublishError naming the tensors that are not what the ranks hold.
        """
        for entry, tensor in tensors:
            self.compare(entry, tensor)
            yield entry, tensor
        self.finish()

    def compare(self, entry: TensorEntry, tensor: torch.Tensor) -> None:
        """Sum each rank's part of a whole tensor, [entry.shape] and local. `finish` compares."""
        for part in self._parts.get(entry.name, ()):
            view = tensor if part.stack is None else part_of(tensor, part)
            size = 1 if part.sharding == "replicated" else tensor_group(self._policy.groups, part).size
            for rank in range(size):
                blocks = parameter_blocks(self._policy.spec, part, size, rank)
                self._compared += [(entry.name, rank)] * len(blocks)
                self._found += [position_sum(view.narrow(b.dim, b.start, b.length)) for b in blocks]
                self._wanted += self._sums[part.name][rank]

    def finish(self) -> None:
        """Raise PublishError naming the tensors that are not what the ranks hold."""
        pairs = zip(self._compared, _values(self._found), self._wanted, strict=True)
        wrong = list(dict.fromkeys(f"{name} (rank {rank})" for (name, rank), here, there in pairs if here != there))
        if wrong:
            more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
            raise PublishError(
                f"what was gathered is not what the ranks hold: {', '.join(wrong[:_SHOWN])}{more}. In brackets: the"
                " tensor-parallel rank whose part of the tensor is wrong. The version is not committed"
            )


def position_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a local tensor's words, each times a factor of its place: int64 modulo 2**64, 0-dim, on the
    tensor's device. Any shape and dtype; a word has four bytes, or one if the tensor's bytes are no multiple of four. A
    single changed word always changes the sum, and words that change places do with near certainty.
    """
    bits = tensor.detach().contiguous().view(-1).view(torch.uint8)
    bits = bits.view(torch.int32) if bits.numel() % 4 == 0 else bits
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    factors = _factors(tensor.device)
    for chunk in bits.split(_CHUNK_WORDS):
        total = total * _CHUNK_FACTOR + (chunk.to(torch.int64) * factors[: chunk.numel()]).sum()
    return total


@cache
def _factors(device: torch.device) -> torch.Tensor:
    """Return a different positive factor below 2**31 for each place in a chunk, in no simple order: int64."""
    mask, place = 2**31 - 1, torch.arange(1, _CHUNK_WORDS + 1, dtype=torch.int64, device=device)
    # Each step maps 31 bits to 31 bits one to one, and 0 to 0.
    mixed = place * 0x1E3779B1 & mask
    mixed = (mixed ^ mixed >> 15) * 0x05EBCA77 & mask
    return mixed ^ mixed >> 13


def _values(sums: list[torch.Tensor]) -> list[int]:
    return torch.stack(sums).tolist() if sums else []

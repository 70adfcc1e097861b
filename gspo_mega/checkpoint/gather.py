"""Gather: from the policy's shards to whole Hugging Face tensors, one at a time.

`PolicyTensors` assembles tensors over tensor-parallel groups and brings them to another rank. It has one parameter in
memory at a time, never the model. `hf_export.py` writes the tensors to files, and `sync/broadcast.py` sends them to
servers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from gspo_mega.base import progress
from gspo_mega.base.errors import ModelError
from gspo_mega.checkpoint.collectives import all_gather_json, raise_together
from gspo_mega.checkpoint.hf_folder import stacked
from gspo_mega.checkpoint.quantized import plain_values
from gspo_mega.models.parameter_names import canonical_parameters, replica_group, table_by_parameter, tensor_group
from gspo_mega.models.spec import ModelSpec
from gspo_mega.models.tensors import Stacking, TensorEntry, parameter_blocks, stackings

if TYPE_CHECKING:
    from gspo_mega.engine.model import PolicyModel
    from gspo_mega.engine.process_groups import ParallelGroups


class PolicyTensors:
    """The whole model as Hugging Face tensors, spread over ranks: each tensor has one owner.

    The owner of a tensor is rank 0 of its tensor (or expert-tensor) group, on the pipeline stage and expert-parallel
    rank that hold it, in the first data-parallel replica.
    """

    _is_stacked = False  # whether files have some of the tensors in stacks

    def __init__(
        self,
        spec: ModelSpec,
        groups: ParallelGroups,
        chunks: Sequence[PolicyModel],
        values: Callable[[nn.Parameter], torch.Tensor] | None = None,
    ) -> None:
        """`chunks` are this rank's unwrapped GPT chunks. `values` selects what to gather instead of a parameter's
        values, for example its gradient, as a tensor of the parameter's local shape. Buffers are then left out.
        Collective over all ranks.

        Raises ModelError, the same on every rank, if the chunks do not match the family's table, or if a parameter has
        no owner or two.
        """
        self.spec = spec
        self.groups = groups
        self._chunks = chunks
        problems = []
        try:
            found = self._find()
            if values is not None:
                found = {name: values(p) for name, p in found.items() if isinstance(p, nn.Parameter)}
            self._parameters = found
        except ModelError as error:
            problems.append(str(error))
        raise_together(problems, groups.host, ModelError, "the model does not fit its tensor table")
        self._adapters = {} if values else {a.parameter: a for chunk in chunks for a in chunk.low_rank()}
        self.table = {p: e for p, e in self._table().items() if values is None or not e[0].is_buffer}
        self._is_stacked = any(entry.stack is not None for entries in self.table.values() for entry in entries)
        self._takes_part = {p for p, e in self.table.items() if p in self._parameters and self._replica(e[0])}
        mine = [p for p, e in self.table.items() if p in self._takes_part and self._is_lead(e[0])]
        self.owners: dict[str, int] = {}
        for rank, owned in enumerate(all_gather_json(mine, groups.host)):
            for parameter in owned:
                if parameter in self.owners:
                    raise ModelError(f"{parameter} is owned by ranks {self.owners[parameter]} and {rank}")
                self.owners[parameter] = rank
        if missing := [p for p in self.table if p not in self.owners]:
            raise ModelError(f"{len(missing)} parameters are on no rank: {', '.join(missing[:5])}")

    def _find(self) -> dict[str, torch.Tensor]:
        """Return this rank's parts by canonical name."""
        return canonical_parameters(self.spec, self.groups, self._chunks)

    def _table(self) -> dict[str, list[TensorEntry]]:
        """Return the tensors in each parameter, by canonical name."""
        return table_by_parameter(self.spec)

    def config_json(self, raw: dict[str, Any]) -> dict[str, Any]:
        """Return the config.json of an export, made from that of the folder that describes the model."""
        return raw

    def _values(self, parameter: str) -> torch.Tensor:
        """Return what is gathered of this rank's part: the weight, with its low-rank adapter merged into it if any."""
        values = plain_values(self._parameters[parameter])
        return self._adapters[parameter].merged(values) if parameter in self._adapters else values

    def _replica(self, entry: TensorEntry) -> bool:
        """Whether this rank takes part in gathering the tensor. Data-parallel copies do not."""
        if entry.sharding == "replicated" and not self._is_lead(entry):
            return False
        return replica_group(self.groups, entry).rank == 0

    def _is_lead(self, entry: TensorEntry) -> bool:
        return tensor_group(self.groups, entry).rank == 0

    def owned(self, dtype: torch.dtype) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
        """Yield (entry, tensor) of the tensors, as files have them, that this rank owns, in table order. A stack of
        experts belongs to the rank that owns its first part.

        A tensor has the whole shape `entry.shape`, is in `dtype` (a buffer in fp32) and on the parameter's device. It
        may share memory with a parameter, so read it and do not keep it. Collective over the tensor groups, and with
        stacks over all ranks: every rank must run the iterator to its end.
        """
        if self._is_stacked:
            yield from self.brought_to(self.owner, dtype)
            return
        for chunk in self._chunks:
            chunk.await_parameters()
        for parameter, entries in self.table.items():
            if parameter in self._takes_part:
                yield from self._gather(parameter, entries, dtype)

    def shares(self, dtype: torch.dtype, names: Collection[str]) -> Iterator[tuple[list[TensorEntry], torch.Tensor]]:
        """Yield (entries, share) of the parameters of which this rank's share is gathered: those entries that are in
        `names`, and the share in its local shape and in `dtype` (a buffer in fp32). It may share memory with a
        parameter. Only this rank's memory is read.
        """
        for chunk in self._chunks:
            chunk.await_parameters()
        for parameter, entries in self.table.items():
            chosen = [entry for entry in entries if entry.name in names]
            if chosen and parameter in self._takes_part:
                yield chosen, self._values(parameter).to(entry_dtype(entries[0], dtype))

    def _gather(
        self, parameter: str, entries: list[TensorEntry], dtype: torch.dtype
    ) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
        progress.beat()
        group = tensor_group(self.groups, entries[0])
        share = self._values(parameter).to(entry_dtype(entries[0], dtype))
        if group.size == 1 or entries[0].sharding == "replicated":
            shares = [share]
        else:
            share = share.contiguous()
            shares = [torch.empty_like(share) for _ in range(group.size)] if group.rank == 0 else []
            dist.gather(share, shares or None, dst=group.ranks[0], group=group.group)
        if not shares:
            return
        for entry in entries:
            yield entry, self._assemble(entry, shares)

    def _assemble(self, entry: TensorEntry, shares: list[torch.Tensor]) -> torch.Tensor:
        if entry.sharding == "replicated":
            return shares[0]
        whole = torch.empty(entry.shape, dtype=shares[0].dtype, device=shares[0].device)
        for rank, share in enumerate(shares):
            for block in parameter_blocks(self.spec, entry, len(shares), rank):
                part = share.narrow(block.dim, block.local_start, block.length)
                whole.narrow(block.dim, block.start, block.length).copy_(part)
        return whole

    def stream(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) of the whole model in table order on rank 0, and nothing on other ranks. See
        `brought_to`.
        """
        return ((entry.name, tensor) for entry, tensor in self.brought_to(lambda _: 0, dtype))

    def brought_to(
        self, home: Callable[[TensorEntry], int], dtype: torch.dtype
    ) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
        """Yield (entry, tensor) as files have them, in table order, of the tensors whose `home` is this rank. Their
        owners send them there.

        A tensor has its whole Hugging Face shape and is in `dtype` (a buffer in fp32). It may share memory with a
        parameter. Collective over all ranks: every rank must run the iterator to its end, even if its own use of a
        tensor fails.
        """
        if not self._is_stacked:
            return self._parts_brought_to(home, dtype)
        homes = {part.name: home(whole) for whole, parts in self.stored() for part in parts}
        return stacked(self.spec, self._parts_brought_to(lambda entry: homes[entry.name], dtype))

    @property
    def is_stacked(self) -> bool:
        """Whether files have some of the tensors in stacks, whose parts may have several owners."""
        return self._is_stacked

    def stored(self) -> Iterator[Stacking]:
        """Yield the tensors as files have them, in table order, each with its parts."""
        return stackings(entry for entries in self.table.values() for entry in entries)

    def owner(self, entry: TensorEntry) -> int:
        """Return the rank that owns a tensor as files have it."""
        return self.owners[entry.parameter]

    def _parts_brought_to(
        self, home: Callable[[TensorEntry], int], dtype: torch.dtype
    ) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
        def itself(entry: TensorEntry, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
            yield entry.name, tensor

        def described(entry: TensorEntry) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
            return {entry.name: (entry_dtype(entry, dtype), entry.shape)}

        for entry, _, tensor in self._travel(home, dtype, itself, described):
            yield entry, tensor

    def passed_on(
        self,
        home: Callable[[TensorEntry], int],
        dtype: torch.dtype,
        made: Callable[[TensorEntry, torch.Tensor], Iterator[tuple[str, torch.Tensor]]],
        described: Callable[[TensorEntry], Mapping[str, tuple[torch.dtype, tuple[int, ...]]]],
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, part), in table order, of what the owners make of the tensors whose `home` is this rank.

        `made` yields the parts of a whole tensor, [entry.shape] in `dtype`, on its owner. `described` says their dtypes
        and shapes, by name and in that order. Collective over all ranks: every rank must run the iterator to its end.
        Not for models whose files have stacks of experts.
        """
        assert not self._is_stacked, "a stack has parts of several owners"
        for _, name, part in self._travel(home, dtype, made, described):
            yield name, part

    def _travel(
        self,
        home: Callable[[TensorEntry], int],
        dtype: torch.dtype,
        made: Callable[[TensorEntry, torch.Tensor], Iterator[tuple[str, torch.Tensor]]],
        described: Callable[[TensorEntry], Mapping[str, tuple[torch.dtype, tuple[int, ...]]]],
    ) -> Iterator[tuple[TensorEntry, str, torch.Tensor]]:
        device, me = self._meet(), self.groups.world.rank
        # All ranks go through the table in the same order, so no two ranks wait for each other.
        for parameter, entries in self.table.items():
            owner = self.owners[parameter]
            mine = self._gather(parameter, entries, dtype) if parameter in self._takes_part else iter(())
            for entry in entries:
                to, own = home(entry), next(mine, None)
                if owner == me:
                    assert own is not None and own[0] is entry, f"{entry.name} was due"
                    for name, part in made(*own):
                        if to == me:
                            yield entry, name, part
                        else:
                            self._move(dist.isend, _as_bytes(part.contiguous()), to)
                elif to == me:
                    for name, (part_dtype, shape) in described(entry).items():
                        part = torch.empty(shape, dtype=part_dtype, device=device)
                        self._move(dist.irecv, _as_bytes(part), owner)
                        yield entry, name, part

    def _meet(self) -> torch.device:
        """Return the parameters' device, when all ranks may send to each other and all parameters are there."""
        device = next(iter(self._parameters.values())).device
        if device.type == "cuda" and self.groups.world.size > 1:
            # NCCL connects a group in its first operation, in which all ranks must take part. Only then may two ranks
            # send to each other.
            dist.all_reduce(torch.zeros(1, device=device), group=self.groups.world.group)
        for chunk in self._chunks:
            chunk.await_parameters()
        return device

    def _move(self, operation: Callable[..., dist.Work | None], tensor: torch.Tensor, peer: int) -> None:
        """Send to global rank `peer`, or receive from it, as a batch of one operation.

        A plain send would make NCCL connect the two ranks separately, with buffers for every owner on the receiver's
        GPU.
        """
        for work in dist.batch_isend_irecv([dist.P2POp(operation, tensor, peer, self.groups.world.group)]):
            work.wait()


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the contiguous tensor's memory, flat: not every dtype can be sent."""
    return tensor.view(-1).view(torch.uint8)


def entry_dtype(entry: TensorEntry, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a tensor in a checkpoint of `dtype`: a buffer stays fp32."""
    return torch.float32 if entry.is_buffer else dtype


def gather_stream(
    spec: ModelSpec, groups: ParallelGroups, chunks: Sequence[PolicyModel], dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, whole tensor in `dtype`) of the whole model on rank 0. See `PolicyTensors.brought_to` for shape and
    memory.

    Collective over all ranks.
    """
    return PolicyTensors(spec, groups, chunks).stream(dtype)

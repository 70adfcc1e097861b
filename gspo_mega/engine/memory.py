"""Moves the trainer's parameters, gradients and optimizer state to the host and back, so that servers can have the GPU.

A storage is emptied in place (`resize_(0)`) and filled again, so that every view of it (buckets, shards, gradients of
parameters, moments in an optimizer's state) stays valid. Gradients are zeroed before each backward pass, so they have
no copy. The train loop decides when parts move.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any, Literal

import torch

if TYPE_CHECKING:
    from gspo_mega.engine.policy import PolicyEngine
    from gspo_mega.engine.reference import ReferencePolicy


Part = Literal["parameters", "gradients", "optimizer", "reference"]
# Each copy on the host begins at a multiple of this many bytes.
_ALIGNMENT = 512
PARTS: tuple[Part, ...] = ("parameters", "gradients", "optimizer", "reference")


class DeviceMemory:
    """Moves parts of one rank's state. `frozen`: the reference of a KL term and the teacher, if there are any.

    While a part is away, nothing may read or write it. Move parts only between optimizer steps: gradients come back as
    zeros.
    """

    def __init__(self, engine: PolicyEngine, *frozen: ReferencePolicy) -> None:
        self._engine, self._frozen = engine, frozen
        self._away: dict[Part, list[_Emptied]] = {}
        # Copies on the host are kept: page-locking them anew each step would take longer than the copying.
        self._host: dict[int, torch.Tensor] = {}

    @property
    def present(self) -> frozenset[Part]:
        """The parts that are on the device now."""
        return frozenset(PARTS) - self._away.keys()

    def keep(self, parts: Collection[Part]) -> int:
        """Free all other parts on the device. Returns the bytes that this freed."""
        going: list[Part] = [part for part in PARTS if part in self.present and part not in parts]
        if not going:
            return 0
        for chunk in self._engine.chunks:
            chunk.await_parameters()  # overlapped gathers of the last step may not be complete
        freed = 0
        for part in going:
            storages, keeps = self._storages(part), part != "gradients"
            if keeps:
                self._make_room(storages)
            emptied = [self._empty(storage, keeps) for storage in storages]
            self._away[part] = emptied
            freed += sum(one.num_bytes for one in emptied)
        if self._on_gpu:
            gc.collect()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # another process cannot use memory that the allocator keeps
        return freed

    def restore(self, parts: Collection[Part]) -> int:
        """Bring those of these parts back that are away. Returns the bytes that this took."""
        taken = 0
        for part in PARTS:
            if part not in parts or part not in self._away:
                continue
            for one in self._away.pop(part):
                one.fill()
                taken += one.num_bytes
        if taken and self._on_gpu:
            torch.cuda.synchronize()
        return taken

    @property
    def _on_gpu(self) -> bool:
        return next(iter(self._engine.chunks[0].parameters())).is_cuda

    def _make_room(self, storages: list[torch.UntypedStorage]) -> None:
        """Make one block on the host for those of `storages` that have no copy yet. torch rounds small page-locked
        blocks to powers of two (`train/gpu_variables.py`), and a part may have thousands.
        """
        new = [storage for storage in storages if storage._cdata not in self._host]
        if not new:
            return
        sizes = [-(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT for storage in new]
        block = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=self._on_gpu)
        for storage, room in zip(new, block.split(sizes), strict=True):
            self._host[storage._cdata] = room[: storage.nbytes()]

    def _empty(self, storage: torch.UntypedStorage, keeps: bool) -> _Emptied:
        host = self._host[storage._cdata] if keeps else None
        if host is not None:
            host.copy_(_bytes(storage))
        emptied = _Emptied(storage, storage.nbytes(), host)
        storage.resize_(0)
        return emptied

    def _storages(self, part: Part) -> list[torch.UntypedStorage]:
        """Every storage of the part once, and none that belongs to another part."""
        device = next(iter(self._engine.chunks[0].parameters())).device
        seen: set[int] = set()
        if part == "optimizer":  # in fp32 without sharding it steps the parameters themselves
            others = (tensor for other in ("parameters", "gradients") for tensor in self._tensors(other))
            seen = {tensor.untyped_storage().data_ptr() for tensor in others}
        found = []
        for tensor in self._tensors(part):
            storage = tensor.untyped_storage()
            if tensor.device == device and storage.nbytes() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                found.append(storage)
        return found

    def _tensors(self, part: Part) -> Iterator[torch.Tensor]:
        engine = self._engine
        if part == "parameters":
            for chunk in engine.chunks:
                yield from chunk.parameters()
            for buffer in self._buffers():
                if buffer.param_data is not None:
                    yield buffer.param_data
        elif part == "gradients":
            for buffer in self._buffers():
                yield buffer.grad_data
        elif part == "optimizer":
            for inner in engine.optimizer.chained_optimizers:
                yield from _tensors_of(inner)
        else:
            for model in self._frozen:
                for chunk in model.chunks:
                    yield from chunk.parameters()

    def _buffers(self) -> Iterator[Any]:
        for chunk in self._engine.wrapped:
            wrapped: Any = chunk  # Megatron's `buffers` is a list, in place of a module's method of that name
            yield from (*wrapped.buffers, *wrapped.expert_parallel_buffers)


class _Emptied:
    """A storage without memory, and its bytes on the host. Without them it is filled with zeros again."""

    def __init__(self, storage: torch.UntypedStorage, num_bytes: int, host: torch.Tensor | None) -> None:
        self._storage, self.num_bytes, self._host = storage, num_bytes, host

    def fill(self) -> None:
        self._storage.resize_(self.num_bytes)
        if self._host is None:
            _bytes(self._storage).zero_()
        else:
            _bytes(self._storage).copy_(self._host)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _tensors_of(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors that one of Megatron's optimizers holds: main parameters, moments, and those of Transformer
    Engine's Adam. On a rank without such parameters Megatron has a stub, whose attribute `optimizer` may be None.
    """
    inner = getattr(optimizer, "optimizer", None)
    if inner is None:
        return
    for group in inner.param_groups:
        yield from group["params"]
    for state in inner.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))

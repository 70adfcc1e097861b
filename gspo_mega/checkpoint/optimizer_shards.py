"""The state of the distributed optimizer in a checkpoint: every data-parallel rank writes and reads about its own part.

Megatron's `fully_reshardable` form has one tensor of the parameter's shape for each parameter and kind of state (fp32
parameter and both moments), which any layout can read. Before a save and before a load, Megatron itself gathers the
whole state of a model-parallel place, 12 bytes per parameter, on every data-parallel rank. Here, for a save, one of the
ranks that own a part of a parameter holds all of it, and the others send it their parts, some parameters at a time. A
load reads some parameters at a time and keeps the rank's parts of them.

The result has the same names and shapes as Megatron's. Its numbers are also the same, except where Megatron's are
wrong: Megatron drops the padding between overlapped buckets, and then looks for parameters where they were before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from gspo_mega.checkpoint.collectives import all_gather_json
from gspo_mega.cpu.backend import is_cpu_backend
from gspo_mega.engine.optimizer import free_replaced_copies
from gspo_mega.engine.process_groups import RankGroup

# The bytes that a rank reads at a time, and the elements of one kind that ranks exchange at a time. It is always at
# least one parameter, and for a rank without others all layers of one.
READ_BYTES, EXCHANGED_ELEMENTS = 2 * 1024**3, 2**27
_KINDS = ("param", "exp_avg", "exp_avg_sq")
_FP32_BYTES = 4


def optimizer_state(
    optimizer: ChainedOptimizer, model_state: dict[str, Any], metadata: dict[str, Any], *, loading: bool
) -> dict[Any, Any]:
    """Return the sharded state of all parts, in the form of `ChainedOptimizer.sharded_state_dict`. Collective.

    `model_state` is the sharded state of the weights; the optimizer's tensors take over its keys and places. With
    `loading`, the state that `read_optimizer_state` reads later is left out.
    """
    parts = optimizer.chained_optimizers
    if len(parts) > 1:
        optimizer._synchronize_steps()
    states = {}
    for index, part in enumerate(parts):
        if not isinstance(part, DistributedOptimizer):
            states[index] = part.sharded_state_dict(model_state, loading, metadata=metadata)
            continue
        with _without_fp32_copies(part):
            states[index] = part.state_dict()
        if loading:
            part.load_state_dict(part.state_dict())  # allocates the tensors to read into
        else:
            form = metadata["distrib_optim_sharding_type"]
            states[index] |= {"param_state": _held(part, model_state), "param_state_sharding_type": form}
    return states if len(parts) > 1 else states[0]


@contextmanager
def _without_fp32_copies(part: DistributedOptimizer) -> Iterator[None]:
    """Inside this context Transformer Engine's Adam gives its state to a state dict as it is. It would cast all small
    moments to fp32 first, on the GPU, and Megatron's state dict has none of them.
    """
    inner: Any = part.optimizer
    if not hasattr(inner, "get_unscaled_state"):
        yield
        return
    vars(inner)["get_unscaled_state"] = lambda parameter, kind, skip_unscale=False: inner.state[parameter][kind]
    try:
        yield
    finally:
        del vars(inner)["get_unscaled_state"]


def load_optimizer(optimizer: ChainedOptimizer, loaded: dict[Any, Any], *, is_regrouped: bool = False) -> None:
    """Give the optimizer what was loaded into a state from `optimizer_state`.

    `is_regrouped`: it was saved with `parallel.expert` above 1 and is read with 1, or the other way round.
    """
    parts = optimizer.chained_optimizers
    if is_regrouped:
        loaded = _regrouped(parts, loaded)
    states = [loaded] if len(parts) == 1 else [loaded[index] for index in range(len(parts))]
    for part, state in zip(parts, states):
        if isinstance(part, DistributedOptimizer):
            state.pop("param_state", None)
    optimizer.load_state_dict(loaded)
    free_replaced_copies(optimizer)


def _regrouped(parts: list[Any], loaded: dict[Any, Any]) -> dict[Any, Any]:
    """Return a state of these `parts` with the tensors and the step count of `loaded`, which was saved of more parts or
    of fewer.

    Megatron has a part of its own for the experts of expert-parallel groups, and none without such groups. Both give
    the tensors the same names, under which they were read. Parameter groups are those of the configuration.
    """
    saved = [loaded, *(value for key, value in loaded.items() if isinstance(key, int))]
    inner = [state.get("optimizer", state) for state in saved]
    # torch's AdamW has its step count with each tensor, of which Megatron saves one. Others have it in their groups.
    of_tensors = [one["state"]["common_step"] for one in inner if "common_step" in one.get("state", {})]
    of_groups = [group["step"] for one in inner for group in one.get("param_groups", ()) if "step" in group]
    if len(steps := {int(step) for step in (*of_tensors, *of_groups)}) > 1:
        raise RuntimeError(f"the optimizer's parts have different step counts: {sorted(steps)}")
    states = {}
    for index, part in enumerate(parts):
        with _without_fp32_copies(part):
            states[index] = part.state_dict()
        own = states[index].get("optimizer", states[index])
        for group in own["param_groups"] if of_groups else ():
            group["step"] = of_groups[0]
        if isinstance(part, DistributedOptimizer):
            continue
        read = loaded if len(parts) == 1 else loaded[index]
        own["state"] = dict(read.get("optimizer", read)["state"])
        if of_tensors:
            own["state"]["common_step"] = of_tensors[0]
        if "fp32_from_fp16_params" in read:
            states[index]["fp32_from_fp16_params"] = read["fp32_from_fp16_params"]
    return states if len(parts) > 1 else states[0]


@torch.no_grad()
def read_optimizer_state(
    optimizer: ChainedOptimizer, model_state: dict[str, Any], folder: Path, host: RankGroup
) -> None:
    """Read this rank's parts of the distributed optimizer's tensors from Megatron's folder of a checkpoint. Collective.

    `model_state` is the sharded state of the weights, which gives the places of parameters. `host` is the group of all
    ranks.
    """
    by_weight = _by_weight(model_state)
    rounds: list[list[tuple[DistributedOptimizer, _Owned]]] = []
    room = 0
    for some in _read_together(optimizer, by_weight, alone=host.size == 1):
        size = len(_KINDS) * _FP32_BYTES * sum(owned.weight.numel() for _, owned in some)
        if size > room:
            rounds.append([])
            room = READ_BYTES
        rounds[-1] += some
        room -= size
    # All ranks read together. Those of another pipeline stage may need more rounds than this one.
    for turn in range(max(all_gather_json(len(rounds), host))):
        wanted = rounds[turn] if turn < len(rounds) else []
        requested = {}
        for place, (_, owned) in enumerate(wanted):
            like = by_weight[owned.weight]
            requested[place] = {kind: _sharded(like, kind, torch.zeros(owned.weight.shape)) for kind in _KINDS}
        # Validation is off, because it would only find that one turn does not request every shard of a tensor.
        loaded: Any = dist_checkpointing.load({"turn": requested}, str(folder), validate_access_integrity=False)
        for place, (part, owned) in enumerate(wanted):
            own = owned.parts[part.data_parallel_group.rank()]
            tensors = {kind: loaded["turn"][place][kind].flatten()[own.start : own.stop] for kind in _KINDS}
            part._set_main_param_and_optimizer_states(owned.weight, tensors)
    for part in optimizer.chained_optimizers:
        offloaded = getattr(part.optimizer, "_sync_hdo_state_to_sub_optimizers", None)
        if offloaded is not None:
            offloaded()


def _read_together(
    optimizer: ChainedOptimizer, by_weight: dict[torch.Tensor, ShardedTensor | ShardedTensorFactory], *, alone: bool
) -> list[list[tuple[DistributedOptimizer, _Owned]]]:
    """Return the parameters of which this rank owns parts, in the units that must not be split over turns: one by one,
    or, for a rank that is `alone`, those with the same stored tensor.

    Megatron tells torch that the shards of a stored tensor which a turn does not request are on the next rank. The next
    of a single rank is that rank itself, and torch then refuses a turn that does not request all of them.
    """
    units: dict[Any, list[tuple[DistributedOptimizer, _Owned]]] = {}
    for part in optimizer.chained_optimizers:
        if not isinstance(part, DistributedOptimizer):
            continue
        rank = part.data_parallel_group.rank()
        for owned in (owned for owned in _parameters(part) if owned.parts[rank]):
            unit = by_weight[owned.weight].key if alone else (id(part), owned.index)
            units.setdefault(unit, []).append((part, owned))
    return list(units.values())


# --- tensors of a parameter's shape ---------------------------------------------------------------------------


def _by_weight(model_state: dict[str, Any]) -> dict[torch.Tensor, ShardedTensor | ShardedTensorFactory]:
    kinds = (ShardedTensor, ShardedTensorFactory)
    found = (sharded for sharded in nested_values(model_state) if isinstance(sharded, kinds))
    return {sharded.data: sharded for sharded in found if sharded.data is not None}


def _held(part: DistributedOptimizer, model_state: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Return the state of the parameters that this rank holds, by index. Collective."""
    by_weight, group = _by_weight(model_state), part.data_parallel_group
    loads = [0] * group.size()
    found = {}
    for some in _groups(part):
        holders = {}
        for owned in some:
            # The holder is the owner with the fewest elements so far. Every rank comes to the same result.
            owners = [rank for rank, piece in enumerate(owned.parts) if piece]
            holders[owned.index] = min(owners, key=lambda rank: (loads[rank], rank))
            loads[holders[owned.index]] += owned.weight.numel()
        for owned, tensors in _gather(part, some, holders):
            like = by_weight[owned.weight]
            _check_replica(like, group.rank())
            shape = owned.weight.shape
            found[owned.index] = {
                kind: _in_parts(_sharded(like, kind, tensor.view(shape))) for kind, tensor in tensors.items()
            }
    return found


def _check_replica(like: ShardedTensor | ShardedTensorFactory, rank: int) -> None:
    replica = like.replica_id if isinstance(like.replica_id, tuple) else (like.replica_id,)
    if replica[-1] != rank:
        raise RuntimeError(
            f"{like.key}: Megatron calls its replica {replica}, which does not end with the data-parallel rank {rank}:"
            " another Megatron-Core than 0.16 or 0.19"
        )


def _sharded(
    like: ShardedTensor | ShardedTensorFactory, kind: str, tensor: torch.Tensor
) -> ShardedTensor | ShardedTensorFactory:
    """Return `tensor` in the place of the weight `like`, as the only one of its data-parallel replicas."""
    others = like.replica_id[:-1] if isinstance(like.replica_id, tuple) else ()
    settings: dict[str, Any] = dict(
        key=f"optimizer.state.{kind}.{like.key}",
        data=tensor,
        replica_id=(*others, 0),
    )
    if isinstance(like, ShardedTensor):
        settings["dtype"] = tensor.dtype
    sharded = replace(like, **settings)
    sharded.validate_metadata_integrity()
    return sharded


def _in_parts(sharded: ShardedTensor | ShardedTensorFactory) -> Any:
    """Return what a factory makes of its tensor, each part in memory of its own: of parts that are views Megatron would
    make copies, and the host would hold both until the save has begun.
    """
    if isinstance(sharded, ShardedTensor):
        return sharded
    made = sharded.build()
    for one in nested_values({"made": made}):
        one.data = one.data.clone()
    return made


# --- which rank owns which part -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Owned:
    """A parameter. `index` is its place in the optimizer's order. `parts` has the range of its elements that each
    data-parallel rank owns, which is empty if the rank owns none.
    """

    index: int
    weight: torch.nn.Parameter
    parts: tuple[range, ...]


def _parameters(part: DistributedOptimizer) -> Iterator[_Owned]:
    """Yield the parameters in Megatron's order. Every rank owns an equal part of a bucket, including its padding."""
    num_ranks = part.data_parallel_group.size()
    index = count()
    for buffer in part.buffers:
        for weight, (start, end, number) in buffer.param_index_map.items():
            bucket = buffer.buckets[number]
            length = bucket.grad_data.numel() // num_ranks
            parts = []
            for first in range(bucket.offset, bucket.offset + num_ranks * length, length):
                own = max(start, first), min(end, first + length)
                parts.append(range(own[0] - start, own[1] - start) if own[0] < own[1] else range(0))
            yield _Owned(next(index), weight, tuple(parts))


def _groups(part: DistributedOptimizer) -> Iterator[list[_Owned]]:
    """Yield the parameters that are exchanged at a time. They are the same on every data-parallel rank."""
    group: list[_Owned] = []
    room = EXCHANGED_ELEMENTS
    for owned in _parameters(part):
        if group and owned.weight.numel() > room:
            yield group
            group, room = [], EXCHANGED_ELEMENTS
        group.append(owned)
        room -= owned.weight.numel()
    if group:
        yield group


def _gather(
    part: DistributedOptimizer, group: list[_Owned], holders: dict[int, int]
) -> Iterator[tuple[_Owned, dict[str, torch.Tensor]]]:
    """Yield the parameters of the group that this rank holds, with their state as flat fp32 copies on the host.
    Collective: run the iterator to its end.

    `holders` gives the rank that holds each parameter, by index.
    """
    others = part.data_parallel_group
    rank, ranks = others.rank(), range(others.size())
    device = torch.device("cpu") if is_cpu_backend() else torch.device("cuda", torch.cuda.current_device())
    held = {owned.index: owned for owned in group if holders[owned.index] == rank}
    # What goes to each rank and comes from each rank, in the group's order.
    sent = [[o for o in group if holders[o.index] == other and o.parts[rank]] for other in ranks]
    received = [[owned for owned in held.values() if owned.parts[other]] for other in ranks]
    send_sizes = [sum(len(owned.parts[rank]) for owned in to) for to in sent]
    receive_sizes = [sum(len(owned.parts[other]) for owned in received[other]) for other in ranks]
    lengths = [len(owned.parts[other]) for other in ranks for owned in received[other]]

    def own_part(owned: _Owned, kind: str) -> torch.Tensor:
        """This rank's part. Asked for one by one: of moments below fp32, Megatron makes fp32 copies."""
        state = part._get_main_param_and_optimizer_states(owned.weight)[kind]
        return state.detach().flatten().to(device, torch.float32)

    def exchanged(kind: str) -> torch.Tensor:
        """What comes from all ranks. On a GPU, at most two of `pieces`, `outgoing` and `incoming` take memory at a time
        (`plan/memory.py`: save_device_bytes).
        """
        pieces = [own_part(owned, kind) for to in sent for owned in to]
        outgoing = torch.cat([torch.empty(0, device=device), *pieces])
        del pieces
        incoming = torch.empty(sum(receive_sizes), device=device)
        dist.all_to_all_single(incoming, outgoing, receive_sizes, send_sizes, group=others)
        return incoming

    tensors: dict[int, dict[str, torch.Tensor]] = {index: {} for index in held}
    for kind in _KINDS:
        incoming = exchanged(kind)
        for index, owned in held.items():
            tensors[index][kind] = incoming.new_empty(owned.weight.numel(), device="cpu")
        pieces = iter(incoming.split(lengths))
        for place, owned in ((owned.parts[other], owned) for other in ranks for owned in received[other]):
            tensors[owned.index][kind][place.start : place.stop].copy_(next(pieces))
        del incoming, pieces  # before the next kind comes
    for index in list(tensors):  # what the caller is done with goes
        yield held[index], tensors.pop(index)

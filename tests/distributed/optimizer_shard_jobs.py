"""What ranks compare in the tests of the optimizer's shards: Megatron's own sharded state with the package's."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from unittest import mock

import torch
import torch.distributed as dist
from checkpoint_jobs import small_buckets
from layout_jobs import layout_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from gspo_mega.checkpoint import load, optimizer_shards
from gspo_mega.engine.policy import PolicyEngine
from gspo_mega.engine.process_groups import create_groups, destroy_groups
from gspo_mega.models.huggingface import read_model_spec

_KINDS = ("param", "exp_avg", "exp_avg_sq")


def compare(
    folder: str, parallel: dict, *, bucket_size: int | None = None, exchanged_elements: int, **sections
) -> dict:
    """Per rank: names and places of the tensors that it would write by Megatron's way and by the package's, those of the
    package that are not to the bit what all ranks own together, and bytes.
    """
    parallel = {"expert_tensor": 1, **parallel}
    config = layout_config(folder, parallel, **sections)
    spec = read_model_spec(folder)
    sizes = {name: parallel.get(name, 1) for name in ("tensor", "pipeline", "context", "expert", "expert_tensor")}
    groups = create_groups(virtual_pipeline=parallel.get("virtual_pipeline"), **sizes)
    try:
        with small_buckets(bucket_size):
            engine = PolicyEngine(config, spec, groups, num_optimizer_steps=20)
        _fill(engine)
        metadata = load._metadata(groups)
        names = ["model"] if len(engine.chunks) == 1 else [f"model{i}" for i in range(len(engine.chunks))]
        weights = load._sharded_weights(engine, names)
        theirs = engine.optimizer.sharded_state_dict(weights, is_loading=False, metadata=metadata)
        with mock.patch.object(optimizer_shards, "EXCHANGED_ELEMENTS", exchanged_elements):
            ours = optimizer_shards.optimizer_state(engine.optimizer, weights, metadata, loading=False)
        wrong = _wrong(engine, ours)
        expected, found = _tensors(theirs), _tensors(ours)
        # What Megatron gathers is on every rank, and what is held here is one of those.
        differ = [place for place, tensor in found.items() if not torch.equal(tensor.data, expected[place].data)]
        parts = engine.optimizer.chained_optimizers
        return {
            "written_by_megatron": sorted(place for place, tensor in expected.items() if _is_main(tensor)),
            "written": sorted(place for place, tensor in found.items() if _is_main(tensor)),
            "wrong": wrong,
            "not_megatrons": differ,
            "distributed": all(isinstance(part, DistributedOptimizer) for part in parts),
            "buckets": sum(len(buffer.buckets) for part in parts for buffer in part.buffers),
            "held_bytes": sum(tensor.data.nbytes for tensor in found.values()),
            # Of a part of a larger tensor Megatron would make a copy.
            "views": [
                place for place, tensor in found.items() if tensor.data.untyped_storage().nbytes() > tensor.data.nbytes
            ],
            "gathered_bytes": sum(tensor.data.nbytes for tensor in expected.values()),
            "largest_bytes": max(tensor.data.nbytes for tensor in expected.values()),
            "rank": dist.get_rank(),
        }
    finally:
        destroy_groups()


def _numbers(index: int, kind: str, elements: range) -> torch.Tensor:
    """What the test writes into a parameter's state: numbers that say which element they are."""
    first = 7919 * index + 31 * _KINDS.index(kind)
    return ((torch.arange(elements.start, elements.stop) + first) % 2**20).float()


def _indexed(part: DistributedOptimizer) -> Iterator[tuple[int, torch.nn.Parameter, dict | None]]:
    """Parameters in Megatron's order, each with the ranges that this rank owns of it, by Megatron's own table."""
    index = count()
    for buffer, (of_type,) in zip(part.buffers, (ranges.values() for ranges in part.gbuf_ranges), strict=True):
        own = {weight: ranges for bucket in of_type for weight, ranges in bucket["param_map"].items()}
        for weight in buffer.param_index_map:
            yield next(index), weight, own.get(weight)


def _fill(engine: PolicyEngine) -> None:
    for part in engine.optimizer.chained_optimizers:
        part._init_optimizer_states_with_dummy_values()
        for index, weight, own in _indexed(part):
            if own is None:
                continue
            group, place = part.model_param_group_index_map[weight]
            main = part.optimizer.param_groups[group]["params"][place]
            elements = range(own["param"].start, own["param"].end)
            main.data.copy_(_numbers(index, "param", elements))
            for kind in _KINDS[1:]:
                part.optimizer.state[main][kind].copy_(_numbers(index, kind, elements))


def _wrong(engine: PolicyEngine, state: dict) -> list[tuple[int, str]]:
    """The tensors of the package's state that are not the numbers of all ranks, in their order."""
    parts = engine.optimizer.chained_optimizers
    wrong = []
    for place, part in enumerate(parts):
        held = (state[place] if len(parts) > 1 else state)["param_state"]
        for index, weight, _ in _indexed(part):
            for kind, sharded in held.get(index, {}).items():
                want = _numbers(index, kind, range(weight.numel())).view(weight.shape)
                # What Megatron writes in several parts (gate and up) is in parts already, along the first dimension.
                found = torch.cat([one.data for one in nested_values({"held": sharded})])
                if not torch.equal(found.view(weight.shape), want):
                    wrong.append((index, kind))
    return wrong


def _tensors(state: dict) -> dict[tuple, ShardedTensor]:
    """By name and place in the whole tensor, those of the parameters' shapes."""
    apply_factories(state)
    found = [t for t in nested_values(state) if isinstance(t, ShardedTensor)]
    return {(tensor.key, tensor.global_shape, tensor.global_offset): tensor for tensor in found}


def _is_main(tensor: ShardedTensor) -> bool:
    return not any(tensor.replica_id) if isinstance(tensor.replica_id, tuple) else tensor.replica_id == 0

"""One rank's parameters, gradient buffers and optimizer state: exact elements, and the bytes that they take.

`ModelShares` follows Megatron's own arithmetic: which layers a pipeline stage builds, how parameters are cut, where the
data-parallel buffers are padded, and which part of them a rank of the distributed optimizer owns. Counts are exact, and
padding is counted separately. `state_bytes` turns elements into bytes of weights, gradients and optimizer state. It
counts bytes of elements, not of allocations; an allocator rounds each tensor up by some hundred bytes. With `lora`, the
base model is frozen and the adapters are what is trained; `validate_lora` says what they contradict.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path

from gspo_mega.config.derived import penalises_kl, teacher_config, teacher_folders
from gspo_mega.config.schema import Config, Fp8, Lora, Optimizer, Parallel, Precision
from gspo_mega.models import delta_net
from gspo_mega.models.families import HEAD
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.models.low_rank import adapted, adapter_tensors
from gspo_mega.models.spec import ModelSpec
from gspo_mega.models.tensors import TensorEntry, hf_tensors, parameter_shape
from gspo_mega.plan.layout import Layout, stage_layers

# Bytes of an element of weights, gradients, fp32 main weights and moments, by precision.
WEIGHT_BYTES = {"fp32": 4, "bf16": 2, "fp8": 2}
GRADIENT_BYTES = {"fp32": 4, "bf16": 2}
MAIN_BYTES = 4
MOMENT_BYTES = {"fp32": 4, "bf16": 2, "fp8": 1}
# Megatron's data-parallel buffers with the distributed optimizer: the multiple at which a parameter may start, and the
# multiple that a bucket's end is rounded to (its least common multiple with the number of ranks that share it).
_START_ELEMENTS, _END_ELEMENTS = 64, 128
# Megatron's bucket size with overlapped reduction: the larger of the first, and the second times the data-parallel
# ranks.
_BUCKET_ELEMENTS, _BUCKET_ELEMENTS_A_RANK = 40_000_000, 1_000_000
# torch rounds page-locked memory up to this size to powers of two, and keeps it for the next request; above it takes
# what is asked for, and gives it back (`train/gpu_variables.py`).
PINNED_BLOCK_BYTES = 32 * 2**20
# Parameters of layers that Transformer Engine multiplies.
_LINEAR = re.compile(r"\.linear_|\.self_attention\.(in|out)_proj\.")
# A critic's head, as its module is named.
_VALUE_HEAD = "value_head.weight"
# The order in which a layer's parameters are registered; it decides where buckets end. All others come last: those that
# this package adds to Megatron's layer.
_IN_A_LAYER = (
    "input_layernorm",
    "self_attention.core_attention",
    "self_attention.linear_proj",
    *(f"self_attention.linear_{name}" for name in ("q_proj", "q_down_proj", "q_up_proj", "kv_down_proj", "kv_up_proj")),
    *(f"self_attention.{name}" for name in ("dt_bias", "A_log", "in_proj", "conv1d", "out_norm", "out_proj")),
    "self_attention",
    "pre_mlp_layernorm",
    "mlp.router",
    "mlp.shared_experts",
    "mlp",
)


@dataclass(frozen=True)
class State:
    """Elements of one rank. `parameters`: those of its modules. `linear`: the part of them in layers that FP8 computes;
    `kept`: the part of `linear` that `fp8.parameters` does not store in FP8. `padding`: what the buffers
    of weights and gradients hold in addition. `optimized`: parameters whose main copy and moments are here. `frozen`:
    parameters without a gradient, if adapters are trained.
    """

    parameters: int
    linear: int
    padding: int
    optimized: int
    frozen: int = 0
    kept: int = 0

    @property
    def gradients(self) -> int:
        """Elements of the gradient buffers, padding among them."""
        return self.parameters - self.frozen + self.padding


@dataclass(frozen=True)
class StateBytes:
    """Bytes of one rank's `State`. `padding`: that of weights and gradients. `offloaded`: optimizer state that is on
    the host instead, and the fp32 gradients that it steps with there. `fp8_copies`: linear weights in FP8 in addition
    to `weights`, rowwise and columnwise. `reference`: the weights of the frozen reference of a KL term or penalty, with
    the FP8 copies that a forward pass keeps; it has no gradients, padding or optimizer state. `teacher`: the same of a
    teacher (`plan/teacher.py`). `snapshots`: weights of
    the current and earlier versions on the host (`diagnostics.exact_staleness`).
    """

    weights: int
    gradients: int
    padding: int
    main: int
    moments: int
    fp8_copies: int
    offloaded: int
    reference: int
    snapshots: int
    teacher: int = 0

    @property
    def on_host(self) -> int:
        return self.offloaded + self.snapshots

    @property
    def on_device(self) -> int:
        trained = self.weights + self.gradients + self.padding + self.main + self.moments + self.fp8_copies
        return trained + self.reference + self.teacher


def state_bytes(config: Config, state: State, *, is_critic: bool = False) -> StateBytes:
    """Return the bytes of the state of a policy, or, with the critic's configuration, of a critic. FP8 copies are those
    of Transformer Engine. The scales of moments below fp32 and of offloaded state are not counted.
    """
    optimizer = config.optimizer
    weight, gradient = WEIGHT_BYTES[config.precision], GRADIENT_BYTES[optimizer.gradients_dtype]
    fp8 = config.precision == "fp8"
    in_fp8 = state.linear - state.kept if fp8 and config.fp8.parameters else 0
    # fp32 parameters are their own main copy.
    main = 0 if config.precision == "fp32" else state.optimized * MAIN_BYTES
    moments = 2 * state.optimized * MOMENT_BYTES[optimizer.moments_dtype]
    stay = 1.0 - optimizer.cpu_offload_fraction
    gradients_there = round(state.optimized * optimizer.cpu_offload_fraction) * MAIN_BYTES
    weights = (state.parameters - in_fp8) * weight + in_fp8
    most_stale = config.rollout.max_staleness
    return StateBytes(
        weights=weights,
        gradients=(state.parameters - state.frozen) * gradient,
        padding=state.padding * (weight + gradient),
        main=round(main * stay),
        moments=round(moments * stay),
        # Both orientations of each linear weight, less the one that the parameter itself is.
        fp8_copies=2 * state.linear - in_fp8 if fp8 else 0,
        # The gradients of offloaded parameters get a page-locked copy, which stays.
        offloaded=main + moments - round(main * stay) - round(moments * stay) + gradients_there,
        reference=frozen_bytes(config.precision, config.fp8, state) if has_reference(config) and not is_critic else 0,
        snapshots=(most_stale + 1) * weights if config.diagnostics.exact_staleness and most_stale else 0,
    )


def frozen_bytes(precision: Precision, fp8: Fp8, state: State) -> int:
    """Return the bytes of the weights of a frozen model, with the FP8 copies that a forward pass keeps."""
    in_fp8 = state.linear - state.kept if precision == "fp8" and fp8.parameters else 0
    weights = (state.parameters - in_fp8) * WEIGHT_BYTES[precision] + in_fp8
    return weights + (state.linear - in_fp8 if precision == "fp8" else 0)


def has_reference(config: Config) -> bool:
    """Return whether the KL term or penalty holds a frozen model. A policy with adapters is its own reference without
    them.
    """
    compares = config.kl.coefficient > 0 or penalises_kl(config.algorithm, config.critic)
    return compares and (config.lora is None or config.kl.reference_path is not None)


def checkpoint_bytes(precision: Precision, optimizer: Optimizer, total_parameters: int) -> int:
    """Return the bytes of a checkpoint of that many trained parameters: weights, fp32 main weights and moments."""
    main = 0 if precision == "fp32" else MAIN_BYTES
    return total_parameters * (WEIGHT_BYTES[precision] + main + 2 * MOMENT_BYTES[optimizer.moments_dtype])


@dataclass(frozen=True)
class Share:
    """A rank's part of one parameter. `expert_data`: its gradient is summed over the expert-data group instead of the
    data-context group. `own_bucket`: it is a tied embedding on two stages, which has a bucket to itself. `linear`: with
    FP8, Transformer Engine multiplies it in FP8. `kept`: even so, `fp8.parameters` does not store it in FP8.
    """

    name: str
    num_elements: int
    expert_data: bool
    own_bucket: bool
    linear: bool
    kept: bool = False


@dataclass(frozen=True)
class BufferSize:
    """Elements of one buffer's largest bucket, padding among them, and of its largest parameter; the ranks that share
    it.
    """

    bucket: int
    parameter: int
    num_ranks: int


class ModelShares:
    """The model's parameters for any layout. It reads the family table once, so that many layouts can be computed.

    `is_critic`: the model has a critic's head of one row, which no embedding is tied to, instead of the LM head.
    """

    def __init__(self, spec: ModelSpec, *, is_critic: bool = False) -> None:
        self.spec, self.is_critic = spec, is_critic
        self._first: list[TensorEntry] = []
        self._last: list[TensorEntry] = []
        # Kept because many layouts share them: the shares of a layer by how it is cut, and the buffers of a stage.
        self._cut: dict[tuple[int, ...], list[Share]] = {}
        self._held: dict[tuple, _Buffers] = {}
        self._layers: list[list[TensorEntry]] = [[] for _ in range(spec.num_layers)]
        for entry in hf_tensors(spec):
            if entry.is_buffer:
                continue
            if entry.layer is not None:
                # Experts are alike: the first one stands for all.
                if not entry.expert:
                    self._layers[entry.layer].append(entry)
            elif not (is_critic and entry.parameter == HEAD.parameter):
                (self._first if entry.stage == "first" else self._last).append(entry)

    @cached_property
    def critic(self) -> ModelShares:
        """The shares of a critic with this policy's shape."""
        return ModelShares(self.spec, is_critic=True)

    def chunks(self, layout: Layout, stage: int) -> list[list[Share]]:
        """Return the parameters of a pipeline stage's model chunks, each in Megatron's order. All its ranks have the
        same.
        """
        num_chunks = layout.virtual_pipeline or 1
        chunks: list[list[Share]] = []
        for index, layers in enumerate(layout.chunk_layers(stage)):
            shares: list[Share] = []
            if stage == 0 and index == 0:
                for entry in self._first:
                    shares += self._share(layout, entry, tied=self._is_tied(entry) and layout.pipeline > 1)
            for layer in layers:
                key = (layer, layout.tensor, layout.expert, layout.expert_tensor)
                if key not in self._cut:
                    self._cut[key] = list(self._layer(layout, self._layers[layer]))
                shares += self._cut[key]
            if stage == layout.pipeline - 1 and index == num_chunks - 1:
                for entry in self._last:
                    shares += self._share(layout, entry)
                if layout.pipeline > 1:  # the head's own copy of tied embeddings
                    for entry in self._first:
                        shares += self._share(layout, entry, tied=True) if self._is_tied(entry) else []
                if self.is_critic:  # whole on every tensor rank
                    shares.append(Share(_VALUE_HEAD, self.spec.hidden_size, False, False, False))
            chunks.append(shares)
        return chunks

    def _is_tied(self, entry: TensorEntry) -> bool:
        return bool(entry.copies) and not self.is_critic

    def _layer(self, layout: Layout, entries: list[TensorEntry]) -> Iterator[Share]:
        shares = {share.name: (share, entry) for entry in entries for share in self._share(layout, entry)}
        ordered = sorted(shares.values(), key=lambda pair: _registration_index(pair[1]))
        experts = [share for share, entry in ordered if entry.expert is not None]
        shared = [share for share, entry in ordered if ".shared_experts." in entry.parameter]
        yield from (share for share, entry in ordered if entry.expert is None and share not in shared)
        for _ in range(self.spec.moe.num_experts // layout.expert if experts and self.spec.moe is not None else 0):
            yield from experts
        yield from shared

    def _share(self, layout: Layout, entry: TensorEntry, tied: bool = False) -> list[Share]:
        is_expert = entry.expert is not None
        shape = parameter_shape(self.spec, entry, layout.expert_tensor if is_expert else layout.tensor)
        return [
            Share(
                name=entry.parameter,
                num_elements=math.prod(shape),
                # Megatron reduces experts that are on every rank with everything else.
                expert_data=is_expert and layout.expert > 1,
                own_bucket=tied,
                linear=entry.stage == "layer" and _LINEAR.search(entry.parameter) is not None and len(entry.shape) == 2,
                kept=delta_net.IN_PROJ in entry.parameter,
            )
        ]

    def state(self, config: Config, layout: Layout, stage: int) -> StageState:
        """Return the state that the ranks of a pipeline stage hold."""
        fp8_weights = config.fp8.parameters and config.precision == "fp8"
        bucket = (
            max(_BUCKET_ELEMENTS, _BUCKET_ELEMENTS_A_RANK * layout.data)
            if config.optimizer.overlap and stage == 0
            else None
        )
        ranks = (layout.world_size, layout.tensor, layout.pipeline, layout.virtual_pipeline)
        experts = (layout.expert, layout.expert_tensor)
        options = (layout.stage_layers, stage, fp8_weights, config.optimizer.distributed, bucket, config.lora)
        key = (*ranks, *experts, *options)
        if key not in self._held:
            self._held[key] = self._make_buffers(config, layout, stage, fp8_weights, bucket)
        return StageState(self._held[key], layout)

    def _make_buffers(
        self, config: Config, layout: Layout, stage: int, fp8_weights: bool, bucket: int | None
    ) -> _Buffers:
        """Lay out a stage's buffers. `bucket`: elements of a full bucket of the stage's first chunk, None without
        overlap.
        """
        buffers = _Buffers()
        for index, shares in enumerate(self.chunks(layout, stage)):
            if config.lora is not None:
                buffers.frozen += sum(share.num_elements for share in shares)
                shares = adapter_shares(config.lora, self.spec, layout, shares)
            for expert_data in (False, True):
                ranks = layout.expert_data if expert_data else layout.data * layout.context
                for linear in (False, True) if fp8_weights else (None,):
                    # FP8 parameters have buffers of their own.
                    held = [
                        s for s in shares if s.expert_data == expert_data and linear in (None, s.linear and not s.kept)
                    ]
                    if held:
                        buffers.append(
                            _Buffer(held, ranks, bucket if index == 0 else None, config.optimizer.distributed)
                        )
        return buffers


def _registration_index(entry: TensorEntry) -> int:
    inside = entry.parameter.split(".", 3)[3]
    return next((index for index, start in enumerate(_IN_A_LAYER) if inside.startswith(start)), len(_IN_A_LAYER))


class StageState:
    """What each rank of one pipeline stage holds."""

    def __init__(self, buffers: _Buffers, layout: Layout) -> None:
        self._buffers, self._layout = buffers, layout

    def of_rank(self, rank: int) -> State:
        """Return the state of a global rank in this stage."""
        place = self._layout.coordinates(rank)
        data_context = place.data * self._layout.context + place.context
        return self._buffers.state(lambda b: b.owned(place.expert_data if b.expert_data else data_context))

    def held_in_save(self, rank: int | None = None) -> int:
        """Return the elements whose main copy and moments a global rank puts together on its host for a save, with the
        distributed optimizer. `rank`: None for an upper bound of all ranks of the stage.
        """
        held = self._buffers.held_in_save
        if rank is None:
            return sum(max(loads, default=0) for loads in held.values())
        place = self._layout.coordinates(rank)
        own = {False: place.data * self._layout.context + place.context, True: place.expert_data}
        return sum(loads[own[expert_data]] for expert_data, loads in held.items() if loads)

    def reduced(self, over_expert_data: bool) -> int:
        """Return the elements whose gradients are summed over the expert-data group, or over the data-context group."""
        return sum(b.num_elements for b in self._buffers if b.expert_data == over_expert_data)

    def rounding_bytes(self, element_bytes: int) -> int:
        """Return by how many bytes page-locked copies of all parameters, one by one, are larger than the parameters."""
        sizes = (num_elements * element_bytes for b in self._buffers for num_elements in b.sizes)
        return sum(pinned_bytes(size) - size for size in sizes)

    @property
    def buffers(self) -> tuple[BufferSize, ...]:
        """The sizes of the stage's buffers, which all its ranks share."""
        return tuple(BufferSize(b.largest_bucket, b.largest, b.num_ranks) for b in self._buffers)

    @property
    def largest(self) -> State:
        """An upper bound, which some rank reaches within a few elements: padding makes shards differ slightly."""
        return self._buffers.largest


class _Buffers(list["_Buffer"]):
    """All buffers of one stage, for any of its ranks. `frozen`: elements of parameters that are in no buffer."""

    frozen = 0

    @cached_property
    def largest(self) -> State:
        return self.state(_Buffer.most_owned)

    @cached_property
    def held_in_save(self) -> dict[bool, list[int]]:
        """Elements that each rank of the data-context group (False) and the expert-data group (True) holds in a save,
        as `checkpoint/optimizer_shards.py` gives them out: a parameter to the rank with the fewest so far of those that
        own a part of it.
        """
        held: dict[bool, list[int]] = {}
        for expert_data in (False, True):
            buffers = [b for b in self if b.expert_data == expert_data]
            loads = held[expert_data] = [0] * (buffers[0].num_ranks if buffers else 0)
            for num_elements, owners in (owned for b in buffers for owned in b.owners()):
                loads[min(owners, key=lambda rank: (loads[rank], rank))] += num_elements
        return held

    def state(self, owned: Callable[[_Buffer], int]) -> State:
        """Return a rank's state. `owned`: the number of a buffer's elements whose optimizer state the rank keeps."""
        return State(
            parameters=self.frozen + sum(b.num_elements for b in self),
            linear=sum(b.linear for b in self),
            padding=sum(b.end - b.num_elements for b in self),
            optimized=sum(map(owned, self)),
            frozen=self.frozen,
            kept=sum(b.kept for b in self),
        )


class _Buffer:
    """One of Megatron's parameter-and-gradient buffers: where its parameters lie, in elements."""

    def __init__(self, shares: list[Share], num_ranks: int, bucket_elements: int | None, distributed: bool) -> None:
        self.sizes = [s.num_elements for s in shares]
        self.num_elements = sum(self.sizes)
        self.linear = sum(s.num_elements for s in shares if s.linear)
        self.kept = sum(s.num_elements for s in shares if s.kept)
        self.largest = max(self.sizes)
        self.expert_data = shares[0].expert_data
        self.num_ranks = num_ranks
        self._distributed = distributed
        self._ends: list[int] = []  # of buckets
        self._starts: list[int] = []  # of parameters, and ...
        self._before: list[int] = [0]  # ... how many elements lie before each
        multiple = math.lcm(num_ranks, _END_ELEMENTS)
        position = bucket_start = 0
        for share in reversed(shares):
            if not distributed:
                position += share.num_elements
                continue
            position = _round_up(position, _START_ELEMENTS)
            if share.own_bucket and position > bucket_start:
                position = bucket_start = self._end_bucket(position, multiple)
            self._starts.append(position)
            self._before.append(self._before[-1] + share.num_elements)
            position += share.num_elements
            if share.own_bucket or (bucket_elements is not None and position - bucket_start >= bucket_elements):
                position = bucket_start = self._end_bucket(position, multiple)
        if distributed and position > bucket_start:
            position = self._end_bucket(position, multiple)
        self.end = position

    def _end_bucket(self, position: int, multiple: int) -> int:
        self._ends.append(_round_up(position, multiple))
        return self._ends[-1]

    @property
    def largest_bucket(self) -> int:
        """Elements of the largest bucket; 0 if nothing is divided over data-parallel ranks."""
        return max((end - start for start, end in pairwise([0, *self._ends])), default=0)

    def owned(self, rank: int) -> int:
        """Return the parameter elements whose optimizer state rank `rank` of the group keeps: its part
        of every bucket.
        """
        if not self._distributed:
            return self.num_elements
        total = start = 0
        for end in self._ends:
            part = (end - start) // self.num_ranks
            total += self._elements_before(start + (rank + 1) * part) - self._elements_before(start + rank * part)
            start = end
        return total

    def owners(self) -> Iterator[tuple[int, range]]:
        """Yield the elements of each parameter and the ranks of the group that own a part of it, in the buffer's order.
        Only with the distributed optimizer.
        """
        for start, (before, after) in zip(self._starts, pairwise(self._before), strict=True):
            bucket = bisect_right(self._ends, start)
            first = self._ends[bucket - 1] if bucket else 0
            part = (self._ends[bucket] - first) // self.num_ranks
            last = start + after - before - 1
            yield after - before, range((start - first) // part, (last - first) // part + 1)

    def most_owned(self) -> int:
        """Return the largest `owned` of all ranks, computed from the padding in each rank's part, of which there is
        little.
        """
        if not self._distributed:
            return self.num_elements
        padding, bucket, start = [0] * self.num_ranks, 0, 0
        for index, next_start in enumerate([*self._starts[1:], self.end]):
            position = self._starts[index] + self._before[index + 1] - self._before[index]
            while position < next_start:
                while position >= self._ends[bucket]:
                    start, bucket = self._ends[bucket], bucket + 1
                rank, inside = divmod(position - start, part := (self._ends[bucket] - start) // self.num_ranks)
                length = min(next_start - position, part - inside)
                padding[rank] += length
                position += length
        return self.end // self.num_ranks - min(padding)

    def _elements_before(self, position: int) -> int:
        index = bisect_right(self._starts, position) - 1
        if index < 0:
            return 0
        return min(self._before[index] + position - self._starts[index], self._before[index + 1])


def pinned_bytes(num_bytes: int) -> int:
    """Return the bytes that torch takes for that many page-locked ones, with a rank's variables."""
    return num_bytes if num_bytes > PINNED_BLOCK_BYTES else 1 << (num_bytes - 1).bit_length()


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def adapter_shares(lora: Lora, spec: ModelSpec, layout: Layout, shares: Sequence[Share]) -> list[Share]:
    """Return a rank's parts of the adapters of a model chunk whose own parameters are `shares`, in the order of the
    engine's modules: B, then the A of each matrix.
    """
    wanted = adapted(spec, lora.targets)
    found = []
    for share in shares:
        entries = wanted.get(share.name, [])
        if not entries:
            continue
        cut = layout.expert_tensor if entries[0].expert is not None else layout.tensor
        rows, columns = parameter_shape(spec, entries[0], cut)
        for size in (rows, *[columns] * len(entries)):
            found.append(replace(share, num_elements=size * lora.rank, linear=False))
    return found


def num_adapter_parameters(lora: Lora, spec: ModelSpec) -> int:
    """Return the number of parameters of all adapters."""
    return sum(tensor.num_elements for tensor in adapter_tensors(spec, lora.rank, lora.targets))


def trained_parameters(lora: Lora | None, spec: ModelSpec, total: int) -> int:
    """Return how many of the policy's parameters are trained: all of them, or those of the adapters."""
    return total if lora is None else num_adapter_parameters(lora, spec)


# --- a teacher -----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def _shares_of(path: str, _changed: int) -> ModelShares:
    return ModelShares(read_model_spec(path))


def teacher_shares(config: Config) -> list[tuple[Config, ModelShares]]:
    """For each teacher that the ranks load, the configuration that it is built with, and its parameters. Raises
    ModelError if its folder cannot be read.
    """
    found = []
    for path in map(Path, teacher_folders(config.teacher)):
        described = path / "config.json" if path.is_dir() else path
        shares = _shares_of(str(path), described.stat().st_mtime_ns if described.exists() else 0)
        found.append((teacher_config(config, shares.spec.moe is not None), shares))
    return found


def teacher_layout(parallel: Parallel, layout: Layout, spec: ModelSpec) -> Layout:
    """The policy's layout for a teacher of this shape. `parallel`: the teacher's (`teacher_shares`)."""
    layers = stage_layers(spec.num_layers, parallel)
    assert layers is not None, "check_teacher finds this"
    ranks = layout.world_size // (parallel.pipeline * parallel.expert * parallel.expert_tensor)
    return replace(
        layout, stage_layers=layers, expert=parallel.expert, expert_tensor=parallel.expert_tensor, expert_data=ranks
    )


def with_teacher(size: StateBytes, config: Config, layout: Layout, stage: int) -> StateBytes:
    """`size`, with the bytes of all teachers' weights on the fullest rank of a stage."""
    states = [
        (own, shares.state(own, teacher_layout(own.parallel, layout, shares.spec), stage).largest)
        for own, shares in teacher_shares(config)
    ]
    return replace(size, teacher=sum(frozen_bytes(own.precision, own.fp8, state) for own, state in states))

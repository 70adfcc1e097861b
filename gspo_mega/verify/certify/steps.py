"""Record everything that the optimizer steps of a case read, for `compare.py`.

A constant factor in a gradient, a norm that leaves out a part, or a wrong learning rate of one parameter group hardly
shows in the weights, because Adam divides by the gradient's size. So every step is recorded by itself: the norm that
decides the clipping, also by kind of parameter; the gradient after clipping, tensor by tensor; learning rate, weight
decay, betas and eps of each parameter; the routers' counts and losses; and afterwards Adam's moments, buffers, and
whether all ranks hold the same copies.

The distributed optimizer leaves a shard of the gradients on each rank; the shards are all-gathered first. Instead of
its numbers, a sketch of each whole tensor is kept: the sum of squares, the number of zeros, and the products with a few
vectors of random signs from both sides. If two tensors differ by d in relative L2, these products do so too, in the
root mean square.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import numpy as np
import torch
import torch.distributed as dist

from gspo_mega.checkpoint.collectives import all_gather_json
from gspo_mega.checkpoint.quantized import plain_values
from gspo_mega.engine.critic import CriticEngine
from gspo_mega.engine.optimizer import (
    SETTINGS,
    StepResult,
    gradient_squares_by_kind,
    held_parameters,
    moment,
    overwrite_gradient_buffers,
    step_gradient,
)
from gspo_mega.engine.policy import PolicyEngine
from gspo_mega.engine.routing import RANK_LOADS
from gspo_mega.models.parameter_names import canonical_name, canonical_parameters, table_by_parameter, tensor_group
from gspo_mega.verify.certify.cases import PARAMETER_KINDS, parameter_kind


@torch.no_grad()
def complete_gradients(engine: PolicyEngine | CriticEngine) -> None:
    """Make every parameter's `main_grad` the whole reduced gradient, in place.

    With the distributed optimizer the reduction leaves each data-parallel rank only its own shard of a gradient buffer;
    this all-gathers the shards. Without it, does nothing. Collective over the data-parallel groups.
    """
    for chunk in engine.wrapped:
        if not chunk.ddp_config.use_distributed_optimizer:
            continue
        wrapped = cast(
            Any, chunk
        )  # torch declares `buffers` a method of every module; Megatron's wrapper makes it a list
        for buffer in (*wrapped.buffers, *wrapped.expert_parallel_buffers):
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                part = bucket.grad_data.view(group.size(), -1)[group.rank()].clone()
                dist.all_gather(list(bucket.grad_data.view(group.size(), -1).unbind()), part, group=group)


Tensors = Iterator[tuple[str, torch.Tensor]]
_SIGN_VECTORS = 8
_PIECE = 1 << 20
_MOMENTS = ("exp_avg", "exp_avg_sq")
# Buffers that may differ between ranks: counts of a rank's own tokens since the last reset, and position tables as long
# as the longest sequence that a rank has seen.
_OWN_BUFFERS = (".local_tokens_per_expert", ".cos_cached", ".sin_cached")


class Whole(Protocol):
    """Streams the contents of the gradient buffers as whole tensors, on rank 0; collective."""

    def stream(self, dtype: torch.dtype) -> Tensors: ...


@dataclass
class CaseSteps:
    """What the optimizer steps of one case read: complete on rank 0, without `names` and sketches on other ranks.

    One entry per step: `norms`, before clipping; `counted` and `whole`, the squares of the clipped gradient by kind of
    parameter, as the norm counts them and from whole tensors; `skipped`; `routing`, sums over all ranks; `settings`,
    from each parameter's canonical name to its JSON [lr, weight decay, betas, eps], several where ranks disagree.
    `sketches` [steps, tensors, 2 + K] float64: sketches of the clipped gradient, for tensors called `names` with
    `sizes` elements; `moments` [2, tensors, 2 + K]: sketches of Adam's moments after the last step. `buffers`: digests
    by name. `copies`: names of what differs between ranks that should hold the same.
    """

    norms: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    counted: list[dict[str, float]] = field(default_factory=list)
    whole: list[dict[str, float]] = field(default_factory=list)
    routing: list[dict[str, float]] = field(default_factory=list)
    settings: list[dict[str, list[str]]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    sketches: np.ndarray = field(default_factory=lambda: np.zeros((0, 0, 2 + _SIGN_VECTORS)))
    moments: np.ndarray = field(default_factory=lambda: np.zeros((0, 0, 2 + _SIGN_VECTORS)))
    buffers: dict[str, str] = field(default_factory=dict)
    copies: list[str] = field(default_factory=list)


class StepWatch:
    """Records every optimizer step of an engine from now on. All methods are collective over all ranks."""

    def __init__(self, engine: PolicyEngine | CriticEngine, whole: Whole) -> None:
        """`whole`: streams every parameter's `main_grad`."""
        self.steps = CaseSteps()
        self._engine, self._whole = engine, whole
        self._sketches: list[np.ndarray] = []
        self._local_names = {
            id(parameter): name for chunk in engine.chunks for name, parameter in chunk.named_parameters()
        }
        entries = [entries[0] for entries in table_by_parameter(engine.spec).values()]
        copies = {copy: entry.parameter for entry in entries for copy in entry.copies}
        named = {
            id(parameter): canonical_name(engine.spec, engine.groups, chunk, name)
            for chunk in engine.chunks
            for name, parameter in chunk.named_parameters()
        }
        self._names = {key: copies.get(name, name) for key, name in named.items()}
        engine.before_step = self._before

    def after(self, result: StepResult, routing: dict[str, float]) -> None:
        """Record the result of a step and this rank's router sums, but for those that depend on the layout. Call it
        after each step.
        """
        groups, steps = self._engine.groups, self.steps
        steps.norms.append(result.grad_norm)
        steps.skipped.append(result.skipped)
        every = all_gather_json(routing, groups.host)
        keys = sorted({key for one in every for key in one} - {*RANK_LOADS})
        steps.routing.append({key: sum(one.get(key, 0.0) for one in every) for key in keys})

    def finish(self) -> CaseSteps:
        """Return everything recorded, with moments, buffers and copies. Call it after the last step. It overwrites the
        gradient buffers and leaves the rest of the engine as it was.
        """
        engine, steps = self._engine, self.steps
        engine.before_step = None
        if self._sketches:
            steps.sketches = np.stack(self._sketches)
        moments = []
        for name in _MOMENTS:
            overwrite_gradient_buffers(engine.optimizer, lambda held, name=name: moment(held, name))
            complete_gradients(engine)
            moments.append(self._sketch()[0])
        steps.moments = np.stack(moments)
        steps.buffers, steps.copies = _compare_ranks(engine)
        return steps

    def _before(self) -> None:
        engine, steps = self._engine, self.steps
        steps.counted.append(
            gradient_squares_by_kind(
                engine.optimizer,
                engine.groups,
                PARAMETER_KINDS,
                lambda parameter: parameter_kind(self._local_names[id(parameter)]),
            )
        )
        steps.settings.append(self._settings())
        overwrite_gradient_buffers(engine.optimizer, step_gradient)
        complete_gradients(engine)
        sketch, squares = self._sketch()
        self._sketches.append(sketch)
        steps.whole.append(squares)

    def _settings(self) -> dict[str, list[str]]:
        own = {
            self._names[id(held.model)]: json.dumps([held.settings.get(key) for key in SETTINGS])
            for held in held_parameters(self._engine.optimizer)
        }
        found: dict[str, set[str]] = {}
        for of_rank in all_gather_json(own, self._engine.groups.host):
            for name, values in of_rank.items():
                found.setdefault(name, set()).add(values)
        return {name: sorted(values) for name, values in found.items()}

    def _sketch(self) -> tuple[np.ndarray, dict[str, float]]:
        """Return ([tensors, 2 + K], squares by kind) of what the gradient buffers hold; empty on ranks other than 0."""
        rows, names, sizes, squares = [], [], [], dict.fromkeys(PARAMETER_KINDS, 0.0)
        for name, tensor in self._whole.stream(torch.float32):
            rows.append(sketch(name, tensor))
            names.append(name)
            sizes.append(tensor.numel())
            squares[parameter_kind(name)] += float(rows[-1][0])
        self.steps.names, self.steps.sizes = names, sizes
        return np.stack(rows) if rows else np.zeros((0, 2 + _SIGN_VECTORS)), squares


def sketch(name: str, tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor's sketch, [2 + K] float64: the sum of its squares, the number of its zeros, and r^T X c for K
    pairs of sign vectors that depend only on `name`, where X is the tensor with its last dimension as columns.

    For any difference D of two tensors, the mean square of r^T D c is the sum of squares of D. Computed in pieces, on
    the tensor's device.
    """
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big"))
    rows = tensor.detach().reshape(-1, tensor.shape[-1])
    left, right = (_signs(size, generator).to(rows.device) for size in rows.shape)
    found = torch.zeros(2 + _SIGN_VECTORS, dtype=torch.float64, device=rows.device)
    at_once = max(1, _PIECE // rows.size(1))
    for start in range(0, rows.size(0), at_once):
        piece = rows[start : start + at_once].double()
        found[0] += piece.square().sum()
        found[1] += (piece == 0).sum()
        found[2:] += ((piece @ right) * left[start : start + at_once]).sum(dim=0)
    return found.cpu().numpy()


def _signs(count: int, generator: torch.Generator) -> torch.Tensor:
    """Draw random signs, [count, K] float64 of -1 and 1."""
    return torch.randint(0, 2, (count, _SIGN_VECTORS), generator=generator).double() * 2 - 1


def _compare_ranks(engine: PolicyEngine | CriticEngine) -> tuple[dict[str, str], list[str]]:
    """Return (digests of the buffers, names of what differs between ranks that should hold the same)."""
    spec, groups = engine.spec, engine.groups
    for chunk in engine.chunks:
        chunk.await_parameters()
    owners = {parameter: entries[0] for parameter, entries in table_by_parameter(spec).items()}
    owners |= {copy: entry for entry in owners.values() for copy in entry.copies}
    own: dict[str, str] = {}
    for name, parameter in canonical_parameters(spec, groups, engine.chunks).items():
        entry = owners[name]  # both copies of tied embeddings have one name here
        part = 0 if entry.sharding == "replicated" else tensor_group(groups, entry).rank
        own[f"{entry.parameter}, part {part}"] = _digest(plain_values(parameter))
    for chunk in engine.chunks:
        for adapter in chunk.low_rank():
            for name, half in adapter.halves().items():
                is_cut = getattr(half, "tensor_model_parallel", False)
                own[f"{name}, part {adapter.group.rank if is_cut else 0}"] = _digest(half)
        if (head := getattr(chunk, "value_head", None)) is not None:
            own["value_head.weight"] = _digest(head.weight)
    buffers = {
        canonical_name(spec, groups, chunk, name): _digest(values)
        for chunk in engine.chunks
        for name, values in _buffers(chunk)
        if not name.endswith((".expert_bias", *_OWN_BUFFERS))
    }
    found: dict[str, set[str]] = {}
    for of_rank in all_gather_json(own | buffers, groups.host):
        for name, digest in of_rank.items():
            found.setdefault(name, set()).add(digest)
    of_buffers = {name: min(found[name]) for name in found if not (", part " in name or name.startswith("value_head"))}
    return of_buffers, sorted(name for name, digests in found.items() if len(digests) > 1)


def _buffers(chunk: Any) -> Iterator[tuple[str, torch.Tensor]]:
    yield from chunk.named_buffers()
    rotary = getattr(chunk, "rotary_pos_emb", None)
    if isinstance(frequencies := getattr(rotary, "inv_freq", None), torch.Tensor):
        yield "rotary_pos_emb.inv_freq", frequencies


def _digest(values: torch.Tensor) -> str:
    raw = values.detach().contiguous().cpu()
    return hashlib.sha256(raw.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]

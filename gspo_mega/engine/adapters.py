"""Low-rank adapters (LoRA) on Megatron's linear layers: the modules, their place in a layout, their checkpoint.

A forward hook adds (alpha / rank) B A x to the output of a linear layer, so Megatron's layer stays as it is, a plain
one or Transformer Engine's. The hook sees the layer's input x, so no norm may be fused into an adapted layer:
`build_chunks` keeps them apart. Transformer Engine's experts are one module with a weight for each expert, and their
adapters are multiplied together. Every parameter except those of adapters is frozen. Names and shapes are in
`models/low_rank.py`, whole tensors of adapters in `checkpoint/adapters.py`.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from gspo_mega.config.schema import Lora
from gspo_mega.cpu.products import trained_linear
from gspo_mega.engine.process_groups import ParallelGroups, RankGroup
from gspo_mega.models import delta_net
from gspo_mega.models.low_rank import adapted, adapter_tensors, half_parameter, is_of_linear_layer
from gspo_mega.models.spec import ModelSpec
from gspo_mega.models.tensors import TensorEntry, parameter_blocks

if TYPE_CHECKING:
    from gspo_mega.engine.model import PolicyModel

# The child of a chunk that holds its adapters.
ADAPTERS = "adapters"


class Adapter(nn.Module):
    """The adapters of one of Megatron's linear layers on this rank: of one Hugging Face matrix, or of those that the
    layer fuses.

    `a[role]` [rank, in], `b` [rows, rank] in the layer's own order of rows, this rank's part of each. `parameter`: the
    canonical name of the layer's weight. Rows of a fused matrix without an adapter stay zero. Unless `is_on`, the
    adapter adds nothing.
    """

    def __init__(
        self,
        spec: ModelSpec,
        groups: ParallelGroups,
        settings: Lora,
        entries: Sequence[TensorEntry],
        linear: nn.Module,
        weight: str = "weight",
    ) -> None:
        """`weight`: the name of the adapted weight in `linear`, which may be one of several."""
        super().__init__()
        base: Any = getattr(linear, weight)
        self.parameter, self.sharding, self.is_expert = (
            entries[0].parameter,
            entries[0].sharding,
            entries[0].expert is not None,
        )
        self.group = groups.expert_tensor if self.is_expert else groups.tensor
        self.scale, self.dropout = settings.alpha / settings.rank, settings.dropout
        self.is_on = True
        # A layer that is whole on every tensor rank has the ranks' own positions as its input.
        layout: Any = linear.config
        self.sequence_parallel = layout.sequence_parallel and self.group.size > 1 and not self.is_expert
        rank, (rows, columns) = settings.rank, base.shape
        like = dict(dtype=base.dtype, device=base.device)
        self.roles = tuple(entry.role for entry in entries)
        self.fuses_gate = any(role in ("gate", "up") for role in self.roles)
        self.sections: dict[str, int] = {}  # rows of this rank, of each of what a delta net's projection makes
        if spec.delta is not None and entries[0].role in delta_net.ROLES:
            self.sections = delta_net.section_rows(spec.delta, self.group.size)
        self.a = nn.ParameterDict({role: nn.Parameter(torch.zeros(rank, columns, **like)) for role in self.roles})
        self.b = nn.Parameter(torch.zeros(rows, rank, **like))
        # Which rows of `b` are multiplied with which A; None: all rows, because the layer is one matrix.
        self.rows: torch.Tensor | None = None
        if entries[0].role != "whole":
            rows_of = torch.zeros(rows, len(entries), rank, **like)
            for place, entry in enumerate(entries):
                for block in parameter_blocks(spec, entry, self.group.size, self.group.rank):
                    rows_of[block.local_start : block.local_start + block.length, place] = 1
            self.rows = rows_of.flatten(1)
        for parameter in self.parameters():
            self._mark(parameter, base, cut=False)
        if self.sharding == "rows":
            self._mark(self.b, base, cut=True)
        elif self.sharding == "columns":
            for parameter in self.a.values():
                self._mark(parameter, base, cut=True)
        if self.sequence_parallel:  # Megatron adds up the gradients from each tensor rank's positions
            marked: Any = {"rows": self.a.values(), "columns": [self.b]}.get(self.sharding, self.parameters())
            for parameter in marked:
                parameter.sequence_parallel = True

    def _mark(self, parameter: Any, base: Any, cut: bool) -> None:
        """Set Megatron's marks: whether the parameter is another part on every rank of its group, and whether it is
        reduced over all data ranks or as an expert's.
        """
        parameter.tensor_model_parallel = cut
        parameter.allreduce = getattr(base, "allreduce", True)

    def whole_b(self) -> torch.Tensor:
        """[rows, matrices x rank]: B of every fused matrix in the columns of its own A."""
        return self.b if self.rows is None else self.b.repeat(1, len(self.roles)) * self.rows

    def whole_a(self) -> torch.Tensor:
        """[matrices x rank, in]: the A of all fused matrices."""
        parts = [self.a[role] for role in self.roles]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Returns the tensor that is added to the layer's output, of its shape. inputs: those of the layer,
        [positions, ..., in] in the model's dtype, this rank's part. Collective over the tensor group, as the layer.
        """
        inputs = functional.dropout(inputs, self.dropout, self.training)
        inner = trained_linear(inputs, self.whole_a())
        if self.group.size > 1 and self.sharding == "rows":
            # The gradient of `inner` is a sum over the ranks' rows.
            if self.sequence_parallel:
                inner = gather_from_sequence_parallel_region(inner, True, group=self.group.group)
            else:
                inner = copy_to_tensor_model_parallel_region(inner, group=self.group.group)
        elif self.group.size > 1 and self.sharding == "columns":
            # `inner` itself is a sum over the ranks' columns.
            if self.sequence_parallel:
                inner = reduce_scatter_to_sequence_parallel_region(inner, group=self.group.group)
            else:
                inner = reduce_from_tensor_model_parallel_region(inner, group=self.group.group)
        return trained_linear(inner * self.scale, self.whole_b())

    def halves(self) -> dict[str, nn.Parameter]:
        """This rank's parts of A and B by canonical name."""
        names = {half_parameter(self.parameter, "A", role): self.a[role] for role in self.roles}
        return names | {half_parameter(self.parameter, "B"): self.b}

    @torch.no_grad()
    def merged(self, weight: torch.Tensor) -> torch.Tensor:
        """`weight`, this rank's part of the layer's, plus (alpha / rank) B A: summed in fp32, in the weight's dtype.
        Unless `is_on`, it is the weight itself.
        """
        if not self.is_on:
            return weight
        product = self.whole_b().float() @ self.whole_a().float()
        return torch.add(weight.float(), product, alpha=self.scale).to(weight.dtype)


def attach_adapters(
    chunks: Sequence[PolicyModel], spec: ModelSpec, groups: ParallelGroups, settings: Lora, seed: int
) -> None:
    """Freeze the chunks and give their linear layers adapters: A random by the matrix's name, B zero.

    Call it before data parallelism is put around the chunks. Raises ModelError for a target that the model does not
    have.
    """
    wanted = adapted(spec, settings.targets)
    for chunk in chunks:
        chunk.requires_grad_(False)
        for linear, weights in _linears(chunk, spec, groups):
            own = []
            for parameter, weight in weights.items():
                if (entries := wanted.get(parameter)) is not None:
                    own.append(Adapter(spec, groups, settings, entries, linear, weight))
                    chunk.adapters[parameter.removesuffix(".weight").replace(".", "-")] = own[-1]
            if own:
                linear.register_forward_hook(_adding_grouped(own) if _is_grouped(linear) else _adding(own[0]))
        if hasattr(chunk, "embedding"):
            # Recomputed layers have gradients only if their input has one, and nothing before the adapters is trained.
            chunk.embedding.register_forward_hook(_with_gradient)
    start_adapters(chunks, spec, settings, seed)


@torch.no_grad()
def start_adapters(chunks: Sequence[PolicyModel], spec: ModelSpec, settings: Lora, seed: int) -> None:
    """Give A its initial values, which depend only on the seed and the matrix's name, and set B to zero."""
    tensors = {tensor.parameter: tensor for tensor in adapter_tensors(spec, settings.rank, settings.targets)}
    for adapter in (adapter for chunk in chunks for adapter in chunk.low_rank()):
        for name, half in adapter.halves().items():
            if half is adapter.b:
                half.zero_()
            else:
                _fill(half, spec, adapter.group, tensors[name], seed)


def adapter_norm(chunks: Sequence[PolicyModel], groups: ParallelGroups) -> float:
    """The Frobenius norm of all (alpha / rank) B A of the policy together, on every rank. Collective."""
    total = torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        for adapter in (adapter for chunk in chunks for adapter in chunk.low_rank()):
            marked: Any = adapter.b
            copies = groups.data_context.rank if marked.allreduce else groups.expert_data.rank
            if copies or (adapter.sharding == "replicated" and adapter.group.rank):
                continue  # another rank counts this part
            a, b = adapter.whole_a().double(), adapter.whole_b().double()
            total += adapter.scale**2 * ((a @ a.T) * (b.T @ b)).sum().cpu()
    dist.all_reduce(total, group=groups.host.group)
    return float(total.sqrt())


def _adding(adapter: Adapter) -> Any:
    def add(_module: nn.Module, inputs: tuple[torch.Tensor, ...], output: Any) -> Any:
        if not adapter.is_on:
            return output
        values, bias = output
        return adapter(inputs[0]).add_(values), bias

    return add


def _adding_grouped(adapters: Sequence[Adapter]) -> Any:
    def add(_module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        if not adapters[0].is_on:
            return output
        values, bias = output
        rows, splits = inputs
        return _grouped_adapters(adapters, rows, [int(split) for split in splits]).add_(values), bias

    return add


def _grouped_adapters(adapters: Sequence[Adapter], inputs: torch.Tensor, splits: list[int]) -> torch.Tensor:
    """What the adapters of a rank's experts add, [rows, out] of the inputs' dtype. inputs [rows, in], those of expert
    after expert; `splits`: the number of rows of each.
    """
    first = adapters[0]
    inputs = functional.dropout(inputs, first.dropout, first.training)
    all_a = torch.cat([adapter.a[role] for adapter in adapters for role in adapter.roles])
    all_b = torch.stack([adapter.b for adapter in adapters])
    if first.rows is not None:  # the same rows in every expert, because each is whole on its rank
        all_b = all_b.repeat(1, 1, len(first.roles)) * first.rows
    inner = _GroupedProduct.apply(inputs, all_a.unflatten(0, (len(adapters), -1)), splits)
    return _GroupedProduct.apply(inner * first.scale, all_b, splits)


class _GroupedProduct(torch.autograd.Function):
    """Rows of expert after expert, each times its expert's matrix. The product is the one that Transformer Engine's own
    experts use, in which the host waits for nothing.
    """

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weights: torch.Tensor, splits: list[int]) -> torch.Tensor:
        """inputs [rows, in], weights [experts, out, in], of one dtype; returns [rows, out]."""
        ctx.save_for_backward(inputs, weights)
        ctx.splits = splits
        output = inputs.new_empty(inputs.size(0), weights.size(1))
        _multiply(weights, inputs.split(splits), [output], splits, "TN")
        return output

    @staticmethod
    @once_differentiable
    # `once_differentiable` makes `ctx` positional; autograd passes it so.
    def backward(ctx: Any, grad: torch.Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        inputs, weights = ctx.saved_tensors
        splits, by_inputs, by_weights = ctx.splits, None, None
        parts = grad.contiguous().split(splits)
        if ctx.needs_input_grad[0]:
            by_inputs = torch.empty_like(inputs)
            _multiply(weights, parts, [by_inputs], splits, "NN")
        if ctx.needs_input_grad[1]:
            by_weights = torch.empty_like(weights)
            _multiply(inputs.split(splits), parts, by_weights, splits, "NT")
        return by_inputs, by_weights, None


def _multiply(
    left: Iterable[torch.Tensor],
    right: Iterable[torch.Tensor],
    out: Iterable[torch.Tensor],
    splits: list[int],
    layout: Literal["TN", "NN", "NT"],
) -> None:
    """Fill `out` with each expert's product. It has a tensor for each expert in layout NT, the gradient of weights, and
    otherwise a single one with the rows of all.
    """
    gemm: Any = importlib.import_module("transformer_engine.pytorch.cpp_extensions").general_grouped_gemm
    left, right, out = list(left), list(right), list(out)
    gemm(
        left,
        right,
        out,
        [None] * len(splits),  # nothing is quantised
        out[0].dtype,
        layout=layout,
        m_splits=splits,
        grad=layout != "TN",
        single_output=layout != "NT",
    )


def _with_gradient(_module: nn.Module, _inputs: object, output: torch.Tensor) -> torch.Tensor:
    return output.requires_grad_(True) if torch.is_grad_enabled() and not output.requires_grad else output


def _fill(parameter: torch.Tensor, spec: ModelSpec, group: RankGroup, entry: TensorEntry, seed: int) -> None:
    """Fill this rank's part of an A, uniform in +-1 / sqrt(in); the numbers depend only on the seed and the name."""
    digest = hashlib.sha256(f"{seed}/{entry.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    bound = entry.shape[1] ** -0.5
    whole = torch.empty(entry.shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator)
    for block in parameter_blocks(spec, entry, group.size, group.rank):
        parameter.narrow(block.dim, block.local_start, block.length).copy_(
            whole.narrow(block.dim, block.start, block.length)
        )


def _is_grouped(linear: nn.Module) -> bool:
    """Whether the module is Transformer Engine's linear layer of several experts."""
    return hasattr(linear, "num_gemms")


def _linears(chunk: PolicyModel, spec: ModelSpec, groups: ParallelGroups) -> Iterator[tuple[nn.Module, dict[str, str]]]:
    """Yields every linear layer inside the chunk's transformer layers, and the names of its weights in it by their
    canonical names: one, or one for each of this rank's experts.
    """
    layers: Any = chunk.decoder.layers  # torch declares plain modules
    num_local = 0 if spec.moe is None else spec.moe.num_experts // groups.expert.size
    first_expert = groups.expert.rank * num_local
    for layer in layers:
        start = f"decoder.layers.{layer.layer_number - 1}."
        for name, module in layer.named_modules():
            before, _, last = name.rpartition(".")
            if not is_of_linear_layer(f"{start}{name}.weight"):
                continue
            if _is_grouped(module):
                experts = range(num_local)
                yield module, {f"{start}{before}.{first_expert + i}.{last}.weight": f"weight{i}" for i in experts}
            elif hasattr(module, "weight"):
                before, found, after = name.partition(".local_experts.")
                if found:
                    local, _, rest = after.partition(".")
                    name = f"{before}.{first_expert + int(local)}.{rest}"
                yield module, {f"{start}{name}.weight": "weight"}


@contextmanager
def without_adapters(chunks: Sequence[PolicyModel]) -> Iterator[None]:
    """Inside this context the chunks compute as the frozen model does, without adapters."""
    adapters = [adapter for chunk in chunks for adapter in chunk.low_rank()]
    for adapter in adapters:
        adapter.is_on = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.is_on = True


# --- checkpoint ---------------------------------------------------------------------------------------------


def sharded_adapters(chunk: PolicyModel, groups: ParallelGroups) -> dict[str, ShardedTensor | ShardedTensorFactory]:
    """Megatron's sharded state of one chunk's adapters, by the parameters' names in the chunk. The keys contain the
    global layer and expert, so any layout can read them.
    """
    found = {}
    for place, adapter in zip(chunk.adapters, chunk.low_rank(), strict=True):
        for name, half in adapter.halves().items():
            axis = 0 if half is adapter.b else 1
            sharded: Any = _sharded(adapter, half, f"{ADAPTERS}.{name}", groups, axis)
            if axis == 0 and adapter.fuses_gate:
                sharded = apply_swiglu_sharded_factory(sharded, ())
            elif axis == 0 and adapter.sections:
                sharded = _in_sections(sharded, adapter.sections, adapter.group)
            found[f"{ADAPTERS}.{place}." + next(key for key, own in adapter.named_parameters() if own is half)] = (
                sharded
            )
    return found


def _in_sections(whole: ShardedTensor, sections: dict[str, int], group: RankGroup) -> ShardedTensorFactory:
    """`whole` [rows, rank] as a tensor for each section of its rows, which every rank of `group` has a part of. So a
    layout of another tensor-parallel size finds its rows.
    """

    data: Any = whole.data  # Megatron declares it as optional, and lists of parts as dictionaries

    def build(key: str, rows: torch.Tensor, replica_id: Any, _flattened: slice | None) -> Any:
        parts = zip(sections, rows.split(list(sections.values())))
        place = (0, group.rank, group.size)
        return [ShardedTensor.from_rank_offsets(f"{key}.{name}", p, place, replica_id=replica_id) for name, p in parts]

    def merge(parts: Any) -> torch.Tensor:
        return torch.cat(parts)

    return ShardedTensorFactory(whole.key, data, build, merge, whole.replica_id)


def load_trained(chunk: PolicyModel, state: dict[str, Any]) -> None:
    """Load a chunk's state from a checkpoint; only its adapters if it has some. Raises RuntimeError if a part is
    missing or unknown.
    """
    if not len(chunk.adapters):
        chunk.load_state_dict(state, strict=True)
        return
    names = {name.removeprefix(f"{ADAPTERS}."): value for name, value in state.items()}
    chunk.adapters.load_state_dict(names, strict=True)


def _sharded(adapter: Adapter, tensor: torch.Tensor, key: str, groups: ParallelGroups, axis: int) -> ShardedTensor:
    is_cut = adapter.sharding == ("rows" if axis == 0 else "columns")
    own: Any = tensor
    replicas = groups.data_context if own.allreduce else groups.expert_data
    offsets = [(axis, adapter.group.rank, adapter.group.size)] if is_cut else []
    copy = 0 if is_cut else adapter.group.rank
    return ShardedTensor.from_rank_offsets(key, tensor, *offsets, replica_id=(0, copy, replicas.rank))

"""Gated delta nets, attention with gates, and their norms, as parts of Megatron's layers (Qwen3-Next, Qwen3.5).

Megatron-Core has the layer. Since 0.19 it takes packed sequences and context parallelism; `PackedDeltaNet` adds both to
that of 0.16, and to both the states of rows that share prefixes. All call three functions of flash-linear-attention,
for which `cpu/delta_rule.py` stands in on a machine without a GPU. `with_plain_gates` is their input projection in FP8.
`complete_delta_spec` puts the parts into a layer spec.
"""

from __future__ import annotations

import copy
import functools
import importlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm import gated_delta_net
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.ssm.mamba_context_parallel import _all_to_all_cp2hp, _all_to_all_hp2cp
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    linear_with_grad_accumulation_and_async_allreduce,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from gspo_mega.algorithm.terms import local_rows
from gspo_mega.cpu.delta_rule import computed_in
from gspo_mega.cpu.forest_attention import ForestNodes, forest_of
from gspo_mega.models.spec import ModelSpec

# The functions of flash-linear-attention, or what stands in for them: names that Megatron's module may lack.
_KERNELS: Any = gated_delta_net
HAS_PACKED_LAYER = hasattr(gated_delta_net, "__path__")
"""Whether Megatron's own layer takes packed sequences: it is a package since the release that does (0.19)."""


def delta_settings(spec: ModelSpec) -> dict[str, Any]:
    """The settings of TransformerConfig for these models; none for others.

    Megatron's `experimental_attention_variant` stays unset: it only adds checks, and one of 0.16 refuses context
    parallelism.
    """
    settings: dict[str, Any] = {}
    if spec.zero_centred_norms:
        settings |= dict(layernorm_zero_centered_gamma=True)
    if spec.output_gate:
        settings |= dict(attention_output_gate=True)
    if spec.delta is not None:
        settings |= dict(
            linear_conv_kernel_dim=spec.delta.kernel,
            linear_key_head_dim=spec.delta.key_dim,
            linear_value_head_dim=spec.delta.value_dim,
            linear_num_key_heads=spec.delta.key_heads,
            linear_num_value_heads=spec.delta.value_heads,
            # Layers differ, so a checkpoint names each by its number.
            hetereogenous_dist_checkpoint=True,
        )
    return settings


class GatedAttention(SelfAttention):
    """Megatron's attention with gates, also where there are more tensor ranks than key-value heads. Release 0.16 then
    leaves the gates of a whole group of heads on each rank.
    """

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
        """Megatron's query, key, value and gate [t, 1, heads, size], each with this rank's heads only."""
        found: Any = super().get_query_key_value_tensors(*args, **kwargs)
        if not (isinstance(found, tuple) and len(found) == 4) or found[3].size(2) == found[0].size(2):
            return found
        query, key, value, gate = found
        here = self.pg_collection.tp.rank() % (gate.size(2) // query.size(2))
        return query, key, value, gate.narrow(2, here * query.size(2), query.size(2))


class PackedDeltaNet(GatedDeltaNet):
    """Megatron's layer for packed sequences, with context parallelism; Megatron's own forward pass where it has that
    (0.19) and no rows share prefixes, because it keeps its states to itself.

    Each rank of the context group has a part of every sequence. Before the convolution, ranks exchange positions for
    heads: each then has whole sequences of a part of the heads. Afterwards they exchange back. A key head stays with
    its value heads.
    """

    # Megatron's arguments; those that a layer of a decoder never has are not named.
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **unused: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Apply the layer to hidden_states [t, 1, hidden], this rank's positions of a pack; returns that form.

        Collective over the tensor and context groups.
        """
        if packed_seq_params is None:
            raise ValueError("PackedDeltaNet takes packed sequences only; packed_seq_params is None")
        if HAS_PACKED_LAYER and forest_of(packed_seq_params) is None:
            mask: Any = attention_mask
            return super().forward(hidden_states, mask, packed_seq_params=packed_seq_params, **unused)
        own: Any = self  # Megatron declares these sizes as optional
        forks = _forks_of(packed_seq_params, own.conv_kernel_dim)
        bounds = packed_seq_params.cu_seqlens_q
        group = self.pg_collection.cp
        parts, rank = group.size(), group.rank()
        key_dim, value_dim = own.key_head_dim, own.value_head_dim
        keys, values = own.qk_dim // own.tp_size, own.v_dim // own.tp_size
        heads = own.num_value_heads // own.tp_size
        sections = (keys, keys, values, values, heads, heads)

        projected, _ = self.in_proj(hidden_states)
        order = None
        if parts > 1:
            order = _order_of(packed_seq_params, parts).to(projected.device)
            # Every rank's share of each section, rank after rank.
            shares = [section.chunk(parts, dim=-1) for section in projected.split(sections, dim=-1)]
            projected = torch.cat([share[place] for place in range(parts) for share in shares], dim=-1)
            projected = _all_to_all_cp2hp(projected, group)[order]
        mixed, gate, beta, alpha = projected.transpose(0, 1).split(
            [size // parts for size in (2 * keys + values, values, heads, heads)], dim=-1
        )

        filters = torch.cat([_own(part, parts, rank) for part in self.conv1d.weight.split(sections[:3])])
        convolve = functools.partial(_KERNELS.causal_conv1d, weight=filters.squeeze(1), activation="silu")
        if forks is None:
            mixed, _ = convolve(x=mixed, cu_seqlens=bounds)
        else:
            mixed = forks.convolve(mixed, convolve)
        query, key, value = mixed.split([keys // parts, keys // parts, values // parts], dim=-1)
        query, key = (x.unflatten(-1, (-1, key_dim)) for x in (query, key))
        shared = own.num_value_heads // own.num_key_heads
        query, key = (_KERNELS.l2norm(x.contiguous()).repeat_interleave(shared, dim=2) for x in (query, key))
        wide = computed_in(alpha)
        a_log, dt_bias = (_own(parameter, parts, rank).to(wide) for parameter in (self.A_log, self.dt_bias))
        inputs = (
            query,
            key,
            value.unflatten(-1, (-1, value_dim)).contiguous(),
            (-a_log.exp() * F.softplus(alpha.to(wide) + dt_bias)).float(),
            (beta.to(wide).sigmoid().to(beta.dtype) if wide == torch.float64 else beta.sigmoid()).contiguous(),
        )
        if forks is None:
            out, _ = _KERNELS.chunk_gated_delta_rule(*inputs, cu_seqlens=bounds)
        else:
            out = forks.scan(inputs, _KERNELS.chunk_gated_delta_rule)
        normed = self._apply_gated_norm(out, gate.unflatten(-1, (-1, value_dim)).contiguous())
        normed = normed.reshape(-1, 1, values // parts)
        if order is not None:
            back = torch.empty_like(order)
            back[order] = torch.arange(len(order), device=order.device)
            normed = _all_to_all_hp2cp(normed[back], group)
        return self.out_proj(normed)


class DeltaForks:
    """Where the states of a gated delta net are forked, in a pack of C computed tokens whose rows share prefixes.

    Every node of the forest is a sequence. It begins with the state after its parent, so nodes are computed level by
    level, all of a level together: with shared prompts there are two levels. The convolution also sees the last tokens
    of a node's path. `width`: tokens that the convolution sees, the token itself included.
    """

    def __init__(self, nodes: ForestNodes, width: int, target: torch.device) -> None:
        spans = [torch.arange(start, stop) for start, stop in itertools.pairwise(nodes.starts)]
        before = list(nodes.paths(width - 1))
        seen = [torch.cat(parts) for parts in zip(before, spans, strict=True)]
        self._seen, self._seen_bounds = torch.cat(seen).to(target), _bounds_of(seen, target)
        is_own = [torch.arange(len(rows)) >= len(path) for rows, path in zip(seen, before, strict=True)]
        self._own = torch.nonzero(torch.cat(is_own)).flatten().to(target)

        parents = nodes.parents()
        levels: list[list[int]] = []
        level_of: list[int] = []
        for node, parent in enumerate(parents):
            level_of.append(0 if parent < 0 else level_of[parent] + 1)
            if level_of[node] == len(levels):
                levels.append([])
            levels[level_of[node]].append(node)
        place = {node: k for level in levels for k, node in enumerate(level)}
        # Of each level: its tokens, the bounds of its nodes, and the places of their parents in the level before.
        self._levels = [
            (
                torch.cat([spans[node] for node in level]).to(target),
                _bounds_of([spans[node] for node in level], target),
                torch.tensor([place[parents[node]] for node in level if parents[node] >= 0], device=target),
            )
            for level in levels
        ]
        self._back = torch.cat([rows for rows, _, _ in self._levels]).argsort()

    def convolve(self, x: torch.Tensor, function: Callable[..., Any]) -> torch.Tensor:
        """The convolution of x [1, C, channels] over each token's own path, by fla's `function`."""
        out, _ = function(x=x[:, self._seen], cu_seqlens=self._seen_bounds)
        return out[:, self._own]

    def scan(self, inputs: Sequence[torch.Tensor], function: Callable[..., Any]) -> torch.Tensor:
        """The rule over each token's own path, by fla's `function`: from q, k, v, g and beta, [1, C, ...] each, the
        outputs in the form of v.
        """
        outputs, states = [], None
        for rows, bounds, parents in self._levels:
            out, states = function(
                *(x[:, rows] for x in inputs),
                initial_state=None if states is None else states[parents],
                output_final_state=True,
                cu_seqlens=bounds,
            )
            outputs.append(out)
        return torch.cat(outputs, dim=1)[:, self._back]


def _forks_of(params: PackedSeqParams, width: int) -> DeltaForks | None:
    """The forks of a pack, made once for all layers; None if its rows share nothing."""
    holder: Any = params  # keeps them in an attribute that Megatron's class does not declare
    if (forest := forest_of(params)) is not None and getattr(holder, "delta_forks", None) is None:
        holder.delta_forks = DeltaForks(forest, width, forest.depths.device)
    return getattr(holder, "delta_forks", None)


def _bounds_of(parts: Sequence[torch.Tensor], target: torch.device) -> torch.Tensor:
    """The offsets of parts that are put one after the other, [parts + 1] int32."""
    return F.pad(torch.tensor([len(part) for part in parts]).cumsum(0), (1, 0)).to(target, torch.int32)


def _own(parameter: torch.Tensor, parts: int, rank: int) -> torch.Tensor:
    """This context rank's part of a parameter that is cut by heads."""
    return parameter if parts == 1 else parameter.chunk(parts)[rank]


def _order_of(params: PackedSeqParams, parts: int) -> torch.Tensor:
    """[t] int64 on the host: the row of each position of the pack when the context ranks' rows are one after the
    other. Made once for all layers.
    """
    holder: Any = params  # keeps it in an attribute that Megatron's class does not declare
    if getattr(holder, "context_order", None) is None:
        bounds = params.cu_seqlens_q.cpu()
        rows = torch.cat([local_rows(bounds, parts, rank) for rank in range(parts)])
        order = torch.empty_like(rows)
        order[rows] = torch.arange(len(rows))
        holder.context_order = order
    return holder.context_order


class _PlainNorm:
    """The norm of a delta net's output, which multiplies by its weight. Megatron would give it 1 + weight, too."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float, norm: Any) -> torch.nn.Module:
        own = copy.copy(config)
        own.layernorm_zero_centered_gamma = False
        return norm(config=own, hidden_size=hidden_size, eps=eps)


@functools.cache
def with_plain_gates(column: Any) -> type:
    """The input projection of a gated delta net in FP8: Transformer Engine's column-parallel layer `column`, whose last
    rows, betas and alphas, are multiplied unrounded, as published FP8 folders keep them.

    The layer has one weight, in Megatron's form, so that folders, adapters and checkpoints do not depend on the
    precision. It is never stored in FP8 (`fp8.parameters`), and its gradient is added by autograd, because FP8 computes
    only a part of it. With sequence parallelism the input is gathered twice.
    """

    class PlainGates(column):
        def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **options: Any) -> None:
            own = copy.copy(config)
            own.gradient_accumulation_fusion = False
            engine = importlib.import_module("transformer_engine.pytorch")
            with engine.fp8_model_init(enabled=False):
                super().__init__(input_size, output_size, config=own, **options)
            heads: Any = config.linear_num_value_heads  # Megatron declares it as optional
            self.num_fp8_rows = self.weight.size(0) - 2 * heads // self._tp_group.size()

        def _get_weight_tensors(self) -> list[torch.Tensor]:
            return [self.weight[: self.num_fp8_rows]]

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
            """Project x [t, 1, hidden], this tensor rank's positions; returns [positions of all tensor ranks, 1, rows
            of this rank]. Collective over the tensor group.
            """
            rounded, _ = super().forward(x)
            plain = linear_with_grad_accumulation_and_async_allreduce(
                x,
                self.weight[self.num_fp8_rows :],
                None,
                gradient_accumulation_fusion=False,
                allreduce_dgrad=False,  # the plan refuses tensor ranks without sequence parallelism
                sequence_parallel=self.sequence_parallel,
                tp_group=self._tp_group,
            )
            return torch.cat([rounded, plain], dim=-1), None

    return PlainGates


def complete_delta_spec(layer: ModuleSpec, norm: type, linears: tuple[type, type] | None = None) -> None:
    """Put a gated delta net in place of the attention of the spec that Megatron made for a layer, in place.

    `norm`: the class of the layer's norms. `linears`: the column- and row-parallel layers; Megatron's plain ones if
    None. The norm before the layer is not fused into its projection.
    """
    parts: Any = layer.submodules
    column, row = linears or (ColumnParallelLinear, RowParallelLinear)
    parts.input_layernorm = norm
    # A checkpoint names it as in plain layers, where Megatron calls every such norm a part of attention.
    fused = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    parts.sharded_state_dict_keys_map = {**(parts.sharded_state_dict_keys_map or {}), **fused}
    parts.self_attention = ModuleSpec(
        module=PackedDeltaNet,
        submodules=GatedDeltaNetSubmodules(
            in_proj=column, out_norm=ModuleSpec(module=_PlainNorm, params=dict(norm=norm)), out_proj=row
        ),
    )

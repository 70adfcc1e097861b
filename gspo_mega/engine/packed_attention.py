"""Core attention and norm without Transformer Engine: packed sequences on torch's SDPA.

Replaces `TEDotProductAttention` and `TENorm`, which half precision on a GPU uses. It takes the same packed (`thd`)
input and context-parallel layout, so that all code above it is the same. Knows nothing of the loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from gspo_mega.engine.context_parallel import local_positions

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection


class TorchNorm:
    """RMSNorm or LayerNorm whose parameters are marked as seeing sequence-parallel activations.

    Megatron all-reduces the gradients of marked parameters over the tensor group. torch's own norms carry no mark, and
    Megatron refuses them under sequence parallelism.
    """

    def __new__(
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: object
    ) -> torch.nn.Module:
        norm_class = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        norm = norm_class(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in norm.parameters():
            marked: Any = parameter  # Megatron's mark is an attribute that torch's class does not declare
            marked.sequence_parallel = config.sequence_parallel
        return norm


@dataclass
class PaddedLayout:
    """The place of each packed row in a [S, longest] rectangle; all tensors are this rank's.

    `query_rows` [S, Lq] and `key_rows` [S, Lk] int64 are indices of packed rows (0 for padding). `mask` [S, 1, Lq, Lk]
    bool is True if the query attends to the key, or None for plain causal attention. `packed` [t] int64 selects this
    rank's rows from the flattened query rectangle.
    """

    query_rows: torch.Tensor
    key_rows: torch.Tensor
    mask: torch.Tensor | None
    packed: torch.Tensor

    def to(self, device: torch.device) -> PaddedLayout:
        mask = None if self.mask is None else self.mask.to(device)
        return PaddedLayout(self.query_rows.to(device), self.key_rows.to(device), mask, self.packed.to(device))


def _pad(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def padded_layout(params: PackedSeqParams, cp_size: int = 1, cp_rank: int = 0) -> PaddedLayout:
    """The layout of a pack, made once for all layers."""
    holder: Any = params  # keeps the layout in an attribute that Megatron's class does not declare
    cached = getattr(params, "padded_layout", None)
    if cached is not None:
        return cached
    lengths = (params.cu_seqlens_q[1:] - params.cu_seqlens_q[:-1]).tolist()
    local = [length // cp_size for length in lengths]
    starts = [0]
    for length in local:
        starts.append(starts[-1] + length)
    query_rows = [torch.arange(starts[s], starts[s + 1]) for s in range(len(lengths))]
    queries = _pad(query_rows)
    packed = torch.cat([torch.arange(n) + s * queries.size(1) for s, n in enumerate(local)])
    if cp_size == 1:
        layout = PaddedLayout(queries, queries, None, packed)
    else:
        key_rows, mask = [], torch.zeros(len(lengths), 1, queries.size(1), max(lengths), dtype=torch.bool)
        for s, length in enumerate(lengths):
            rows = torch.empty(length, dtype=torch.int64)
            for rank in range(cp_size):
                positions = local_positions(length, cp_size, rank)
                rows[positions] = torch.arange(local[s]) + starts[s] + rank * starts[-1]
            key_rows.append(rows)
            own = local_positions(length, cp_size, cp_rank)
            mask[s, 0, : local[s], :length] = own[:, None] >= torch.arange(length)[None]
            mask[s, 0, local[s] :, 0] = True  # padding rows attend to one key, so that no row is fully masked
        layout = PaddedLayout(queries, _pad(key_rows), mask, packed)
    holder.padded_layout = layout = layout.to(params.cu_seqlens_q.device)
    return layout


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    params: PackedSeqParams,
    context_group: dist.ProcessGroup | None,
    softmax_scale: float | None,
) -> torch.Tensor:
    """Causal grouped-query attention over packed sequences.

    query [t, heads, d], key [t, kv_heads, d], value [t, kv_heads, v] of one float dtype, where t is this rank's share
    of the packed tokens and v equals d except in latent attention. Returns [t, heads * v] of that dtype. Under context
    parallelism each rank holds the two chunks of every sequence that `context_parallel.local_positions` names; keys and
    values are gathered over the context group; None is a group of one rank. `softmax_scale`: 1 / sqrt(d) if None.
    Collective over the context group if its size is above 1.
    """
    cp_size, cp_rank = (1, 0) if context_group is None else (context_group.size(), context_group.rank())
    layout = padded_layout(params, cp_size, cp_rank)
    if cp_size > 1:
        key, value = (
            gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True, group=context_group)
            for x in (key, value)
        )
    value_dim = value.size(-1)
    if value_dim < query.size(-1):  # torch has no fused attention for values narrower than keys
        value = F.pad(value, (0, query.size(-1) - value_dim))
    q = query[layout.query_rows].transpose(1, 2)  # [S, heads, Lq, d]
    k, v = (x[layout.key_rows].transpose(1, 2) for x in (key, value))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=layout.mask, is_causal=layout.mask is None, scale=softmax_scale, enable_gqa=True
    )
    out = out.transpose(1, 2).flatten(0, 1)[layout.packed][..., :value_dim]
    return out.flatten(1)


class PackedAttention(MegatronModule):
    """`attend` as Megatron's core attention of a layer."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number,
        attn_mask_type,
        attention_type,
        attention_dropout=None,
        softmax_scale=None,
        cp_comm_type=None,
        *,
        pg_collection: ProcessGroupCollection,
        k_channels=None,
        v_channels=None,
    ) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale
        self.context_group = pg_collection.cp

    def forward(
        self,
        query,
        key,
        value,
        attention_mask,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params=None,
    ):
        if packed_seq_params is None:
            raise ValueError("PackedAttention takes packed sequences only; packed_seq_params is None")
        return attend(query, key, value, packed_seq_params, self.context_group, self.softmax_scale)

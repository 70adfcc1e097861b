"""One MicroBatch as tensors of this rank: sliced for context parallelism, on its device. And the one sum that losses
share between context-parallel ranks.

`to_device` owns the alignment between packed positions and active response tokens: a position predicts the token after
it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams

from gspo_mega.algorithm.terms import local_positions, local_rows
from gspo_mega.base.records import MicroBatch
from gspo_mega.base.sampling_masks import SamplingMasks
from gspo_mega.cpu.forest_attention import ForestNodes, set_forest
from gspo_mega.engine.log_probs import KeptTokens
from gspo_mega.engine.process_groups import ParallelGroups, RankGroup, device


@dataclass
class DeviceBatch:
    """The input of one forward pass on one rank, local to the rank's part of the context group.

    `token_ids`, `position_ids` [1, t] int64 with t = T / context size, or C / context size if rows share prefixes;
    `packed`: Megatron's packed-sequence parameters, which then carry the forest.
    For the N active response tokens that this rank holds: `rows` [N] int64 (the position in t that predicts the token;
    the last token of a shared prefix predicts one of each row),
    `labels` [N] int64, `sequence_ids` [N] int64 in [0, S), `rollout_log_probs` [N] float32 nats, `token_advantages` [N]
    float64 or None, `version_index` [N] int64 in [0, `num_versions`) or None. For the E sequences whose last active
    token is held here: `end_rows` [E] int64 (its own position in t), `end_sequences` [E] int64. `sequence`:
    tensors [S], the same on all context ranks; `kept`: the tokens that each of the N tokens was sampled from, on
    last-stage ranks, or None if from all; `trajectory_index` [S] int64, rows of the rollout batch, on the host.
    """

    token_ids: torch.Tensor
    position_ids: torch.Tensor
    packed: PackedSeqParams
    rows: torch.Tensor
    labels: torch.Tensor
    sequence_ids: torch.Tensor
    rollout_log_probs: torch.Tensor
    num_sequences: int
    sequence: dict[str, torch.Tensor]
    trajectory_index: np.ndarray
    end_rows: torch.Tensor
    end_sequences: torch.Tensor
    token_advantages: torch.Tensor | None = None
    version_index: torch.Tensor | None = None
    num_versions: int = 1
    kept: KeptTokens | None = None


def held_rows(micro_batch: MicroBatch, groups: ParallelGroups) -> tuple[torch.Tensor, torch.Tensor]:
    """The positions of the pack's rows that this context rank holds, [t] int64, and the places among them of the N
    active response tokens, [N] int64; both on the host. Of rows that share prefixes these are all positions that are
    computed on the rank, in the order of the rows.
    """
    if micro_batch.computed_at is not None:
        held = torch.nonzero(_places_of_rows(micro_batch, groups) >= 0).flatten()
    else:
        held = local_rows(torch.from_numpy(micro_batch.cu_seqlens), groups.context.size, groups.context.rank)
    return held, torch.nonzero(torch.from_numpy(micro_batch.loss_mask)[held] > 0).flatten()


def computed_rows(micro_batch: MicroBatch, groups: ParallelGroups) -> torch.Tensor:
    """The positions of the pack's rows that stand for those that this context rank computes, in their order: [t] int64,
    on the host. Rows that share prefixes are cut as one sequence of all computed positions.
    """
    size, rank = groups.context.size, groups.context.rank
    if micro_batch.computed_at is None:
        return local_rows(torch.from_numpy(micro_batch.cu_seqlens), size, rank)
    return torch.from_numpy(micro_batch.first_rows())[local_positions(micro_batch.num_computed, size, rank)]


def _places_of_rows(micro_batch: MicroBatch, groups: ParallelGroups) -> torch.Tensor:
    """Where this context rank computes each position of rows that share prefixes: [T] int64 of its own positions, -1
    where another rank does.
    """
    own = local_positions(micro_batch.num_computed, groups.context.size, groups.context.rank)
    places = torch.full((micro_batch.num_computed,), -1)
    places[own] = torch.arange(len(own))
    assert micro_batch.computed_at is not None
    return places[torch.from_numpy(micro_batch.computed_at)]


def _ends(micro_batch: MicroBatch, held: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`end_rows` and `end_sequences` of the `held` positions, on the host."""
    active = np.flatnonzero(micro_batch.loss_mask > 0)
    ids = micro_batch.sequence_ids[active]
    is_last = np.append(ids[1:] != ids[:-1], True)[: len(ids)]
    # A position predicts the token after it, whose own state is one position further.
    sequence_at = torch.full((micro_batch.num_tokens + 1,), -1)
    sequence_at[torch.from_numpy(active[is_last] + 1)] = torch.from_numpy(ids[is_last])
    rows = torch.nonzero(sequence_at[held] >= 0).flatten()
    return rows, sequence_at[held[rows]]


def to_device(micro_batch: MicroBatch, groups: ParallelGroups) -> DeviceBatch:
    """Slice `micro_batch` for this context rank and copy it to this rank's device."""
    cu_seqlens = torch.from_numpy(micro_batch.cu_seqlens)
    held, rows = held_rows(micro_batch, groups)
    active = held[rows]
    end_rows, end_sequences = _ends(micro_batch, held)
    longest = int((cu_seqlens[1:] - cu_seqlens[:-1]).max())
    target = device()
    if micro_batch.computed_at is not None:
        places = _places_of_rows(micro_batch, groups)
        rows, end_rows = places[active], places[held[end_rows]]
        held = computed_rows(micro_batch, groups)  # what rows share is the same in all of them
        cu_seqlens = torch.tensor([0, micro_batch.num_computed], dtype=cu_seqlens.dtype)

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        # From ordinary memory a copy would wait for all work that the GPU has been given so far.
        return tensor.pin_memory().to(target, non_blocking=True) if target.type == "cuda" else tensor.to(target)

    def move(array: np.ndarray, index: torch.Tensor | None = None) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return copy(tensor if index is None else tensor[index])

    offsets = copy(cu_seqlens)
    positions = move(micro_batch.position_ids, held)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        cu_seqlens_q_padded=offsets,
        cu_seqlens_kv_padded=offsets,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    if micro_batch.node_starts is not None and micro_batch.node_ends is not None:
        counts, first = micro_batch.row_counts(), torch.from_numpy(micro_batch.first_rows())
        own = local_positions(micro_batch.num_computed, groups.context.size, groups.context.rank)
        nodes = ForestNodes(
            micro_batch.node_starts.tolist(),
            micro_batch.node_ends.tolist(),
            move(micro_batch.position_ids, first),
            move(counts, own),
            int(counts.sum()),
        )
        set_forest(packed, nodes.for_rank(groups.context.size, groups.context.rank))
    return DeviceBatch(
        token_ids=move(micro_batch.token_ids, held)[None],
        position_ids=positions[None],
        packed=packed,
        rows=copy(rows),
        labels=move(micro_batch.labels, active),
        sequence_ids=move(micro_batch.sequence_ids, active),
        rollout_log_probs=move(micro_batch.rollout_log_probs, active),
        num_sequences=micro_batch.num_sequences,
        sequence={name: move(values) for name, values in micro_batch.sequence.items()},
        trajectory_index=micro_batch.trajectory_index,
        end_rows=copy(end_rows),
        end_sequences=copy(end_sequences),
        token_advantages=None if micro_batch.token_advantages is None else move(micro_batch.token_advantages, active),
        version_index=None if micro_batch.version_index is None else move(micro_batch.version_index, active),
        num_versions=1 if micro_batch.versions is None else len(micro_batch.versions),
        kept=_kept_tokens(micro_batch, active, move) if groups.is_last_stage else None,
    )


def _kept_tokens(
    micro_batch: MicroBatch, active: torch.Tensor, move: Callable[[np.ndarray], torch.Tensor]
) -> KeptTokens | None:
    """The sets of the `active` positions of the pack, [N] int64, in their order."""
    if micro_batch.mask_counts is None or micro_batch.mask_codes is None:
        return None
    counts, ids = SamplingMasks(micro_batch.mask_counts, micro_batch.mask_codes).at(active.numpy())
    offsets = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    return KeptTokens(offsets.tolist(), move(counts.astype(np.int64)), move(ids.astype(np.int32)))


class _SumForward(torch.autograd.Function):
    """Sum over the group; the gradient goes back to each rank's own addend unchanged."""

    @staticmethod
    def forward(ctx, values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = values.detach().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None]:
        (grad,) = grad_outputs
        return grad, None


def sum_over_context(values: torch.Tensor, context: RankGroup) -> torch.Tensor:
    """The sum over the context group, [S] of the dtype of `values`, identical on its ranks.

    values: [S] float32 or float64, this rank's partial sums per sequence, in nats for the losses.
    Every rank then computes the same per-sequence loss and back-propagates its own tokens only. The gradient is
    complete once gradients are summed over the group, which data-parallel reduction does.
    Collective over the context group if its size is above 1.
    """
    return values if context.size == 1 else _SumForward.apply(values, context.group)


def with_known_sum(values: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """`sum_over_context` without communication, for a sum that is already known: `total` with the gradient of `values`.

    values: [S] float32 or float64, this rank's partial sums per sequence, finite. total: [S] of the same dtype, their
    sum over the context group, identical on its ranks. Returns [S] of that dtype.
    """
    return total + (values - values.detach())

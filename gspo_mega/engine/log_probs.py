"""Hidden states to per-token log-probs, holding no more than one chunk of logits at a time.

The one log-prob function: the old pass, the training passes and evaluation all go through
`token_log_probs`. Only rows that carry an active response token reach the LM head. The head is
vocabulary-parallel; accumulation, log-softmax and entropy are fp32 (float64 stays); the backward pass
computes each chunk's logits again.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

from gspo_mega.engine.process_groups import Group

DEFAULT_CHUNK_ROWS = 512


def _matmul_fp32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b accumulated and returned in fp32 (float64 for float64 inputs)."""
    if a.dtype in (torch.float32, torch.float64):
        return a @ b.to(a.dtype)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def _reduce(tensor: torch.Tensor, op: dist.ReduceOp, tensor_group: Group) -> torch.Tensor:
    if tensor_group.size > 1:
        dist.all_reduce(tensor, op=op, group=tensor_group.group)
    return tensor


class _ChunkedLogProbs(torch.autograd.Function):
    """log softmax(h W^T / temperature)[label] for each row, chunk by chunk.

    hidden [N, H]; weight [v, H], this tensor rank's rows of the vocabulary without padding; labels [N]
    int64, global ids; returns log-probs [N] and entropies [N] (not differentiable), fp32 nats.
    """

    @staticmethod
    def forward(ctx, hidden, weight, labels, first_id, temperature, tensor_group, chunk_rows):
        out_dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        log_probs = torch.empty(hidden.size(0), dtype=out_dtype, device=hidden.device)
        entropies, log_sums = torch.empty_like(log_probs), torch.empty_like(log_probs)
        for start in range(0, hidden.size(0), chunk_rows):
            rows = slice(start, start + chunk_rows)
            logits = _matmul_fp32(hidden[rows], weight.t()).div_(temperature)
            if weight.size(0):
                peak = logits.max(dim=1).values
            else:  # this rank holds vocabulary padding only
                peak = torch.full_like(log_probs[rows], float("-inf"))
            peak = _reduce(peak, dist.ReduceOp.MAX, tensor_group)
            local_label = labels[rows] - first_id
            owned = (local_label >= 0) & (local_label < weight.size(0))
            target = torch.zeros_like(peak)
            target[owned] = logits[owned, local_label[owned]]
            weights = torch.exp(logits - peak[:, None])
            sums = torch.stack([weights.sum(1), weights.mul_(logits).sum(1), target])
            total, weighted, target = _reduce(sums, dist.ReduceOp.SUM, tensor_group)
            log_sums[rows] = peak + total.log()
            log_probs[rows] = target - log_sums[rows]
            entropies[rows] = log_sums[rows] - weighted / total
        ctx.save_for_backward(hidden, weight, labels, log_sums)
        ctx.first_id, ctx.temperature, ctx.chunk_rows = first_id, temperature, chunk_rows
        ctx.mark_non_differentiable(entropies)
        return log_probs, entropies

    @staticmethod
    def backward(ctx, grad_log_probs, _grad_entropies):
        hidden, weight, labels, log_sums = ctx.saved_tensors
        accumulate = log_sums.dtype
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=accumulate, device=weight.device)
        for start in range(0, hidden.size(0), ctx.chunk_rows):
            rows = slice(start, start + ctx.chunk_rows)
            logits = _matmul_fp32(hidden[rows], weight.t()).div_(ctx.temperature)
            scale = (grad_log_probs[rows] / ctx.temperature)[:, None]
            grad_logits = logits.sub_(log_sums[rows, None]).exp_().mul_(-scale)
            local_label = labels[rows] - ctx.first_id
            owned = (local_label >= 0) & (local_label < weight.size(0))
            grad_logits[owned, local_label[owned]] += scale[owned, 0]
            grad_logits = grad_logits.to(hidden.dtype)
            grad_hidden[rows] = _matmul_fp32(grad_logits, weight).to(hidden.dtype)
            grad_weight += _matmul_fp32(grad_logits.t(), hidden[rows])
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None


def token_log_probs(
    hidden_states: torch.Tensor,
    head_weight: torch.Tensor,
    rows: torch.Tensor,
    labels: torch.Tensor,
    *,
    vocab_size: int,
    temperature: float,
    tensor_group: Group,
    sequence_parallel: bool,
    chunk_rows: int = DEFAULT_CHUNK_ROWS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies of the tokens `labels`, under softmax(logits / temperature).

    hidden_states: [t, 1, H], the last stage's output; with `sequence_parallel` t is this tensor rank's share.
    head_weight: [padded vocabulary / tensor, H]; rows beyond `vocab_size` are padding and left out.
    rows: [N] int64, positions in the (gathered) pack whose next token is active; labels: [N] int64.
    Returns two [N] float32 tensors in nats, the same on all tensor ranks; the first is differentiable
    with respect to hidden_states and head_weight. Collective over the tensor group.
    """
    if sequence_parallel:
        hidden = gather_from_sequence_parallel_region(
            hidden_states, tensor_parallel_output_grad=True, group=tensor_group.group
        )
    else:
        hidden = copy_to_tensor_model_parallel_region(hidden_states, group=tensor_group.group)
    first_id = tensor_group.rank * head_weight.size(0)
    held = max(0, min(head_weight.size(0), vocab_size - first_id))
    return _ChunkedLogProbs.apply(
        hidden.squeeze(1).index_select(0, rows), head_weight[:held], labels, first_id, temperature, tensor_group, chunk_rows
    )

"""Transformer Engine's permutation of tokens to their experts' rows and back, in plain torch on a CPU.

The first part has the kernels of the extension: the padding of each expert's rows, and the permutation of tokens by the
indices of their experts. Its row map [k * T] int32 has for the j-th expert of token t, at j * T + t, the row of its
copy, or -1 if it is dropped. Rows are added in fp32 and rounded once; a GPU adds them in their own dtype.

The second part, from `replace_kernels` on, has Triton kernels. Each function has the name, the arguments and the result
of one in `transformer_engine.pytorch.triton.permutation`, and replaces it. Its row map [T, 2 E + 1] int32 has for token
t the rows of its copies, the last expert's first, then from column E on the experts of those rows, and in the last
column their number. Sums over a token's rows are fp32, in the map's order, and rounded once, as in Triton.
`tests/kernels` compares the two. There is no function for rows of FP8 numbers or for padding inside the permutation,
because Megatron permutes bf16 rows and pads them later (with the first part).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gspo_mega.cpu.te_extension import kernel


@kernel
def fused_multi_row_padding(
    input: torch.Tensor, output: torch.Tensor, input_row_list: Sequence[int], padded_input_row_list: Sequence[int]
) -> None:
    """Copy each part's rows of `input` [rows, H] to the beginning of its padded part of `output`, followed by zeros."""
    output.zero_()
    parts = zip(input.split(list(input_row_list)), output.split(list(padded_input_row_list)), strict=True)
    for part, padded in parts:
        padded[: part.size(0)] = part


@kernel
def fused_multi_row_unpadding(
    input: torch.Tensor, output: torch.Tensor, input_row_list: Sequence[int], unpadded_input_row_list: Sequence[int]
) -> None:
    """Do the reverse: copy the first rows of each padded part of `input` to `output`."""
    parts = zip(input.split(list(input_row_list)), output.split(list(unpadded_input_row_list)), strict=True)
    for padded, part in parts:
        part.copy_(padded[: part.size(0)])


@kernel
def moe_permute_fwd(
    input: torch.Tensor,
    dtype: int,
    indices: torch.Tensor,
    num_out_tokens: int,
    workspace: list[torch.Tensor],
    max_expanded_token_num: int,
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Copy each token once for each of its experts, in the order of the experts: returns ([rows, H], the row map,
    `workspace`).

    Args:
        input: [T, H]; indices: [T, k] int32, the experts.
        num_out_tokens: rows of the result; those of the last experts beyond it are dropped. 0: all T * k.
    """
    num_tokens, top_k = indices.shape
    num_rows = num_out_tokens or num_tokens * top_k
    order = torch.argsort(indices.flatten(), stable=True)  # rows to t * k + j
    kept = order[:num_rows]
    result = input.new_zeros(num_rows, input.size(1))
    result[: kept.numel()] = input[kept // top_k]
    row_map = torch.full((top_k * num_tokens,), -1, dtype=torch.int32)
    row_map[kept % top_k * num_tokens + kept // top_k] = torch.arange(kept.numel(), dtype=torch.int32)
    return result, row_map, workspace


@kernel
def moe_unpermute_fwd(
    input: torch.Tensor, dtype: int, row_id_map: torch.Tensor, prob: torch.Tensor, num_tokens: int, topK: int
) -> torch.Tensor:
    """Return the sum over each token's rows of `input` [rows, H], times `prob` [T, k] float32 unless that is empty: [T,
    H].
    """
    rows = row_id_map.reshape(topK, num_tokens)
    weights = (rows >= 0).float()
    if prob.numel():
        weights = weights * prob.detach().float().t()
    # 0 * infinity of a row that is not the token's would be NaN.
    copies = torch.where((rows >= 0)[..., None], input[rows.clamp(min=0).long()].float(), 0.0)
    return (copies * weights[..., None]).sum(dim=0).to(input.dtype)


@kernel
def moe_permute_bwd(
    input: torch.Tensor, dtype: int, row_id_map: torch.Tensor, prob: torch.Tensor, num_tokens: int, topK: int
) -> torch.Tensor:
    """Return the gradient of `moe_permute_fwd` with respect to its input [T, H], from that of its rows [rows, H]."""
    return moe_unpermute_fwd(input, dtype, row_id_map, prob, num_tokens, topK)


@kernel
def moe_unpermute_bwd(
    input_bwd: torch.Tensor, input_fwd: torch.Tensor, dtype: int, row_id_map: torch.Tensor, prob: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of `moe_unpermute_fwd` with respect to its input [rows, H], of its dtype, and to `prob`
    [T, k] float32.

    input_bwd: [T, H] of the result; input_fwd: [rows, H]. Without `prob` (empty) a token has one row, and the second
    gradient is zero.
    """
    num_tokens, top_k = prob.shape if prob.numel() else (row_id_map.numel(), 1)
    rows = row_id_map.reshape(top_k, num_tokens)
    is_there = rows >= 0
    outer = input_bwd.detach().float().expand(top_k, num_tokens, input_bwd.size(1))
    by_prob = torch.zeros(num_tokens, top_k)
    by_row = outer
    if prob.numel():
        by_row = outer * prob.detach().float().t()[..., None]
        copies = torch.where(is_there[..., None], input_fwd[rows.clamp(min=0).long()].float(), 0.0)
        by_prob = (outer * copies).sum(dim=-1).t().contiguous()
    result = torch.zeros_like(input_fwd)
    result[rows[is_there].long()] = by_row[is_there].to(result.dtype)
    return result, by_prob


_REPLACED = "transformer_engine.pytorch.triton.permutation"


def replace_kernels(functions: Sequence[Callable[..., Any]] | None = None) -> None:
    """Let Transformer Engine call `functions`, by default those of this file, in place of its kernels of these names.
    Call it once, after it is imported.
    """
    module: Any = sys.modules[_REPLACED]
    own = (
        make_row_id_map,
        permute_with_mask_map,
        unpermute_with_mask_map,
        unpermute_with_mask_map_bwd_with_merging_probs,
        make_chunk_sort_map,
        sort_chunks_by_map,
    )
    for function in own if functions is None else functions:
        if not callable(getattr(module, function.__name__, None)):
            raise RuntimeError(f"{_REPLACED} has no {function.__name__}: another Transformer Engine than 2.20")
        setattr(module, function.__name__, function)


def make_row_id_map(routing_map: torch.Tensor, num_tokens: int, num_experts: int) -> torch.Tensor:
    """Return the row map of `routing_map` [T, E]: rows are ordered by expert, then by token; the copies of a token from
    its last row to its first.
    """
    chosen = routing_map.bool()
    rows = (chosen.t().reshape(-1).cumsum(0) - 1).reshape(num_experts, num_tokens).t()
    experts = torch.where(chosen, torch.arange(num_experts), -1).argsort(dim=1, descending=True)  # its own come first
    counts = chosen.sum(dim=1, keepdim=True)
    there = torch.arange(num_experts) < counts
    parts = [torch.where(there, rows.gather(1, experts), -1), torch.where(there, experts, -1), counts]
    return torch.cat(parts, dim=1).to(torch.int32)


def _copies(row_map: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (token, expert, row) of every copy: [copies] int64 each."""
    there = torch.arange(num_experts) < row_map[:, -1:]
    tokens = there.nonzero()[:, 0]
    return tokens, row_map[:, num_experts:-1][there].long(), row_map[:, :num_experts][there].long()


def _require_plain(**absent: object) -> None:
    for name, value in absent.items():
        if value is not None:
            raise NotImplementedError(f"{_REPLACED}: {name} has no CPU function; Megatron's permutation uses none")


def permute_with_mask_map(
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    probs: torch.Tensor | None,
    scale: torch.Tensor | None,
    pad_offsets: torch.Tensor | None,
    num_tokens: int,
    num_experts: int,
    num_out_tokens: int,
    hidden_size: int,
    scale_hidden_dim: int | None,
) -> tuple[torch.Tensor, None, torch.Tensor | None]:
    """Return (each token's copies [rows, H], None, the weights of those rows [rows] from `probs` [T, E]). A row of
    weight 0 is zero.
    """
    _require_plain(scale=scale, pad_offsets=pad_offsets)
    tokens, experts, rows = _copies(row_id_map, num_experts)
    output = inp.new_zeros(num_out_tokens, hidden_size)
    if probs is None:
        output[rows] = inp[tokens]
        return output, None, None
    weights = probs[tokens, experts]
    output[rows] = torch.where((weights == 0)[:, None], 0, inp[tokens])
    permuted = probs.new_zeros(num_out_tokens)
    permuted[rows] = weights
    return output, None, permuted


def unpermute_with_mask_map(
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    merging_probs: torch.Tensor | None,
    permuted_probs: torch.Tensor | None,
    pad_offsets: torch.Tensor | None,
    num_tokens: int,
    num_experts: int,
    hidden_size: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the sum of each token's rows [T, H], weighted by `merging_probs` [T, E] if there are any; and
    `permuted_probs` [rows] at their tokens and experts, [T, E] with zeros elsewhere.
    """
    _require_plain(pad_offsets=pad_offsets)
    tokens, experts, rows = _copies(row_id_map, num_experts)
    copies = inp[rows].float()
    if merging_probs is not None:
        copies = copies * merging_probs[tokens, experts].float()[:, None]
    output = torch.zeros(num_tokens, hidden_size).index_add_(0, tokens, copies).to(inp.dtype)
    if permuted_probs is None:
        return output, None
    probs = permuted_probs.new_zeros(num_tokens, num_experts)
    probs[tokens, experts] = permuted_probs[rows]
    return output, probs


def unpermute_with_mask_map_bwd_with_merging_probs(
    fwd_output_grad: torch.Tensor,
    row_id_map: torch.Tensor,
    fwd_input: torch.Tensor,
    merging_probs: torch.Tensor,
    pad_offsets: torch.Tensor | None,
    num_tokens: int,
    num_experts: int,
    num_out_tokens: int,
    hidden_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of the weighted sum with respect to its rows [rows, H] and to `merging_probs` [T, E]."""
    _require_plain(pad_offsets=pad_offsets)
    tokens, experts, rows = _copies(row_id_map, num_experts)
    outer = fwd_output_grad[tokens].float()
    by_row = fwd_output_grad.new_zeros(num_out_tokens, hidden_size)
    by_row[rows] = (outer * merging_probs[tokens, experts].float()[:, None]).to(by_row.dtype)
    by_prob = merging_probs.new_zeros(num_tokens, num_experts)
    by_prob[tokens, experts] = (outer * fwd_input[rows].float()).sum(dim=1).to(by_prob.dtype)
    return by_row, by_prob


def make_chunk_sort_map(
    split_sizes: torch.Tensor, sorted_indices: torch.Tensor, num_tokens: int, num_splits: int
) -> torch.Tensor:
    """Return where each row goes when chunks of `split_sizes` rows are put into the order `sorted_indices`: [T]
    int32.
    """
    sizes, order = split_sizes.long(), sorted_indices.long()
    starts = torch.empty_like(sizes)
    starts[order] = sizes[order].cumsum(0) - sizes[order]  # of each chunk in the result
    shift = starts - (sizes.cumsum(0) - sizes)
    return (torch.arange(num_tokens) + shift.repeat_interleave(sizes)).to(torch.int32)


def sort_chunks_by_map(
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    probs: torch.Tensor | None,
    num_tokens: int,
    hidden_size: int,
    is_forward: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Move rows [T, H] and `probs` [T] to their new places, or back if `is_forward` is false."""
    places = row_id_map.long()

    def moved(values: torch.Tensor) -> torch.Tensor:
        if not is_forward:
            return values[places]
        result = torch.empty_like(values)
        result[places] = values
        return result

    return moved(inp), None if probs is None else moved(probs)

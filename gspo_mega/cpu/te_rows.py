"""Transformer Engine's movements of rows on a CPU: the padding of each expert's rows, and the permutation of tokens by
the indices of their experts.

A row map [k * T] int32 has for the j-th expert of token t, at j * T + t, the row of its copy, or -1 if it is dropped.
Rows are added in fp32 and rounded once; a GPU adds them in their own dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gspo_mega.cpu.te_extension import kernel


@kernel
def fused_multi_row_padding(
    input: torch.Tensor, output: torch.Tensor, input_row_list: Sequence[int], padded_input_row_list: Sequence[int]
) -> None:
    """Copy each part's rows of `input` [rows, H] to the beginning of its padded part of `output`, zeros behind them."""
    output.zero_()
    parts = zip(input.split(list(input_row_list)), output.split(list(padded_input_row_list)), strict=True)
    for part, padded in parts:
        padded[: part.size(0)] = part


@kernel
def fused_multi_row_unpadding(
    input: torch.Tensor, output: torch.Tensor, input_row_list: Sequence[int], unpadded_input_row_list: Sequence[int]
) -> None:
    """The reverse: the first rows of each padded part of `input` into `output`."""
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
    """Each token once for each of its experts, in the order of the experts: ([rows, H], the row map, `workspace`).

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
    """The sum over each token's rows of `input` [rows, H], times `prob` [T, k] float32 unless that is empty: [T, H]."""
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
    """The gradient of `moe_permute_fwd` by its input [T, H], from that of its rows [rows, H]."""
    return moe_unpermute_fwd(input, dtype, row_id_map, prob, num_tokens, topK)


@kernel
def moe_unpermute_bwd(
    input_bwd: torch.Tensor, input_fwd: torch.Tensor, dtype: int, row_id_map: torch.Tensor, prob: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `moe_unpermute_fwd` by its input [rows, H], of its dtype, and by `prob` [T, k] float32.

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

"""Transformer Engine's movements of rows on a CPU: padding of each expert's rows, transposes, splits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gspo_mega.engine.cpu.te_extension import kernel


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
def fp8_transpose(input: torch.Tensor, dtype: int, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """The bytes of `input` [..., n] as [n, ...], in `out` where there is one."""
    turned = input.reshape(-1, input.size(-1)).t()
    if out is not None:
        return out.copy_(turned.reshape(out.shape))
    return turned.contiguous().reshape(input.size(-1), *input.shape[:-1])


@kernel
def swap_first_dims(tensor: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """`tensor` [a, b, ...] as [b, a, ...], in `out` where there is one."""
    swapped = tensor.transpose(0, 1)
    return swapped.contiguous() if out is None else out.copy_(swapped)


@kernel
def split_quantize(
    tensor: torch.Tensor,
    split_sections: Sequence[int],
    quantizer_list: Sequence[Any],
    disable_bulk_allocation: bool = False,
) -> list[Any]:
    """Each part of `tensor` [rows, H] quantised by its own quantizer."""
    parts = tensor.split(list(split_sections))
    return [quantizer(part) for quantizer, part in zip(quantizer_list, parts, strict=True)]

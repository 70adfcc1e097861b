"""Transformer Engine's movements of rows on a CPU: the padding of each expert's rows."""

from __future__ import annotations

from collections.abc import Sequence

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

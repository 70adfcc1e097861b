"""A product's operand as fp32 numbers, whatever form Transformer Engine keeps it in."""

from __future__ import annotations

from typing import Any

import torch


def operand(tensor: Any, columnwise: bool) -> torch.Tensor:
    """The numbers that `tensor` stands for, [rows, columns] float32; leading dimensions count as rows.

    `columnwise`: read the copy that was quantised along the columns, where there are two. The two differ if each row
    (or column) of a block has its own scale.
    """
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        values = tensor
    else:
        values = _dequantized(tensor, columnwise)
    return values.reshape(-1, values.shape[-1]).float()


def _dequantized(tensor: Any, columnwise: bool) -> torch.Tensor:
    return tensor.dequantize(dtype=torch.float32)

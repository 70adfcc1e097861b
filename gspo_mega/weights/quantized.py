"""Parameters that Transformer Engine keeps in FP8 (`fp8.parameters`): written from, and read as, plain tensors.

Such a parameter is a tensor of another class. A slice of it is a copy, so that writing into the slice changes nothing
and says nothing: it is filled whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, cast

import torch
from torch import nn


class _Quantized(Protocol):
    """What Transformer Engine's tensors have besides torch's; it is not installed everywhere, so not imported."""

    def quantize_(self, tensor: torch.Tensor) -> object: ...


def is_quantized(parameter: torch.Tensor) -> bool:
    """Is it kept in FP8 blocks beside their scales?"""
    return type(parameter) not in (torch.Tensor, nn.Parameter) and hasattr(parameter, "quantize_")


def plain_values(parameter: torch.Tensor) -> torch.Tensor:
    """The parameter's values in its (nominal) dtype, detached; they share memory with it unless it is quantized."""
    return parameter.detach().dequantize() if is_quantized(parameter) else parameter.detach()


@contextmanager
def filled(parameter: torch.Tensor) -> Iterator[torch.Tensor]:
    """A zeroed plain tensor to fill slice by slice; what it then holds is the parameter."""
    values = (
        torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        if is_quantized(parameter)
        else parameter.detach()
    )
    values.zero_()
    yield values
    if is_quantized(parameter):
        cast(_Quantized, parameter).quantize_(values)

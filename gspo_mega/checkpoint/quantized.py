"""Parameters that Transformer Engine stores in FP8 (`fp8.parameters`), read and written as plain tensors.

Such a parameter is a tensor of another class. A slice of it is a copy: writing into the slice silently changes nothing.
It must therefore be filled whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch
from torch import nn


class _Quantized(Protocol):
    """What Transformer Engine's tensors have besides torch's; it is not installed everywhere, so not imported."""

    def quantize_(self, tensor: torch.Tensor) -> object: ...


def is_quantized(parameter: torch.Tensor) -> bool:
    """True if the parameter, this rank's part of any shape and nominal dtype, is stored as FP8 blocks with scales."""
    return type(parameter) not in (torch.Tensor, nn.Parameter) and hasattr(parameter, "quantize_")


def plain_values(parameter: torch.Tensor) -> torch.Tensor:
    """The parameter's values: its local shape and (nominal) dtype, detached; shared memory unless it is quantized."""
    return parameter.detach().dequantize() if is_quantized(parameter) else parameter.detach()


@contextmanager
def filled(parameter: torch.Tensor) -> Iterator[torch.Tensor]:
    """A zeroed plain tensor of the parameter's local shape and (nominal) dtype, to fill slice by slice.

    On leaving the context, its content is the parameter's. A quantized parameter keeps it as `keep_exact` says.
    """
    values = (
        torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        if is_quantized(parameter)
        else parameter.detach()
    )
    values.zero_()
    yield values
    if is_quantized(parameter):
        cast(_Quantized, parameter).quantize_(values)
        keep_exact(parameter, values)


def keep_exact(parameter: torch.Tensor, values: torch.Tensor) -> None:
    """Leave the loaded `values`, of the parameter's local shape and nominal dtype, on a quantized parameter that is
    trained, as `exact_values`, until the optimizer has made its fp32 copy of them (`engine/megatron_optimizer.py`).

    Nothing on a plain parameter, which holds them itself, and on a frozen one, of which there is no copy.
    """
    if is_quantized(parameter) and parameter.requires_grad:
        cast(Any, parameter).exact_values = values

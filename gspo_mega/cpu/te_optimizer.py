"""Transformer Engine's operations over lists of tensors on a CPU: scaling, norms, Adam.

Arithmetic is fp32 for any dtype of the tensors, and each result is rounded once. A list of lists has one list for each
role (gradients, parameters, ...), all of the same length.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gspo_mega.algorithm import fp8
from gspo_mega.cpu.te_extension import kernel, torch_dtype

Lists = Sequence[Sequence[torch.Tensor]]


@kernel
def multi_tensor_scale(chunk_size: int, is_infinite: torch.Tensor, tensor_lists: Lists, scale: float) -> None:
    """Write output = input * scale for tensor_lists [inputs, outputs]. Sets `is_infinite` [1] to 1 if an input is not
    finite.
    """
    for source, target in zip(*tensor_lists, strict=True):
        if not source.isfinite().all():
            is_infinite.fill_(1)
        target.copy_(source.float() * scale)


@kernel
def multi_tensor_scale_tensor(
    chunk_size: int, is_infinite: torch.Tensor, tensor_lists: Lists, scale: torch.Tensor
) -> None:
    """Run `multi_tensor_scale` with the scale in a tensor [1]."""
    multi_tensor_scale(chunk_size, is_infinite, tensor_lists, scale.item())


@kernel
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, per_tensor: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (the L2 norm of all tensors [1], that of each [n], or [0] without `per_tensor`) of tensor_lists [tensors],
    float32.
    """
    return _norms(tensor_lists[0], 1.0, bool(per_tensor))


@kernel
def multi_tensor_unscale_l2norm(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    inv_scale: torch.Tensor,
    per_tensor: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `multi_tensor_l2norm` of the tensors times `inv_scale` [1]."""
    return _norms(tensor_lists[0], inv_scale.item(), bool(per_tensor))


def _norms(tensors: Sequence[torch.Tensor], scale: float, each: bool) -> tuple[torch.Tensor, torch.Tensor]:
    squares = torch.stack([(tensor.float() * scale).square().sum() for tensor in tensors])
    return squares.sum().sqrt().reshape(1), squares.sqrt() if each else squares.new_zeros(0)


@kernel
def multi_tensor_adam(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Take one step of Adam in place. tensor_lists: [gradients, parameters, first moments, second moments], and
    optionally fp32 copies of the parameters, which are stepped instead and then rounded to the parameters.

    `mode` 1: AdamW, with decoupled decay; 0: decay added to the gradient. Source: Loshchilov and Hutter,
    arXiv:1711.05101, Algorithm 2, with the decay inside the step that `lr` scales.
    """
    adam = _Adam(lr, beta1, beta2, epsilon, step, mode, bias_correction, weight_decay)
    gradients, parameters, first, second, *masters = tensor_lists
    for index, (g, p, m, v) in enumerate(zip(gradients, parameters, first, second, strict=True)):
        whole = masters[0][index] if masters else p
        stepped = adam.step(g, whole.float(), m, v)
        whole.copy_(stepped)
        if masters:
            p.copy_(stepped)


@kernel
def multi_tensor_adam_fp8(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    fp8_dtype: int,
) -> None:
    """Run `multi_tensor_adam` on fp32 copies of FP8 parameters with one scale each: [gradients, parameters uint8, first
    moments, second moments, fp32 copies, scales [1], amaxes [1], inverse scales [1]]. Gradients are float32 or bf16;
    all else but the FP8 data is float32.

    A parameter becomes its copy times its scale, saturated to `fp8_dtype`. Its amax grows to the copy's largest
    absolute value, from which the recipe makes a later scale; the inverse scale is rewritten.
    """
    adam = _Adam(lr, beta1, beta2, epsilon, step, mode, bias_correction, weight_decay)
    dtype = torch_dtype(fp8_dtype)
    assert dtype is not None
    for g, p, m, v, whole, scale, amax, scale_inv in zip(*tensor_lists, strict=True):
        stepped = adam.step(g, whole.float(), m, v)
        whole.copy_(stepped)
        p.copy_(fp8.to_fp8(stepped * scale, dtype).view(torch.uint8))
        amax.copy_(torch.maximum(amax, fp8.amax_of(stepped).reshape(amax.shape)))
        scale_inv.copy_(scale.reciprocal().reshape(scale_inv.shape))


@kernel
def multi_tensor_adam_param_remainder(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Run `multi_tensor_adam` on fp32 numbers that are stored as bf16 parameters and int16 remainders: [gradients,
    parameters, first moments, second moments, remainders].

    The parameter is the fp32 number rounded to bf16, ties away from zero; the remainder is its lower 16 bits, a
    negative int16 if the number was rounded up.
    """
    adam = _Adam(lr, beta1, beta2, epsilon, step, mode, bias_correction, weight_decay)
    for g, p, m, v, remainder in zip(*tensor_lists, strict=True):
        split(adam.step(g, joined(p, remainder), m, v), p, remainder)


def joined(parameter: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """Return the float32 numbers that a bf16 parameter and its int16 remainder stand for, of their shape."""
    upper = parameter.view(torch.int16).int() - (remainder < 0).int()
    return ((upper << 16) | (remainder.int() & 0xFFFF)).view(torch.float32)


def split(values: torch.Tensor, parameter: torch.Tensor, remainder: torch.Tensor) -> None:
    """Write float32 `values` into a bf16 parameter and its int16 remainder, of the same shape."""
    bits = values.contiguous().view(torch.int32)
    lower = bits.to(torch.int16)  # keeps the lower 16 bits
    remainder.copy_(lower)
    parameter.copy_(((bits >> 16) + (lower < 0).int()).to(torch.int16).view(torch.bfloat16))


class _Adam:
    def __init__(
        self,
        lr: float,
        beta1: float,
        beta2: float,
        epsilon: float,
        step: int,
        mode: int,
        bias_correction: int,
        weight_decay: float,
    ) -> None:
        self.lr, self.beta1, self.beta2, self.epsilon = lr, beta1, beta2, epsilon
        self.decoupled, self.weight_decay = bool(mode), weight_decay
        self.first_correction = 1.0 - beta1**step if bias_correction else 1.0
        self.second_correction = 1.0 - beta2**step if bias_correction else 1.0

    def step(self, gradient: torch.Tensor, value: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return the stepped `value`, float32; updates the moments in place."""
        g = gradient.float()
        if not self.decoupled:
            g = g + self.weight_decay * value
        first = self.beta1 * m.float() + (1.0 - self.beta1) * g
        second = self.beta2 * v.float() + (1.0 - self.beta2) * g * g
        m.copy_(first)
        v.copy_(second)
        update = (first / self.first_correction) / ((second / self.second_correction).sqrt() + self.epsilon)
        if self.decoupled:
            update = update + self.weight_decay * value
        return value - self.lr * update

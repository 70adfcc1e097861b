"""What the kernels of flash-linear-attention return for fake CUDA tensors, and what they hold meanwhile and keep for
the backward pass, by their source. `fake_kernels.py` has those of Transformer Engine.
"""

from __future__ import annotations

from typing import Any

import torch

from gspo_mega.cpu.delta_rule import CHUNK, hand_to_megatron

# The backward pass of the rule computes the forward pass again, and two gradients for every product.
_RULE_BACKWARD = 3.0
_account: Any


def install(account: Any) -> None:
    """Hand these functions to Megatron-Core's layer, and report what they compute to `account`, an `Account` of
    `fake_kernels.py`.
    """
    global _account
    _account = account
    hand_to_megatron(causal_conv1d=causal_conv1d, l2norm=l2norm, chunk_gated_delta_rule=chunk_gated_delta_rule)


def _like(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.empty_like(tensor, dtype=dtype, memory_format=torch.contiguous_format)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        _account.flops("convolutions", 2.0 * x.numel() * weight.shape[-1])
        return _like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight = ctx.saved_tensors
        _account.flops("convolutions", 4.0 * x.numel() * weight.shape[-1])
        # A part of the weight's gradient for each chunk of tokens, in fp32.
        parts = torch.empty(-(-x.shape[1] // CHUNK), *weight.shape, dtype=torch.float32, device=x.device)
        del parts
        return _like(x), _like(weight)


def causal_conv1d(x: torch.Tensor, weight: torch.Tensor, **more: Any) -> tuple[torch.Tensor, None]:
    """x [1, t, channels], weight [channels, width]: returns the shape of x, and no state."""
    return _Convolution.apply(x, weight), None


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = _like(x)
        ctx.save_for_backward(out, torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _like(ctx.saved_tensors[0])


def l2norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """x of any shape: returns it."""
    return _Norm.apply(x)


class _Rule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, g: Any, beta: Any) -> torch.Tensor:
        summed, matrices = _like(g, torch.float32), _matrices(k, torch.float32)
        solved = _matrices(k, k.dtype)
        del matrices
        _account.flops("delta rule", _flops(k, v))
        held = (_like(k), _like(v), _states(k, v), _like(v))
        del held
        ctx.save_for_backward(q, k, v, summed, beta, solved)
        return _like(v)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        q, k, v, summed, beta, _ = ctx.saved_tensors
        _account.flops("delta rule", _RULE_BACKWARD * _flops(k, v))
        again = (_like(k), _like(v), _states(k, v), _like(v))
        of_states, of_written, of_keys = _states(k, v), _like(v), _like(k)
        found = (_like(q), _like(k), _like(v), _like(summed), _like(beta))
        del again, of_states, of_written, of_keys
        return found


def chunk_gated_delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, **more: Any
) -> tuple[torch.Tensor, None]:
    """q, k [1, t, heads, key size], v [1, t, heads, value size], g, beta [1, t, heads]: returns the shape of v, and no
    state. Raises NotImplementedError for states that are given or asked for.
    """
    if more.get("initial_state") is not None or more.get("output_final_state"):
        raise NotImplementedError("chunk_gated_delta_rule with states that are given or asked for")
    return _Rule.apply(q, k, v, g, beta), None


def _matrices(k: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A row of a chunk's matrix for every token and head."""
    return torch.empty(*k.shape[:-1], CHUNK, dtype=dtype, device=k.device)


def _states(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The state before every chunk."""
    batch, tokens, heads, size = k.shape
    return torch.empty(batch, -(-tokens // CHUNK), heads, size, v.shape[-1], dtype=k.dtype, device=k.device)


def _flops(k: torch.Tensor, v: torch.Tensor) -> float:
    """Of a forward pass (`models/tensors.py`: delta_rule_flops)."""
    key, value = k.shape[-1], v.shape[-1]
    return float(k.shape[1] * k.shape[2] * (6 * key * value + (3 * key + 2 * value) * (CHUNK + 1)))

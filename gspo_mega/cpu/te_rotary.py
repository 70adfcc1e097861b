"""Transformer Engine's fused rotary positions on a CPU, for packed sequences and context parallelism.

Angles, their sines and the rotation are fp32; the result is rounded once. (Megatron's unfused function rounds sines and
cosines to the activations' dtype first.)
"""

from __future__ import annotations

from typing import Any

import torch

from gspo_mega.algorithm.context_positions import local_positions
from gspo_mega.cpu.te_extension import extension, kernel


@kernel
def fused_rope_forward(
    input: torch.Tensor,
    freqs: torch.Tensor,
    start_positions: torch.Tensor | None,
    qkv_format: int,
    interleaved: bool,
    cu_seqlens: torch.Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> torch.Tensor:
    """`input` with the first `freqs.size(-1)` of its last dimension rotated by its position's angles.

    input [t, heads, d] packed, [s, b, heads, d] or [b, s, heads, d], as `qkv_format` says; freqs [positions, 1, 1, r]
    float32 radians; cu_seqlens [S + 1] int32, the bounds of whole sequences (of all context ranks). A context rank
    holds the two chunks of each sequence that `context_positions.local_positions` names. Returns a new tensor like
    `input`.
    """
    cosines, sines = _angles(input, freqs, start_positions, qkv_format, cu_seqlens, cp_size, cp_rank)
    size = freqs.size(-1)
    x = input[..., :size].float()
    return _with_rest(x * cosines + _turned(x, interleaved) * sines, input, size)


@kernel
def fused_rope_backward(
    output_grads: torch.Tensor,
    freqs: torch.Tensor,
    start_positions: torch.Tensor | None,
    qkv_format: int,
    interleaved: bool,
    cu_seqlens: torch.Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> torch.Tensor:
    """The gradient of `fused_rope_forward` by its input; arguments as there."""
    cosines, sines = _angles(output_grads, freqs, start_positions, qkv_format, cu_seqlens, cp_size, cp_rank)
    size = freqs.size(-1)
    g = output_grads[..., :size].float()
    return _with_rest(g * cosines - _turned(g * sines, interleaved), output_grads, size)


def _turned(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Each pair (a, b) as (-b, a). Its transpose is its negative."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _with_rest(rotated: torch.Tensor, like: torch.Tensor, size: int) -> torch.Tensor:
    out = torch.empty(like.shape, dtype=like.dtype)
    out[..., :size] = rotated
    out[..., size:] = like[..., size:]
    return out


def _angles(
    tensor: torch.Tensor,
    freqs: torch.Tensor,
    start_positions: torch.Tensor | None,
    qkv_format: int,
    cu_seqlens: torch.Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines that broadcast over `tensor`'s heads, float32."""
    formats: Any = extension.NVTE_QKV_Format
    table = freqs.reshape(freqs.size(0), -1).float()
    if int(qkv_format) == formats.NVTE_THD:
        if cu_seqlens is None:
            raise ValueError("packed sequences need cu_seqlens")
        lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
        starts = [0] * len(lengths) if start_positions is None else start_positions.tolist()
        positions = torch.cat([local_positions(n, cp_size, cp_rank) + s for n, s in zip(lengths, starts, strict=True)])
        angles = table[positions][:, None]
    elif int(qkv_format) in (formats.NVTE_SBHD, formats.NVTE_BSHD):
        along = 0 if int(qkv_format) == formats.NVTE_SBHD else 1
        positions = local_positions(tensor.size(along) * cp_size, cp_size, cp_rank)[:, None]
        if start_positions is not None:
            positions = positions + start_positions[None].to(positions)
        angles = table[positions][:, :, None]  # [s, 1 or b, 1, r]
        angles = angles if along == 0 else angles.transpose(0, 1)
    else:
        raise NotImplementedError(f"transformer_engine_torch.fused_rope has no CPU kernel for format {qkv_format}")
    return angles.cos(), angles.sin()

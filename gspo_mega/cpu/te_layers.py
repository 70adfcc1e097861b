"""Transformer Engine's layers on a CPU: SwiGLU, norms, products, rotary positions, core attention.

- SwiGLU: fp32 inside, and the result is rounded once. Megatron's own layers apply the activation themselves; these
  kernels are for layers that leave it to Transformer Engine (`te.ops.SwiGLU`, `te.LayerNormMLP`). Per-tensor delayed
  scaling and MX scaling quantise the fp32 value, as the fused kernels do. The other recipes first round it to the
  input's dtype and quantise that.
- RMSNorm and LayerNorm: statistics and gradients in fp32, and each result is rounded once. If the result is to be
  quantised, the norm first rounds to its output's dtype and quantises that. Only per-tensor delayed scaling quantises
  the fp32 value, as Transformer Engine's fused kernel does.
- Products of linear layers, plain and grouped, with their epilogues (bias, bias gradient, accumulation): exact products
  of the stored numbers, and sums in fp32 (fp64 in a sharp certificate). `te_quantized.py` reads a quantised operand as
  the numbers that it represents. Transformer Engine decides which tensors are quantised.
- Fused rotary positions, for packed sequences and context parallelism: angles, their sines and the rotation are fp32,
  and the result is rounded once. (Megatron's unfused function first rounds sines and cosines to the activations'
  dtype.)
- Core attention: cuDNN's kernels have no Python, so Transformer Engine's module gets this package's packed attention as
  its kernel. Both take the same packed sequences and context-parallel layout, with fp32 softmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gspo_mega.algorithm.terms import local_positions
from gspo_mega.cpu.te_extension import extension, kernel, torch_dtype
from gspo_mega.cpu.te_fp8 import quantize_as
from gspo_mega.cpu.te_quantized import dequantized

_FUSED = ("Float8Quantizer", "MXFP8Quantizer")
_sum_dtype = torch.float32


def sum_in(dtype: torch.dtype) -> None:
    """Choose the dtype in which products and core attention sum from now on."""
    global _sum_dtype
    _sum_dtype = dtype


def _activation_result(value: torch.Tensor, dtype: torch.dtype, quantizer: Any) -> Any:
    """Return `value` float32 as a tensor of `dtype`, or quantised."""
    if quantizer is None:
        return value.to(dtype)
    return quantize_as(value if type(quantizer).__name__ in _FUSED else value.to(dtype), dtype, quantizer)


@kernel
def swiglu(input: torch.Tensor, quantizer: Any) -> Any:
    """Return silu(a) * b, where a and b are the halves of `input` [..., 2 F]: [..., F] of its dtype, or quantised.

    Source: Shazeer, arXiv:2002.05202, equation 6, with the gate in the first half.
    """
    gate, linear = input.detach().float().chunk(2, dim=-1)
    return _activation_result(torch.nn.functional.silu(gate) * linear, input.dtype, quantizer)


@kernel
def dswiglu(grad: torch.Tensor, fwd_input: torch.Tensor, quantizer: Any) -> Any:
    """Return the gradient of `swiglu` with respect to `fwd_input` [..., 2 F], from that of its result [..., F]; or
    quantised.
    """
    gate, linear = fwd_input.detach().float().chunk(2, dim=-1)
    outer, sigmoid = grad.detach().float(), torch.sigmoid(gate)
    by_gate = outer * linear * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    return _activation_result(torch.cat([by_gate, outer * gate * sigmoid], dim=-1), fwd_input.dtype, quantizer)


def _gain(weight: torch.Tensor, zero_centered: bool) -> torch.Tensor:
    return weight.float() + 1.0 if zero_centered else weight.float()


def _result(value: torch.Tensor, out: Any, quantizer: Any, dtype: int) -> Any:
    """Return `value` float32 in `out`, or in a new tensor, of the output's dtype or quantised."""
    rounded = value.to(torch_dtype(dtype))
    if quantizer is None:
        return rounded if out is None else out.copy_(rounded)
    fused = type(quantizer).__name__ == "Float8Quantizer"
    return quantize_as(value if fused else rounded, rounded.dtype, quantizer, out)


@kernel
def rmsnorm_fwd(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    ln_out: Any,
    quantizer: Any,
    otype: int,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Any, None, torch.Tensor]:
    """Compute x / sqrt(mean(x^2) + eps) * weight over the last dimension. input [..., H], weight [H]; returns (result
    [..., H], None, 1 / root [rows] float32).
    """
    x = input.float()
    inverse = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    value = x * inverse * _gain(weight, zero_centered_gamma)
    return _result(value, ln_out, quantizer, otype), None, inverse.flatten()


@kernel
def rmsnorm_bwd(
    dz: torch.Tensor,
    x: torch.Tensor,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of `rmsnorm_fwd` with respect to x and gamma, in their dtypes; dz [..., H] is the result's
    gradient.
    """
    return _rmsnorm_gradients(dz, x, None, rsigma, gamma, zero_centered_gamma)


@kernel
def rmsnorm_bwd_add(
    dz: torch.Tensor,
    x: torch.Tensor,
    add: torch.Tensor,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `rmsnorm_bwd` with `add` [..., H] added to the gradient of x before it is rounded."""
    return _rmsnorm_gradients(dz, x, add, rsigma, gamma, zero_centered_gamma)


def _rmsnorm_gradients(
    dz: torch.Tensor,
    x: torch.Tensor,
    add: torch.Tensor | None,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    zero_centered: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    inverse = rsigma.reshape(*x.shape[:-1], 1)
    outer, normed = dz.reshape(x.shape).float(), x.float() * inverse
    inner = outer * _gain(gamma, zero_centered)
    by_x = inverse * (inner - normed * (inner * normed).mean(dim=-1, keepdim=True))
    if add is not None:
        by_x += add.reshape(x.shape).float()
    by_gamma = (outer * normed).reshape(-1, x.size(-1)).sum(dim=0)
    return by_x.to(x.dtype), by_gamma.to(gamma.dtype)


@kernel
def layernorm_fwd(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    ln_out: Any,
    quantizer: Any,
    otype: int,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Compute (x - mean) / sqrt(variance + eps) * weight + bias over the last dimension, with the population variance.

    input [..., H], weight and bias [H]; returns (result [..., H], mean [rows] float32, 1 / root [rows] float32).
    """
    x = input.float()
    mean = x.mean(dim=-1, keepdim=True)
    centred = x - mean
    inverse = torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + eps)
    value = centred * inverse * _gain(weight, zero_centered_gamma)
    if bias is not None:
        value += bias.float()
    return _result(value, ln_out, quantizer, otype), mean.flatten(), inverse.flatten()


@kernel
def layernorm_bwd(
    dz: torch.Tensor,
    x: torch.Tensor,
    mu: torch.Tensor,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of `layernorm_fwd` with respect to x, gamma and the bias, in x's and gamma's dtypes; dz
    [..., H].
    """
    rows = (*x.shape[:-1], 1)
    inverse = rsigma.reshape(rows)
    outer, normed = dz.reshape(x.shape).float(), (x.float() - mu.reshape(rows)) * inverse
    inner = outer * _gain(gamma, zero_centered_gamma)
    mean = inner.mean(dim=-1, keepdim=True)
    by_x = inverse * (inner - mean - normed * (inner * normed).mean(dim=-1, keepdim=True))
    flat = (-1, x.size(-1))
    by_gamma, by_bias = (outer * normed).reshape(flat).sum(dim=0), outer.reshape(flat).sum(dim=0)
    return by_x.to(x.dtype), by_gamma.to(gamma.dtype), by_bias.to(gamma.dtype)


def operand(tensor: Any, columnwise: bool) -> torch.Tensor:
    """Return the numbers that `tensor` stands for, [rows, columns] float32; leading dimensions count as rows.

    `columnwise`: read the copy that was quantised along the columns, where there are two. The two differ if each row
    (or column) of a block has its own scale.
    """
    values = dequantized(tensor, columnwise)
    return values.reshape(-1, values.size(-1))


def _product(a: object, transposed_a: bool, b: object, transposed_b: bool) -> torch.Tensor:
    """Return op(b) @ op(a), row-major, as [rows, columns] float32."""
    # Read the copy that is quantised along the dimension that the product sums over; Transformer Engine provides it.
    left, right = operand(b, columnwise=transposed_b).to(_sum_dtype), operand(a, columnwise=not transposed_a)
    right = right.to(_sum_dtype)
    return ((left.t() if transposed_b else left) @ (right.t() if transposed_a else right)).float()


@kernel
def generic_gemm(
    A: Any,
    transA: bool,
    B: Any,
    transB: bool,
    D: torch.Tensor | None,
    quantizer: Any,
    output_dtype: int | None,
    bias: torch.Tensor | None,
    bias_type: int,
    gelu: bool,
    gelu_in: torch.Tensor | None,
    grad: bool,
    workspace: torch.Tensor,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: object = None,
    comm_type: object = None,
    extra_output: object = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> tuple[Any, torch.Tensor | None, None, None]:
    """Compute alpha * op(B) @ op(A) [+ bias] [+ beta * D]: [..., columns of op(A)], where op transposes its matrix or
    not.

    A and B are matrices of any float dtype, or quantised; leading dimensions of B count as rows. Returns (result, bias
    gradient, None, None). The result is D if there is one, else a new tensor of `output_dtype` (A's without it),
    quantised if there is a quantizer. With `grad`, a bias requests its gradient, the sum of B's rows, in the result's
    dtype. All sums are fp32 (products as `sum_in` says) and rounded once. Raises NotImplementedError for GELU and for
    overlapped communication.
    """
    if gelu or comm_overlap is not None or extra_output is not None:
        raise NotImplementedError("transformer_engine_torch.generic_gemm: GELU and comm_overlap have no CPU kernel")
    out = _product(A, transA, B, transB)
    if alpha != 1.0:
        out *= alpha
    dtype = torch_dtype(output_dtype) or (D.dtype if D is not None else A.dtype)
    bias_gradient = None
    if bias is not None and grad:
        bias_gradient = operand(B, columnwise=transB).sum(dim=0).to(dtype)
    elif bias is not None:
        out += bias.float()
    if not transB:
        out = out.reshape(*B.shape[:-1], out.size(-1))
    if D is None:
        result = out.to(dtype)
        return result if quantizer is None else quantizer(result), bias_gradient, None, None
    if quantizer is not None:
        raise NotImplementedError("transformer_engine_torch.generic_gemm: no CPU kernel quantises into a given output")
    _store(D, out.reshape(D.shape), (1.0 if beta is None else beta) if accumulate else 0.0)
    return D, bias_gradient, None, None


@kernel
def te_general_grouped_gemm(
    A: Sequence[Any],
    transA: bool,
    B: Sequence[Any],
    transB: bool,
    D: Sequence[torch.Tensor] | None,
    D_type: int,
    m_splits: Sequence[int],
    bias: Sequence[torch.Tensor],
    bias_type: int,
    single_output: bool,
    pre_gelu_out: Sequence[torch.Tensor],
    grad: bool,
    workspace: Sequence[torch.Tensor],
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    math_sm_count: int,
) -> Sequence[torch.Tensor]:
    """Compute `generic_gemm` of each pair (A[i], B[i]) into D[i], or into the i-th rows of D[0] with `single_output`.

    An empty bias counts as none. With `grad` the biases are filled with their gradients. Returns `bias`. An expert
    without a token leaves zeros, or, with `accumulate`, what D held.
    """
    if D is None or any(tensor.numel() for tensor in pre_gelu_out):
        raise NotImplementedError("transformer_engine_torch.te_general_grouped_gemm: no CPU kernel for this output")
    start = 0
    for index, (a, b) in enumerate(zip(A, B, strict=True)):
        out = _product(a, transA, b, transB)
        has_bias = index < len(bias) and bias[index].numel() > 0
        if has_bias and grad:
            bias[index].copy_(operand(b, columnwise=transB).sum(dim=0))
        elif has_bias:
            out += bias[index].float()
        target = D[0].reshape(-1, D[0].size(-1))[start : start + out.size(0)] if single_output else D[index]
        start += out.size(0)
        _store(target, out.reshape(target.shape), 1.0 if accumulate else 0.0)
    return bias


def _store(target: torch.Tensor, value: torch.Tensor, beta: float) -> None:
    """Set target = value + beta * target, added in fp32 and rounded once."""
    if beta == 0.0:
        target.copy_(value)
    elif target.dtype == torch.float32 and beta == 1.0:
        target += value
    else:
        target.copy_(value + beta * target.float())


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
    """Return `input` with the first `freqs.size(-1)` elements of its last dimension rotated by its position's angles.

    input [t, heads, d] packed, [s, b, heads, d] or [b, s, heads, d], as `qkv_format` says; freqs [positions, 1, 1, r]
    float32 radians; cu_seqlens [S + 1] int32, the bounds of whole sequences (of all context ranks). A context rank
    holds the two chunks of each sequence that `algorithm.terms.local_positions` names. Returns a new tensor like
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
    """Return the gradient of `fused_rope_forward` with respect to its input; arguments as there."""
    cosines, sines = _angles(output_grads, freqs, start_positions, qkv_format, cu_seqlens, cp_size, cp_rank)
    size = freqs.size(-1)
    g = output_grads[..., :size].float()
    return _with_rest(g * cosines - _turned(g * sines, interleaved), output_grads, size)


def _turned(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Map each pair (a, b) to (-b, a). The transpose of this map is its negative."""
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
    """Return cosines and sines that broadcast over `tensor`'s heads, float32."""
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


def replace_kernel() -> None:
    """Let Megatron's `TEDotProductAttention` compute with `packed_sdpa.attend`. Imports Megatron."""
    import megatron.core.extensions.transformer_engine as extensions

    attention: Any = extensions.TEDotProductAttention
    attention.forward = _forward


def _forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    attn_mask_type: object,
    attention_bias: torch.Tensor | None = None,
    packed_seq_params: Any = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Compute core attention. Arguments, result and collectives are those of `packed_sdpa.attend`.

    Raises ValueError without packed sequences, with a mask or bias from the caller, and for attention that is not
    causal or has sinks or windows.
    """
    from gspo_mega.cpu.packed_sdpa import attend

    is_causal = "causal" in str(getattr(attn_mask_type, "name", attn_mask_type))
    if packed_seq_params is None or attention_mask is not None or attention_bias is not None or not is_causal:
        raise ValueError("on a CPU Transformer Engine's attention takes packed causal sequences only")
    if module.softmax_type != "vanilla" or module.window_size not in (None, (-1, -1), (-1, 0)):
        raise ValueError("on a CPU Transformer Engine's attention has neither sinks nor windows")
    dtype = query.dtype
    if _sum_dtype == torch.float64:
        query, key, value = query.double(), key.double(), value.double()
    return attend(query, key, value, packed_seq_params, module.cp_group, module.softmax_scale).to(dtype)

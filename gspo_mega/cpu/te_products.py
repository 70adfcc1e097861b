"""The products of Transformer Engine's linear layers on a CPU: exact products of the stored numbers, sums in fp32.

Owns plain and grouped products with their epilogues (bias, bias gradient, accumulation). An operand may be quantised:
`te_quantized.py` reads it as the numbers that it stands for. Who quantises what is Transformer Engine's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gspo_mega.cpu.te_extension import kernel, torch_dtype
from gspo_mega.cpu.te_quantized import dequantized


def operand(tensor: Any, columnwise: bool) -> torch.Tensor:
    """The numbers that `tensor` stands for, [rows, columns] float32; leading dimensions count as rows.

    `columnwise`: read the copy that was quantised along the columns, where there are two. The two differ if each row
    (or column) of a block has its own scale.
    """
    values = dequantized(tensor, columnwise)
    return values.reshape(-1, values.size(-1))


def _product(a: object, transposed_a: bool, b: object, transposed_b: bool) -> torch.Tensor:
    """op(b) @ op(a), row-major, as [rows, columns] float32."""
    # A transposed operand is stored by rows of what the product reads; Transformer Engine hands over that copy.
    left, right = operand(b, columnwise=transposed_b), operand(a, columnwise=not transposed_a)
    return (left.t() if transposed_b else left) @ (right.t() if transposed_a else right)


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
    """alpha * op(B) @ op(A) [+ bias] [+ beta * D]: [..., columns of op(A)], where op transposes its matrix or not.

    A and B are matrices of any float dtype, or quantised; leading dimensions of B count as rows. Returns (result, bias
    gradient, None, None). The result is D where there is one, else a new tensor of `output_dtype` (A's without it),
    quantised if there is a quantizer. With `grad` a bias asks for its gradient, the sum of B's rows, in the result's
    dtype. All sums are fp32 and rounded once. Raises NotImplementedError for GELU and for overlapped communication.
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
    """`generic_gemm` of each pair (A[i], B[i]) into D[i], or into the i-th rows of D[0] with `single_output`.

    An empty bias is none. With `grad` the biases are filled with their gradients. Returns `bias`. An expert without a
    token leaves zeros, or what D held if it accumulates.
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
    """target = value + beta * target, added in fp32 and rounded once."""
    if beta == 0.0:
        target.copy_(value)
    elif target.dtype == torch.float32 and beta == 1.0:
        target += value
    else:
        target.copy_(value + beta * target.float())

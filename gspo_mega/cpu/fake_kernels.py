"""What a GPU's kernels return for fake CUDA tensors: shapes and dtypes, no numbers. `fake_device.py` has the device.

`provide` puts functions that only allocate in place of Transformer Engine's compiled extension, and of its Triton
kernels. `complete_megatron` answers the few questions of Megatron-Core whose answers are data: how many tokens an
expert gets, and which shapes pipeline stages send each other. A kernel that is not here raises NotImplementedError with
its name. What a compiled function (`torch.compile`) allocates inside is not counted: its kernel keeps it in registers.
FlexAttention has torch's own shapes, and here its FLOPs.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import math
import sys
import types
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import _disable_current_modes

from gspo_mega.base.errors import ModelError
from gspo_mega.cpu import fake_delta, te_extension, te_loading, te_rows
from gspo_mega.cpu.te_extension import extension, torch_dtype
from gspo_mega.cpu.te_quantized import build, empty_buffers

# The backward pass of attention has five products of the size of the forward pass's two.
_ATTENTION_BACKWARD = 2.5
# FlexAttention's backward pass has the scores and their gradients once for queries and once for keys: seven products.
_FLEX_BACKWARD = 3.5
FLEX_ATTENTION = "FlexAttention"
"""The kind of product that an account gets of it."""
_CUDNN_ATTENTION = 1  # NVTE_F16_arbitrary_seqlen


class Account(Protocol):
    """What learns of kernels. Allocations `inside_kernel` do not count; what is `made` does, and `flops` of a kind of
    product, and a `wait` of the host for the device.
    """

    def flops(self, kind: str, number: float) -> None: ...

    def inside_kernel(self) -> AbstractContextManager[None]: ...

    def made(self, result: Any) -> None: ...

    def wait(self, what: str) -> None: ...

    def known(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The numbers of a small tensor that came from the host; None if only its shape is known."""
        ...


@dataclass(frozen=True)
class Expected:
    """What the data of a pack would decide. `stage_shape`: of the hidden states that stages send each other. `copies`:
    rows that one rank's tokens make together for all experts; `received`: rows that this rank's experts get. `lengths`:
    tokens of the pack's sequences.
    """

    stage_shape: tuple[int, int, int]
    copies: int = 0
    received: int = 0
    lengths: tuple[int, ...] = ()


_account: Account
_expected: Expected


def provide(account: Account, transformer_engine: Path) -> None:
    """Make Transformer Engine's Python importable, over these kernels. Call it once, after `fake_device.pretend` and
    before the first import of Megatron-Core. `transformer_engine`: the folder of its wheel. Raises ModelError without
    it.
    """
    compile_to_kernels(account)
    if not (transformer_engine / "transformer_engine" / "pytorch").is_dir():
        raise ModelError(f"trace: Transformer Engine's Python is not in {transformer_engine}")
    te_extension.provide()
    for kernels in te_loading._KERNELS:
        importlib.import_module(f"gspo_mega.cpu.{kernels}")  # the names; below, shapes take their place
    te_loading._stand_in_for_onnx()
    for function in _KERNELS:
        setattr(extension, function.__name__, function)
    for name in _WRITE_IN_PLACE:
        setattr(extension, name, _writes_in_place(name))
    sys.path.append(str(transformer_engine))
    te_loading._import_without_library(transformer_engine)
    te_rows.replace_kernels(_TRITON)
    distributed: Any = sys.modules["transformer_engine.pytorch.distributed"]
    distributed._get_cuda_rng_state = distributed._set_cuda_rng_state = lambda *args, **kwargs: None
    _choose_attention_for_plain_tensors()


def compile_to_kernels(account: Account) -> None:
    """Let `torch.compile` make one kernel of a function, and report all kernels to `account`."""
    global _account
    _account = account
    compiler: Any = torch
    compiler.compile = _compiled


def expect(expected: Expected) -> None:
    """Say what the data of the packs that follow decides."""
    global _expected
    _expected = expected


def versions() -> dict[str, str]:
    """Return the versions of what is traced, by package."""
    return {
        "torch": torch.__version__,
        "megatron-core": importlib.metadata.version("megatron-core"),
        "transformer-engine": str(importlib.import_module("transformer_engine").__version__),
    }


def complete_megatron() -> None:
    """Answer what Megatron-Core reads from the device. Call it once, after it is imported."""
    fake_delta.install(_account)
    dispatcher: Any = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    dispatcher.MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = _move_counts
    p2p: Any = importlib.import_module("megatron.core.pipeline_parallel.p2p_communication")
    p2p.P2PCommunicator._communicate_shapes = _stage_shapes
    states: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    states.CudaRNGStatesTracker.fork = lambda self, *args, **kwargs: contextlib.nullcontext()
    states._get_cuda_rng_state = states._set_cuda_rng_state = lambda *args, **kwargs: None
    # What other ranks write is not known, so a save has no index of it, and nobody checks that all of it is there.
    writes: Any = importlib.import_module("megatron.core.dist_checkpointing.state_dict_utils")
    writes.validate_sharding_integrity = lambda *args, **kwargs: None
    strategy: Any = importlib.import_module("megatron.core.dist_checkpointing.strategies.torch")
    strategy.MCoreSavePlanner.create_global_plan = lambda self, plans: (plans, types.SimpleNamespace())
    layers: Any = importlib.import_module("megatron.core.extensions.transformer_engine")
    grouped = layers.TEGroupedLinear.forward

    def with_splits_on_host(self: Any, x: torch.Tensor, m_splits: Any) -> Any:
        with _disable_current_modes():
            m_splits = torch.tensor([int(split) for split in m_splits], dtype=torch.int64)
        return grouped(self, x, m_splits)

    layers.TEGroupedLinear.forward = with_splits_on_host


def _compiled(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Stand in for `torch.compile`: one kernel, of which only the results take memory."""
    if function is None:
        return functools.partial(_compiled, **options)

    @functools.wraps(function)
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _account.inside_kernel():
            result = function(*args, **kwargs)
        _account.made(result)
        return result

    return kernel


def _choose_attention_for_plain_tensors() -> None:
    """Transformer Engine chooses an attention kernel by the class of queries; a fake tensor counts as a plain one."""
    utils: Any = sys.modules["transformer_engine.pytorch.attention.dot_product_attention.utils"]
    plain = utils.get_attention_backend

    def chosen(parameters: Any) -> Any:
        parameters.qkv_type = torch.Tensor
        return plain(parameters)

    utils.get_attention_backend = chosen


# --- Numbers that data decides -------------------------------------------------------------------------------


def _move_counts(self: Any, point: str, tokens_per_expert: torch.Tensor | None = None) -> Any:
    """Megatron's copy of the dispatcher's counts to the host: every expert gets as many tokens as any other."""
    if self.drop_and_pad or point != self.cuda_dtoh_point:
        return tokens_per_expert
    _account.wait("the dispatcher's counts of tokens by expert")

    def split(total: int, like: torch.Tensor) -> list[int]:
        parts = like.numel()
        return [total // parts + (index < total % parts) for index in range(parts)]

    moved = {
        "input_splits": _expected.copies,
        "output_splits": _expected.received,
        "output_splits_tp": _expected.received * self.tp_size,
    }
    for name, total in moved.items():
        held = getattr(self, name, None)
        if isinstance(held, torch.Tensor):
            setattr(self, name, split(total, held))
    if isinstance(self.num_out_tokens, torch.Tensor):
        self.num_out_tokens = _expected.copies
    received = _expected.received * self.tp_size
    held = getattr(self, "num_global_tokens_per_local_expert", None)
    if isinstance(held, torch.Tensor) and self.num_local_experts > 1 and not self.config.moe_permute_fusion:
        with _disable_current_modes():
            self.num_global_tokens_per_local_expert = torch.tensor(split(received, held)).view(held.shape)
    if tokens_per_expert is None:
        return None
    with _disable_current_modes():
        return torch.tensor(split(received, tokens_per_expert))


def _stage_shapes(
    self: Any, send_next: torch.Tensor | None, send_prev: torch.Tensor | None, recv_prev: bool, recv_next: bool
) -> tuple[list[int], list[int]]:
    """The shapes that stages tell each other before each exchange; reading them waits for the device."""
    if recv_prev or recv_next:
        _account.wait("the shapes of what pipeline stages exchange")
    shape, nothing = list(_expected.stage_shape), [0, 0, 0]
    return (shape if recv_prev else nothing), (shape if recv_next else nothing)


# --- Transformer Engine's extension ----------------------------------------------------------------------------


def _shape(tensor: Any) -> tuple[int, ...]:
    if isinstance(tensor, torch.Tensor):
        return tuple(tensor.shape)
    for name in ("_rowwise_data", "_data"):
        if getattr(tensor, name, None) is not None:
            return tuple(getattr(tensor, name).shape)
    transposed = getattr(tensor, "_columnwise_data", None)
    if transposed is None:
        transposed = tensor._transpose
    return (*transposed.shape[1:], transposed.shape[0])


def _matrix(tensor: Any) -> tuple[int, int]:
    shape = _shape(tensor)
    return math.prod(shape[:-1]), shape[-1]


def _empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def _quantised(quantizer: Any, shape: Sequence[int], dtype: torch.dtype) -> Any:
    with torch.device("cuda"):
        return build(quantizer, list(shape), dtype, empty_buffers(quantizer, list(shape)))


def _product(A: Any, transA: bool, B: Any, transB: bool) -> tuple[int, int, int]:
    """Rows, columns and summed length of op(B) @ op(A)."""
    a, b = _matrix(A), _matrix(B)
    rows, summed = (b[1], b[0]) if transB else b
    return rows, a[0] if transA else a[1], summed


def _precision(*operands: Any) -> str:
    return "FP8" if any(not isinstance(one, torch.Tensor) or hasattr(one, "_quantizer") for one in operands) else "bf16"


def generic_gemm(
    A: Any,
    transA: bool,
    B: Any,
    transB: bool,
    D: Any,
    quantizer: Any,
    output_dtype: Any,
    bias: Any,
    bias_type: Any,
    gelu: bool,
    gelu_in: Any,
    grad: bool,
    *more: Any,
    **options: Any,
) -> tuple[Any, Any, None, None]:
    rows, columns, summed = _product(A, transA, B, transB)
    _account.flops(f"products, {_precision(A, B)}", 2.0 * rows * columns * summed)
    bias_gradient = _empty(rows, dtype=torch.bfloat16) if bias is not None and grad else None
    if D is not None:
        return D, bias_gradient, None, None
    shape = (rows, columns) if transB else (*_shape(B)[:-1], columns)
    dtype = torch_dtype(output_dtype) or torch.bfloat16
    if quantizer is not None:
        return _quantised(quantizer, shape, dtype), bias_gradient, None, None
    return _empty(*shape, dtype=dtype), bias_gradient, None, None


def te_general_grouped_gemm(
    A: Sequence[Any],
    transA: bool,
    B: Sequence[Any],
    transB: bool,
    D: Any,
    D_type: Any,
    splits: Any,
    bias: Any,
    *more: Any,
) -> Any:
    for a, b in zip(A, B, strict=True):
        rows, columns, summed = _product(a, transA, b, transB)
        _account.flops(f"experts' products, {_precision(a, b)}", 2.0 * rows * columns * summed)
    return bias


def quantize(tensor: torch.Tensor, quantizer: Any, output: Any = None, noop: Any = None) -> Any:
    return _quantised(quantizer, tensor.shape, tensor.dtype) if output is None else output


def dequantize(input: Any, otype: int) -> torch.Tensor:
    return _empty(*_shape(input), dtype=torch_dtype(otype) or torch.bfloat16)


def create_empty_quantized_tensor(
    quantizer: Any, shape: Sequence[int], dtype: torch.dtype, device: Any, pin_memory: bool
) -> Any:
    return _quantised(quantizer, shape, dtype)


def split_quantize(
    tensor: torch.Tensor, sections: Sequence[int], quantizers: Sequence[Any], disable_bulk_allocation: bool = False
) -> list[Any]:
    columns = tuple(tensor.shape[1:])
    return [
        _quantised(one, (int(rows), *columns), tensor.dtype) for rows, one in zip(sections, quantizers, strict=True)
    ]


def multi_tensor_quantize(tensors: Sequence[torch.Tensor], quantizers: Sequence[Any]) -> list[Any]:
    return [_quantised(one, tensor.shape, tensor.dtype) for tensor, one in zip(tensors, quantizers, strict=True)]


def bgrad_quantize(input: torch.Tensor, quantizer: Any) -> tuple[torch.Tensor, Any]:
    bias = _empty(input.shape[-1], dtype=input.dtype)
    return bias, input if quantizer is None else _quantised(quantizer, input.shape, input.dtype)


def fp8_transpose(input: torch.Tensor, dtype: int, *, out: torch.Tensor | None = None) -> torch.Tensor:
    return _empty(input.shape[-1], *input.shape[:-1], dtype=input.dtype) if out is None else out


def swap_first_dims(tensor: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    return _empty(tensor.shape[1], tensor.shape[0], *tensor.shape[2:], dtype=tensor.dtype) if out is None else out


def _normed(input: torch.Tensor, out: Any, quantizer: Any, otype: int) -> Any:
    if out is not None:
        return out
    dtype = torch_dtype(otype) or input.dtype
    return _empty(*input.shape, dtype=dtype) if quantizer is None else _quantised(quantizer, input.shape, dtype)


def rmsnorm_fwd(input: Any, weight: Any, eps: float, ln_out: Any, quantizer: Any, otype: int, *more: Any) -> Any:
    return _normed(input, ln_out, quantizer, otype), None, _empty(_matrix(input)[0], dtype=torch.float32)


def layernorm_fwd(
    input: Any, weight: Any, bias: Any, eps: float, ln_out: Any, quantizer: Any, otype: int, *more: Any
) -> Any:
    statistics = [_empty(_matrix(input)[0], dtype=torch.float32) for _ in range(2)]
    return _normed(input, ln_out, quantizer, otype), *statistics


def rmsnorm_bwd(dz: Any, x: torch.Tensor, rsigma: Any, gamma: torch.Tensor, *more: Any) -> Any:
    return torch.empty_like(x), torch.empty_like(gamma)


def rmsnorm_bwd_add(dz: Any, x: torch.Tensor, add: Any, rsigma: Any, gamma: torch.Tensor, *more: Any) -> Any:
    return torch.empty_like(x), torch.empty_like(gamma)


def layernorm_bwd(dz: Any, x: torch.Tensor, mu: Any, rsigma: Any, gamma: torch.Tensor, *more: Any) -> Any:
    return torch.empty_like(x), torch.empty_like(gamma), torch.empty_like(gamma)


def fused_rope_forward(input: torch.Tensor, *more: Any) -> torch.Tensor:
    return torch.empty_like(input, memory_format=torch.contiguous_format)


def fused_rope_backward(input: torch.Tensor, *more: Any) -> torch.Tensor:
    return torch.empty_like(input, memory_format=torch.contiguous_format)


def swiglu(input: torch.Tensor, quantizer: Any) -> Any:
    shape = (*input.shape[:-1], input.shape[-1] // 2)
    return _empty(*shape, dtype=input.dtype) if quantizer is None else _quantised(quantizer, shape, input.dtype)


def dswiglu(grad: torch.Tensor, fwd_input: torch.Tensor, quantizer: Any) -> Any:
    if quantizer is None:
        return torch.empty_like(fwd_input)
    return _quantised(quantizer, fwd_input.shape, fwd_input.dtype)


def get_fused_attn_backend(*args: Any, **kwargs: Any) -> tuple[int, str]:
    return _CUDNN_ATTENTION, ""


def _attention_flops(
    lengths_q: Any, lengths_kv: Any, mask: Any, window: Any, q: torch.Tensor, v: torch.Tensor
) -> float:
    """FLOPs of a forward pass over packed sequences: two products of every query with the keys that it sees."""
    of_queries, of_keys = _account.known(lengths_q), _account.known(lengths_kv)
    queries = keys = [float(length) for length in _expected.lengths]
    if of_queries is not None and of_keys is not None:
        queries, keys = of_queries.diff().double().tolist(), of_keys.diff().double().tolist()
    heads, width = q.shape[-2], q.shape[-1] + v.shape[-1]
    is_causal = "CAUSAL" in str(getattr(mask, "name", mask))
    left = window[0] if window is not None and window[0] >= 0 else math.inf
    pairs = 0.0
    for query, key in zip(queries, keys, strict=True):
        seen = query * key / 2 if is_causal and query == key else query * key
        pairs += min(seen, query * (left + 1))
    return 2.0 * pairs * heads * width


def fused_attn_fwd(*args: Any) -> list[torch.Tensor]:
    mask, window, lengths_q, lengths_kv, q, v = args[10], args[12], args[14], args[15], args[16], args[18]
    _account.flops("attention", _attention_flops(lengths_q, lengths_kv, mask, window, q, v))
    tokens, heads = q.shape[0], q.shape[1]
    out = _empty(tokens, heads, v.shape[-1], dtype=q.dtype)
    return [out, _empty(tokens, heads, 1, dtype=torch.float32), _empty(2, dtype=torch.int64)]


def fused_attn_bwd(*args: Any) -> list[Any]:
    mask, window, lengths_q, lengths_kv, q, k, v = args[12], args[14], *args[17:22]
    flops = _attention_flops(lengths_q, lengths_kv, mask, window, q, v)
    _account.flops("attention", _ATTENTION_BACKWARD * flops)
    # cuDNN adds the gradient of queries in fp32, in a workspace that it frees.
    workspace = _empty(*q.shape, dtype=torch.float32)
    gradients = [torch.empty_like(one, memory_format=torch.contiguous_format) for one in (q, k, v)]
    del workspace
    return [*gradients, None, None]


def flex_attention_flops(operator: str, args: Sequence[Any]) -> float:
    """FLOPs of torch's operator `flex_attention` or `flex_attention_backward` with these arguments: two products, or
    seven, over all blocks that have anything to compute. Raises NotImplementedError for another operator.
    """
    if operator not in ("flex_attention", "flex_attention_backward"):
        raise NotImplementedError(operator)
    is_forward = operator == "flex_attention"
    query, _, value, mask = *args[:3], args[4 if is_forward else 9]
    counts = [_account.known(mask[place]) for place in (2, 4)]  # of blocks with and without a mask
    if any(count is None for count in counts):
        raise NotImplementedError(f"{operator} over blocks whose numbers only the device knows")
    with _disable_current_modes():
        pairs = sum(int(count.sum()) for count in counts if count is not None) * mask[-3] * mask[-2]
    return 2.0 * pairs * query.size(1) * (query.size(-1) + value.size(-1)) * (1 if is_forward else _FLEX_BACKWARD)


def thd_read_half_tensor(tensor: torch.Tensor, cu_seqlens: Any, half: int) -> torch.Tensor:
    return _empty(tensor.shape[0] // 2, *tensor.shape[1:], dtype=tensor.dtype)


def thd_read_second_half_lse(lse: torch.Tensor, cu_seqlens: Any, packed: bool, half_tokens: int) -> torch.Tensor:
    shape = (lse.shape[0], half_tokens) if packed else (*lse.shape[:-1], lse.shape[-1] // 2)
    return _empty(*shape, dtype=lse.dtype)


def thd_get_partitioned_indices(cu_seqlens: Any, total_tokens: int, size: int, rank: int) -> torch.Tensor:
    return _empty(total_tokens // size)


_KERNELS = (
    generic_gemm,
    te_general_grouped_gemm,
    quantize,
    dequantize,
    create_empty_quantized_tensor,
    split_quantize,
    multi_tensor_quantize,
    bgrad_quantize,
    fp8_transpose,
    swap_first_dims,
    rmsnorm_fwd,
    rmsnorm_bwd,
    rmsnorm_bwd_add,
    layernorm_fwd,
    layernorm_bwd,
    fused_rope_forward,
    fused_rope_backward,
    swiglu,
    dswiglu,
    get_fused_attn_backend,
    fused_attn_fwd,
    fused_attn_bwd,
    thd_read_half_tensor,
    thd_read_second_half_lse,
    thd_get_partitioned_indices,
)

# They change what they are given and allocate nothing that stays.
_WRITE_IN_PLACE = (
    "multi_tensor_adam",
    "multi_tensor_adam_fp8",
    "multi_tensor_adam_param_remainder",
    "multi_tensor_scale",
    "multi_tensor_scale_tensor",
    "compute_amax",
    "multi_tensor_compute_scale_and_scale_inv",
    "multi_tensor_compute_scale_inv_e8m0",
    "fused_amax_and_scale_update_after_reduction",
    "fp8_block_scaling_compute_partial_amax",
    "fp8_block_scaling_partial_cast",
    "mxfp8_scaling_compute_partial_amax",
    "mxfp8_scaling_partial_cast",
    "fused_multi_row_padding",
    "fused_multi_row_unpadding",
    "thd_second_half_lse_correction",
    "thd_out_correction",
    "thd_grad_correction",
    "fa_prepare_fwd",
)


def _writes_in_place(name: str) -> Callable[..., None]:
    def kernel(*args: Any, **kwargs: Any) -> None:
        return None

    kernel.__name__ = kernel.__qualname__ = name
    return kernel


# --- Transformer Engine's Triton kernels ---------------------------------------------------------------------


def make_row_id_map(routing_map: torch.Tensor, num_tokens: int, num_experts: int) -> torch.Tensor:
    return _empty(num_tokens, 2 * num_experts + 1)


def permute_with_mask_map(
    inp: torch.Tensor,
    row_id_map: Any,
    probs: torch.Tensor | None,
    scale: Any,
    pad_offsets: Any,
    num_tokens: int,
    num_experts: int,
    num_out_tokens: int,
    hidden_size: int,
    scale_hidden_dim: int,
) -> tuple[torch.Tensor, None, torch.Tensor | None]:
    rows = int(num_out_tokens)
    return (
        _empty(rows, hidden_size, dtype=inp.dtype),
        None,
        None if probs is None else _empty(rows, dtype=probs.dtype),
    )


def unpermute_with_mask_map(
    inp: torch.Tensor,
    row_id_map: Any,
    merging_probs: Any,
    permuted_probs: torch.Tensor | None,
    pad_offsets: Any,
    num_tokens: int,
    num_experts: int,
    hidden_size: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    probs = None if permuted_probs is None else _empty(num_tokens, num_experts, dtype=permuted_probs.dtype)
    return _empty(num_tokens, hidden_size, dtype=inp.dtype), probs


def unpermute_with_mask_map_bwd_with_merging_probs(
    fwd_output_grad: torch.Tensor,
    row_id_map: Any,
    fwd_input: Any,
    merging_probs: torch.Tensor,
    pad_offsets: Any,
    num_tokens: int,
    num_experts: int,
    num_out_tokens: int,
    hidden_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        _empty(int(num_out_tokens), hidden_size, dtype=fwd_output_grad.dtype),
        _empty(num_tokens, num_experts, dtype=merging_probs.dtype),
    )


def make_chunk_sort_map(split_sizes: Any, sorted_indices: Any, num_tokens: int, num_splits: int) -> torch.Tensor:
    return _empty(num_tokens)


def sort_chunks_by_map(
    inp: torch.Tensor, row_id_map: Any, probs: torch.Tensor | None, num_tokens: int, hidden_size: int, is_forward: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    return torch.empty_like(inp), None if probs is None else torch.empty_like(probs)


_TRITON = (
    make_row_id_map,
    permute_with_mask_map,
    unpermute_with_mask_map,
    unpermute_with_mask_map_bwd_with_merging_probs,
    make_chunk_sort_map,
    sort_chunks_by_map,
)

"""The in-memory module `transformer_engine_torch`, which Transformer Engine's Python finds in place of its compiled
extension on a machine without a GPU.

The enums have the values of Transformer Engine's public headers. The other `te_*.py` files put their functions into the
module with the decorator `kernel`; they have the numerics, and `te_loading.py` the loading. A kernel that does not
exist raises NotImplementedError with its name when it is called. These are written:

- te_layers.py: generic_gemm, te_general_grouped_gemm, rmsnorm_fwd, rmsnorm_bwd, rmsnorm_bwd_add, layernorm_fwd,
  layernorm_bwd, fused_rope_forward, fused_rope_backward, swiglu, dswiglu
- te_fp8.py: quantize, dequantize, create_empty_quantized_tensor, split_quantize, multi_tensor_quantize,
  bgrad_quantize, fp8_transpose, swap_first_dims, compute_amax, multi_tensor_compute_scale_and_scale_inv,
  multi_tensor_compute_scale_inv_e8m0, fused_amax_and_scale_update_after_reduction,
  fp8_block_scaling_compute_partial_amax, fp8_block_scaling_partial_cast, mxfp8_scaling_compute_partial_amax,
  mxfp8_scaling_partial_cast
- te_rows.py: fused_multi_row_padding, fused_multi_row_unpadding, moe_permute_fwd, moe_permute_bwd, moe_unpermute_fwd,
  moe_unpermute_bwd
- te_optimizer.py: multi_tensor_scale, multi_tensor_scale_tensor, multi_tensor_l2norm, multi_tensor_unscale_l2norm,
  multi_tensor_adam, multi_tensor_adam_param_remainder, multi_tensor_adam_fp8
- te_extension.py: get_cublasLt_version, get_cudnn_version, get_num_cublas_streams, get_stream_priority_range
"""

from __future__ import annotations

import enum
import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch

NAME = "transformer_engine_torch"
_Function = TypeVar("_Function", bound=Callable[..., Any])


def _numbered(name: str, members: str) -> Any:
    return enum.IntEnum(name, members.split(), start=0)


class DType(enum.IntEnum):
    """The extension's tags of number formats."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


TORCH_DTYPES = {
    int(DType.kByte): torch.uint8,
    int(DType.kInt32): torch.int32,
    int(DType.kFloat32): torch.float32,
    int(DType.kFloat16): torch.float16,
    int(DType.kBFloat16): torch.bfloat16,
    int(DType.kFloat8E4M3): torch.float8_e4m3fn,
    int(DType.kFloat8E5M2): torch.float8_e5m2,
}

_ENUMS = (
    DType,
    _numbered(
        "FP8FwdTensors",
        "GEMM1_INPUT GEMM1_WEIGHT GEMM1_OUTPUT GEMM2_INPUT GEMM2_WEIGHT GEMM2_OUTPUT GEMM3_INPUT GEMM3_WEIGHT"
        " GEMM3_OUTPUT",
    ),
    _numbered("FP8BwdTensors", "GRAD_OUTPUT1 GRAD_INPUT1 GRAD_OUTPUT2 GRAD_INPUT2 GRAD_OUTPUT3 GRAD_INPUT3"),
    _numbered("NVTE_Bias_Type", "NVTE_NO_BIAS NVTE_PRE_SCALE_BIAS NVTE_POST_SCALE_BIAS NVTE_ALIBI"),
    _numbered(
        "NVTE_Mask_Type",
        "NVTE_NO_MASK NVTE_PADDING_MASK NVTE_CAUSAL_MASK NVTE_PADDING_CAUSAL_MASK NVTE_CAUSAL_BOTTOM_RIGHT_MASK"
        " NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK",
    ),
    _numbered("NVTE_Softmax_Type", "NVTE_VANILLA_SOFTMAX NVTE_OFF_BY_ONE_SOFTMAX NVTE_LEARNABLE_SOFTMAX"),
    _numbered(
        "NVTE_QKV_Format",
        "NVTE_SBHD NVTE_BSHD NVTE_THD NVTE_BSHD_2SBHD NVTE_SBHD_2BSHD NVTE_THD_2BSHD NVTE_THD_2SBHD NVTE_BHSD"
        " NVTE_QKV_Format_NOT_SET",
    ),
    _numbered(
        "NVTE_QKV_Layout",
        "NVTE_SB3HD NVTE_SBH3D NVTE_SBHD_SB2HD NVTE_SBHD_SBH2D NVTE_SBHD_SBHD_SBHD NVTE_BS3HD NVTE_BSH3D"
        " NVTE_BSHD_BS2HD NVTE_BSHD_BSH2D NVTE_BSHD_BSHD_BSHD NVTE_T3HD NVTE_TH3D NVTE_THD_T2HD NVTE_THD_TH2D"
        " NVTE_THD_THD_THD NVTE_SBHD_BSHD_BSHD NVTE_BSHD_SBHD_SBHD NVTE_THD_BSHD_BSHD NVTE_THD_SBHD_SBHD"
        " NVTE_Paged_KV_BSHD_BSHD_BSHD NVTE_Paged_KV_BSHD_SBHD_SBHD NVTE_Paged_KV_SBHD_BSHD_BSHD"
        " NVTE_Paged_KV_SBHD_SBHD_SBHD NVTE_Paged_KV_THD_BSHD_BSHD NVTE_Paged_KV_THD_SBHD_SBHD"
        " NVTE_BHSD_BHSD_BHSD NVTE_QKV_Layout_NOT_SET",
    ),
    enum.IntEnum("NVTE_Fused_Attn_Backend", dict(NVTE_No_Backend=-1, NVTE_F16_arbitrary_seqlen=1, NVTE_FP8=2)),
    enum.IntEnum(
        "NVTEScalingMode",
        dict(
            NVTE_DELAYED_TENSOR_SCALING=0,
            NVTE_MXFP8_1D_SCALING=1,
            NVTE_BLOCK_SCALING_1D=2,
            NVTE_BLOCK_SCALING_2D=3,
            NVTE_NVFP4_1D_SCALING=4,
            NVTE_INVALID_SCALING=100,
        ),
    ),
    _numbered("Float8BlockScaleTensorFormat", "GEMM_READY COMPACT INVALID"),
    _numbered("NVTERoutingMapFormat", "BYTEMAP BITMAP_U8"),
    _numbered("NVTEQBHistogramMode", "TWO_KERNEL FUSED_ATOMIC"),
    _numbered("CommOverlapType", "RS AG"),
    _numbered(
        "CommOverlapAlgo",
        "BULK_OVERLAP_AG BULK_OVERLAP_RS SPLIT_PIPELINED_AG_P2P SPLIT_PIPELINED_RS SPLIT_PIPELINED_RS_P2P"
        " ATOMIC_GEMM_RS ATOMIC_GEMM_AG_P2P ATOMIC_GEMM_RS_P2P EXTERNAL_BULK_OVERLAP_AG",
    ),
)


class FP8TensorMeta:
    """Scales and amax history of one module's tensors under delayed scaling; Transformer Engine fills it."""

    scale: torch.Tensor
    scale_inv: torch.Tensor
    amax_history: torch.Tensor


class _NoOverlap:
    """Overlap of products with communication uses CUDA's own buffers; there are none here."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise NotImplementedError(f"{NAME}.{type(self).__name__} needs a GPU; turn tp_comm_overlap off")


class _Extension(types.ModuleType):
    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        # Optional entry points of other vendors' plug-ins, which Transformer Engine looks for by name.
        if name.startswith("_") or name in ("flash_attention", "get_attention_backend"):
            raise AttributeError(name)

        def unwritten(*args: object, **kwargs: object) -> NoReturn:
            raise NotImplementedError(
                f"{NAME}.{name} has no CPU kernel; gspo_mega/cpu has those that this project's layers use"
            )

        unwritten.__name__ = unwritten.__qualname__ = name
        return unwritten


extension = _Extension(NAME, "Transformer Engine's extension, as plain torch on a CPU.")


def kernel(function: _Function) -> _Function:
    """Put `function` into the extension under its own name. Its parameters are those that Transformer Engine's Python
    passes, by position or by the names of the extension's documentation.

    Raises ValueError if the extension has a kernel of that name.
    """
    name = function.__name__
    if name in vars(extension):
        raise ValueError(f"{NAME} has a kernel {name} already")
    setattr(extension, name, function)
    return function


def torch_dtype(tag: int | None) -> torch.dtype | None:
    """Return torch's dtype for a `DType` of the extension or of Transformer Engine's Python; None stays None."""
    return None if tag is None else TORCH_DTYPES[int(tag)]


@kernel
def get_cublasLt_version() -> int:
    """Return a version with every product that Transformer Engine asks for; the products here have no such limits."""
    return 130100


@kernel
def get_cudnn_version() -> int:
    """Return a version that Transformer Engine accepts. Its attention is never called: see `te_layers.py`."""
    return 91900


@kernel
def get_num_cublas_streams() -> int:
    return 4


@kernel
def get_stream_priority_range(device_id: int = -1) -> tuple[int, int]:
    return 0, 0


def provide() -> None:
    """Let `import transformer_engine_torch` find this module. Idempotent."""
    sys.modules[NAME] = extension


for _class in (*_ENUMS, FP8TensorMeta):
    setattr(extension, _class.__name__, _class)
for _name in ("CommOverlapHelper", "CommOverlap", "CommOverlapP2P", "CommOverlapBase", "CommOverlapCore"):
    setattr(extension, _name, type(_name, (_NoOverlap,), {}))

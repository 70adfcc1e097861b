"""SGLang's Triton kernels that round to FP8 and INT8, and multiply what was rounded, against this package's rules
(`gspo_mega/algorithm`), which CPU servers use (`gspo_mega/cpu/sglang_quantization.py`).
"""

import torch
from interpreter import case
from sglang.kernels.ops.gemm.fp8_kernel import triton_scaled_mm, w8a8_block_fp8_matmul_triton
from sglang.kernels.ops.quantization import fp8_kernel
from sglang.kernels.ops.quantization.int8_kernel import per_token_quant_int8

from gspo_mega.algorithm import fp8
from gspo_mega.algorithm.rounding import quantize_int8_rows, rounded_linear_inputs, served_linear

GENERATOR = torch.Generator().manual_seed(1)
DTYPES = (torch.float32, torch.bfloat16)


def numbers(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=GENERATOR).to(dtype)


def rows(dtype, columns=256):
    """Rows of very different sizes, with a value whose code is subnormal."""
    x = numbers(12, columns, dtype=dtype) * torch.logspace(-6, 5, 12).to(dtype)[:, None]
    x[:, 5] = x.abs().amax(1) * 2.0**-17
    return x


def values(data, scale, group):
    return fp8.from_fp8(data) * scale.repeat_interleave(group, 1)


@case("FP8 per group of a token")
def _():
    for dtype in DTYPES:
        x = rows(dtype)
        data, scale = fp8_kernel._per_token_group_quant_8bit_raw(x, 128)
        yield values(data, scale, 128), rounded_linear_inputs(x, "fp8_block")


@case("FP8 per group, powers of two")
def _():
    for dtype in DTYPES:
        x = rows(dtype)
        data, scale = torch.empty(x.shape, dtype=torch.float8_e4m3fn), torch.empty(2, 12).t()
        fp8_kernel._per_token_group_quant_8bit_colmajor[(24,)](
            x, data, scale, 128, 256, scale.stride(1), 1e-10, -448.0, 448.0, BLOCK=128, SCALE_UE8M0=True
        )
        yield values(data, scale, 128), rounded_linear_inputs(x, "fp8_block", power_of_two=True)


@case("FP8 per token")
def _():
    for dtype in DTYPES:
        x = rows(dtype)
        data, scale = fp8_kernel._per_token_group_quant_8bit_raw(x, 256)
        yield values(data, scale, 256), rounded_linear_inputs(x, "fp8")
        weight, weight_scale = served_linear(x, "fp8")
        yield data.view(torch.uint8), weight.t().contiguous().view(torch.uint8)
        yield scale, weight_scale.t()


@case("FP8 per tensor")
def _():
    for dtype in DTYPES:
        x = numbers(2, 5, 64, dtype=dtype)
        data, scale = fp8_kernel.per_tensor_quant_mla_fp8(x, torch.zeros(1))
        found, found_scale = served_linear(x.reshape(1, -1), "fp8")
        yield scale, found_scale.view(1)
        yield data.view(torch.uint8).flatten(), found.t().contiguous().view(torch.uint8).flatten()


@case("FP8 by a given scale")
def _():
    for dtype in DTYPES:
        x = rows(dtype)[6:8]
        scale = x.abs().amax().float().reshape(1) / 400  # the largest is within the range
        data, _ = fp8_kernel.static_quant_fp8(x, scale)
        yield data.view(torch.uint8), fp8.to_fp8(x.float() * (1 / scale)).view(torch.uint8)


@case("INT8 per token")
def _():
    for dtype in DTYPES:
        x = rows(dtype)
        yield from zip(per_token_quant_int8(x), quantize_int8_rows(x), strict=True)


@case("product of FP8 in blocks")
def _():
    x, weight = numbers(5, 256), numbers(192, 256)
    data, scale = fp8.quantize_published_blocks(x, (1, 128))
    blocks, block_scale = fp8.quantize_published_blocks(weight, (128, 128))
    got = w8a8_block_fp8_matmul_triton(data, blocks, scale, block_scale, [128, 128], torch.float32)
    yield got, fp8.dequantize_blocks(data, scale, (1, 128)) @ fp8.dequantize_blocks(blocks, block_scale).t()


@case("product of FP8 per token and channel")
def _():
    x, weight = numbers(5, 256), numbers(80, 256)
    data, scale = fp8.quantize_published_blocks(x, (1, 256))
    channels, channel_scale = served_linear(weight, "fp8")
    got = triton_scaled_mm(data, channels, scale, channel_scale.t().contiguous(), torch.float32)
    yield got, (fp8.from_fp8(data) * scale) @ (fp8.from_fp8(channels) * channel_scale)


@case("control: a scale that is divided by")
def _():
    x = numbers(64, 256, dtype=torch.bfloat16)
    data, _ = fp8_kernel._per_token_group_quant_8bit_raw(x, 256)
    divided, _ = fp8.quantize_published_blocks(x, (1, 256))
    yield data.view(torch.uint8), divided.view(torch.uint8)

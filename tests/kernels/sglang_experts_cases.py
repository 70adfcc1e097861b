"""SGLang's Triton experts against those of CPU servers: routing to blocks, the product of each expert (plain, with
gpt-oss's biases, FP8 and INT8), activation, weights and sum. An expert of another rank is -1.
"""

from types import SimpleNamespace

import torch
import triton.language as tl
from interpreter import case
from sglang.kernels.ops.moe import fused_moe_triton_kernels as kernels
from sglang.kernels.ops.moe.ep_moe_kernels import (
    compute_src2dst_triton_kernel,
    deepep_permute_triton_kernel,
    deepep_post_reorder_triton_kernel,
)
from sglang.kernels.ops.moe.moe_align_small_numel import moe_align_small_numel

from gspo_mega.algorithm.fp8 import quantize_published_blocks
from gspo_mega.algorithm.rounding import served_experts
from gspo_mega.cpu.sglang_layers import clamped_experts_forward, experts_forward_plain
from gspo_mega.cpu.sglang_quantization import experts_forward, values_of

GENERATOR = torch.Generator().manual_seed(2)
TOKENS, TOP, EXPERTS, HIDDEN, WIDTH = 9, 2, 5, 64, 32
BLOCK = 16


def numbers(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=GENERATOR).to(dtype)


def routes():
    chosen = torch.rand(TOKENS, EXPERTS, generator=GENERATOR).topk(TOP, dim=1).indices.int()
    chosen[3, 1] = -1
    return torch.rand(TOKENS, TOP, generator=GENERATOR), chosen


def aligned(chosen):
    capacity = chosen.numel() * BLOCK
    rows, experts = torch.full((capacity,), -7, dtype=torch.int32), torch.full((capacity // BLOCK,), -7).int()
    total = torch.empty(1, dtype=torch.int32)
    moe_align_small_numel(chosen, EXPERTS + 1, BLOCK, rows, experts, total)
    return rows, experts, total


@case("experts' blocks")
def _():
    _, chosen = routes()
    rows, experts, total = aligned(chosen)
    flat, expected_rows, expected_experts = chosen.flatten(), [], []
    for expert in range(-1, EXPERTS):
        own = (flat == expert).nonzero().flatten().tolist()
        blocks = -(-len(own) // BLOCK)
        expected_rows += own + [flat.numel()] * (blocks * BLOCK - len(own))
        expected_experts += [expert] * blocks
    yield total, torch.tensor([len(expected_rows)]).int()
    yield rows[: int(total)], torch.tensor(expected_rows).int()
    yield experts[: len(expected_experts)], torch.tensor(expected_experts).int()


def computed(x, weights, chosen, w13, w2, biases=(None, None), activate=None, block_k=32, **quantized):
    """The experts by SGLang's kernels: [tokens, hidden]."""
    rows, experts, total = aligned(chosen)
    config = dict(BLOCK_SIZE_M=BLOCK, BLOCK_SIZE_N=32, BLOCK_SIZE_K=block_k, GROUP_SIZE_M=1)
    scales = quantized.pop("scales", (None, None))
    options = dict(use_fp8_w8a8=False, use_int8_w8a8=False, per_channel_quant=False, block_shape=None) | quantized

    def product(inputs, weight, bias, scale, output, weighted, top):
        kernels.invoke_fused_moe_kernel(
            inputs,
            weight,
            bias,
            output,
            None,
            scale,
            None,
            weights,
            chosen,
            rows,
            experts,
            total,
            weighted,
            top,
            config,
            compute_type={torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}[x.dtype],
            use_int8_w8a16=False,
            use_int4_w4a16=False,
            **options,
        )
        return output

    hidden, width = x.shape[1], w13.shape[1] // 2
    both = product(x, w13, biases[0], scales[0], x.new_empty(TOKENS * TOP, 2 * width), False, TOP)
    between = x.new_zeros(TOKENS * TOP, width)
    if activate is None:
        kernels.act_and_mul_triton(both, between, config, chosen)
    else:
        between = activate(both)
    each = product(between, w2, biases[1], scales[1], x.new_empty(TOKENS * TOP, hidden), True, 1)
    output = torch.empty_like(x)
    kernels.moe_sum_reduce_triton(each.view(TOKENS, TOP, hidden), output, 1.0)
    return output


@case("experts, fp32")
def _():
    x, (weights, chosen) = numbers(TOKENS, HIDDEN), routes()
    layer = SimpleNamespace(w13_weight=numbers(EXPERTS, 2 * WIDTH, HIDDEN), w2_weight=numbers(EXPERTS, HIDDEN, WIDTH))
    config = SimpleNamespace(activation="silu", gemm1_alpha=None, apply_router_weight_on_input=False)
    forward = experts_forward_plain(lambda *_: None)
    yield (
        computed(x, weights, chosen, layer.w13_weight, layer.w2_weight),
        forward(layer, x, (weights, chosen, None), config),
    )


@case("experts, bf16")
def _():
    x, (weights, chosen) = numbers(TOKENS, HIDDEN).bfloat16(), routes()
    w13, w2 = numbers(EXPERTS, 2 * WIDTH, HIDDEN).bfloat16(), numbers(EXPERTS, HIDDEN, WIDTH).bfloat16()
    got = computed(x, weights, chosen, w13, w2)
    # CPU servers have SGLang's own experts in bf16; the formula in fp32, each result rounded where the kernel rounds
    want = torch.zeros(TOKENS, HIDDEN)
    for token, row in enumerate(chosen.tolist()):
        for place, expert in enumerate(row):
            if expert >= 0:
                gate, up = (x[token].float() @ w13[expert].float().t()).bfloat16().chunk(2)
                inner = torch.nn.functional.silu(gate.float()).bfloat16() * up
                want[token] += ((inner.float() @ w2[expert].float().t()) * weights[token, place]).bfloat16().float()
    yield got, want.bfloat16()


@case("experts with gpt-oss's biases")
def _():
    x, (weights, chosen) = numbers(TOKENS, HIDDEN), routes()
    layer = SimpleNamespace(
        w13_weight=numbers(EXPERTS, 2 * WIDTH, HIDDEN),
        w2_weight=numbers(EXPERTS, HIDDEN, WIDTH),
        w13_weight_bias=numbers(EXPERTS, 2 * WIDTH),
        w2_weight_bias=numbers(EXPERTS, HIDDEN),
    )

    def activate(both):  # SGLang compiles this with torch.compile; it is no Triton kernel
        gate, up = both[..., ::2].clamp(max=7.0), both[..., 1::2].clamp(-7.0, 7.0)
        return gate * torch.sigmoid(gate * 1.702) * (up + 1)

    biases = (layer.w13_weight_bias, layer.w2_weight_bias)
    yield (
        computed(x, weights, chosen, layer.w13_weight, layer.w2_weight, biases, activate),
        clamped_experts_forward(layer, x, weights, chosen, 1.702, 7.0),
    )


@case("experts, FP8 per tensor")
def _():
    x, (weights, chosen) = numbers(TOKENS, HIDDEN), routes()
    w13, scale13 = served_experts(numbers(EXPERTS, 2 * WIDTH, HIDDEN), "fp8")
    w2, scale2 = served_experts(numbers(EXPERTS, HIDDEN, WIDTH), "fp8")

    def rounded(inputs, _scale, use_per_token_if_dynamic):  # SGLang's own is a CUDA kernel
        assert not use_per_token_if_dynamic
        data, scale = quantize_published_blocks(inputs.reshape(1, -1), (1, inputs.numel()))
        return data.view(inputs.shape), scale.view(1)

    kernels.scaled_fp8_quant = rounded
    got = computed(x, weights, chosen, w13, w2, scales=(scale13, scale2), use_fp8_w8a8=True)
    operands = (values_of(w) * scale.view(-1, 1, 1) for w, scale in ((w13, scale13), (w2, scale2)))
    yield got, experts_forward(x, weights, chosen, *operands, "fp8")


@case("experts, FP8 in blocks")
def _():
    hidden, width = 256, 128
    x, (weights, chosen) = numbers(TOKENS, hidden), routes()
    pairs = []
    for shape in ((EXPERTS, 2 * width, hidden), (EXPERTS, hidden, width)):
        data, scale = zip(*(quantize_published_blocks(own) for own in numbers(*shape)))
        pairs.append((torch.stack(data), torch.stack(scale)))
    (w13, scale13), (w2, scale2) = pairs
    got = computed(
        x,
        weights,
        chosen,
        w13,
        w2,
        scales=(scale13, scale2),
        block_k=128,
        use_fp8_w8a8=True,
        block_shape=[128, 128],
    )
    operands = (
        values_of(w) * scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
        for w, scale in ((w13, scale13), (w2, scale2))
    )
    yield got, experts_forward(x, weights, chosen, *operands, "fp8_block")


@case("experts, INT8")
def _():
    x, (weights, chosen) = numbers(TOKENS, HIDDEN), routes()
    w13, scale13 = served_experts(numbers(EXPERTS, 2 * WIDTH, HIDDEN), "int8")
    w2, scale2 = served_experts(numbers(EXPERTS, HIDDEN, WIDTH), "int8")
    got = computed(x, weights, chosen, w13, w2, scales=(scale13, scale2), use_int8_w8a8=True, per_channel_quant=True)
    operands = (values_of(w) * scale for w, scale in ((w13, scale13), (w2, scale2)))
    yield got, experts_forward(x, weights, chosen, *operands, "int8")


@case("experts' rows, there and back")
def _():
    weights, chosen = routes()
    x, flat = numbers(TOKENS, HIDDEN), chosen.flatten()
    sorted_ids, order = flat.sort(stable=True)
    num_elsewhere = int((flat < 0).sum())
    places = torch.empty(flat.numel(), dtype=torch.int32)
    compute_src2dst_triton_kernel[(2,)](sorted_ids, order, places, flat.numel(), BLOCK_SIZE=16)
    yield places, torch.where(flat < 0, -1, order.argsort() - num_elsewhere).int()
    rows = torch.zeros(flat.numel() - num_elsewhere, HIDDEN)
    deepep_permute_triton_kernel[(TOKENS,)](x, rows, places, chosen, None, TOP, HIDDEN, BLOCK_SIZE=64)
    yield rows, x[order[num_elsewhere:] // TOP]
    rows, summed = numbers(*rows.shape), torch.zeros(TOKENS, HIDDEN)
    deepep_post_reorder_triton_kernel[(TOKENS,)](rows, summed, places, chosen, weights, TOP, HIDDEN, 1.0, BLOCK_SIZE=64)
    copies = torch.where(flat[:, None] < 0, 0, rows[places.clamp(min=0).long()]) * weights.view(-1, 1)
    yield summed, copies.view(TOKENS, TOP, HIDDEN).sum(1)

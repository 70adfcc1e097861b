"""SGLang's Triton kernels for adapters (LoRA) against its backend without a GPU, `torch_native`, which CPU servers
run: the products with A and with B, of one matrix and of those of q, k, v and of gate, up, in segments of one adapter
each. One adapter has a smaller rank, and one segment has none.
"""

import torch
from interpreter import case
from sglang.kernels.ops.lora.dense.chunked_sgmv_expand import chunked_sgmv_lora_expand_forward
from sglang.kernels.ops.lora.dense.chunked_sgmv_shrink import chunked_sgmv_lora_shrink_forward
from sglang.kernels.ops.lora.dense.gate_up_lora_b import gate_up_lora_b_fwd
from sglang.kernels.ops.lora.dense.qkv_lora_b import qkv_lora_b_fwd
from sglang.kernels.ops.lora.dense.sgemm_lora_a import sgemm_lora_a_fwd
from sglang.kernels.ops.lora.dense.sgemm_lora_b import sgemm_lora_b_fwd
from sglang.srt.lora.torch_ops import lora_ops
from sglang.srt.lora.utils import LoRABatchInfo

GENERATOR = torch.Generator().manual_seed(3)
LENGTHS, ADAPTERS = torch.tensor([5, 17, 1, 4]).int(), torch.tensor([1, 2, 0, 1]).int()
RANKS, SCALES = torch.tensor([0, 8, 4]).int(), torch.tensor([0.0, 2.0, 0.5])
TOKENS, WIDTH, RANK = 27, 48, 8


def numbers(*shape):
    return torch.randn(*shape, generator=GENERATOR)


def batch(longest=17):
    return LoRABatchInfo(
        use_cuda_graph=False,
        bs=4,
        num_segments=4,
        seg_indptr=torch.cat([torch.zeros(1).int(), LENGTHS.cumsum(0).int()]),
        weight_indices=ADAPTERS,
        lora_ranks=RANKS,
        scalings=SCALES,
        max_len=longest,
        seg_lens=LENGTHS,
    )


def used(inner, slices):
    """The columns that an adapter has; a kernel leaves the others as they were."""
    columns = torch.arange(inner.shape[1])
    ranks = RANKS[ADAPTERS.long()].repeat_interleave(LENGTHS)
    return torch.where(columns < slices * ranks[:, None], inner, 0)


def by_torch_a(x, a, slices):
    """Without the scale, which `torch_native` applies here and Triton in the product with B."""
    return lora_ops.sgemm_lora_a_fwd(x, a, ADAPTERS, LENGTHS, RANKS, torch.ones(3), slices)


def by_torch_b(inner, b, bounds, base):
    scaled = inner * SCALES[ADAPTERS.long()].repeat_interleave(LENGTHS)[:, None]
    return lora_ops.sgemm_lora_b_fwd(scaled, b, ADAPTERS, LENGTHS, RANKS, bounds, base.clone())


@case("adapters, A")
def _():
    for slices in (1, 2, 3):
        x, a = numbers(TOKENS, WIDTH), numbers(3, slices * RANK, WIDTH)
        yield used(sgemm_lora_a_fwd(x, a, batch(), slices), slices), by_torch_a(x, a, slices)


@case("adapters, B")
def _():
    inner, b, base = used(numbers(TOKENS, RANK), 1), numbers(3, WIDTH, RANK), numbers(TOKENS, WIDTH)
    want = by_torch_b(inner, b, torch.tensor([0, WIDTH]), base)
    yield sgemm_lora_b_fwd(inner, b, batch(), base.clone()), want


@case("adapters, B of q, k and v")
def _():
    bounds = torch.tensor([0, 80, 112, 144])
    inner, b, base = used(numbers(TOKENS, 3 * RANK), 3), numbers(3, 144, RANK), numbers(TOKENS, 144)
    want = by_torch_b(inner, b, bounds, base)
    yield qkv_lora_b_fwd(inner, b, batch(), bounds.int(), 80, base.clone()), want


@case("adapters, B of gate and up")
def _():
    inner, b, base = used(numbers(TOKENS, 2 * RANK), 2), numbers(3, 80, RANK), numbers(TOKENS, 80)
    want = by_torch_b(inner, b, torch.tensor([0, 40, 80]), base)
    yield gate_up_lora_b_fwd(inner, b, batch(), 40, base.clone()), want


@case("adapters in chunks")
def _():
    """The backend `csgmv`: the rows of a chunk need not be next to each other, and a chunk has at most 32."""
    order = torch.randperm(TOKENS, generator=GENERATOR)
    bounds = torch.tensor([0, 80, 112, 144])
    x, a = numbers(TOKENS, WIDTH), numbers(3, 3 * RANK, WIDTH)
    b, base = numbers(3, 144, RANK), numbers(TOKENS, 144)
    chunks = batch(longest=32)
    chunks.permutation = order.int()
    inner = chunked_sgmv_lora_shrink_forward(x, a, chunks, 3)
    back = order.argsort()
    want_inner = by_torch_a(x[order], a, 3)
    yield used(inner[order], 3), want_inner
    inner = used(inner[order], 3)[back].contiguous()
    got = chunked_sgmv_lora_expand_forward(inner, b, chunks, bounds.int(), 80, base.clone())
    yield got, by_torch_b(inner[order], b, bounds, base[order])[back]

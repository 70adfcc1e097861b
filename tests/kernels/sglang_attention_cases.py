"""SGLang's Triton attention against the attention of CPU servers (`gspo_mega/cpu/sglang_attention.py`): decode and
prefill with shared key-value heads, sinks and sliding windows, in fp32 and bf16, and decode of latents.
"""

from types import SimpleNamespace

import torch
from interpreter import case
from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd
from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd
from sglang.kernels.ops.attention.kv_indices import create_flashinfer_kv_indices_triton

from gspo_mega.cpu import sglang_attention as ours

GENERATOR = torch.Generator().manual_seed(0)
WINDOW = 11
SCALING = 0.2
TABLE = torch.randperm(300, generator=GENERATOR).view(3, 100)  # slots of three requests
REQUESTS = torch.arange(3)


def numbers(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=GENERATOR).to(dtype)


def layer(heads, kv_heads, dim, v_dim, window):
    return SimpleNamespace(
        tp_q_head_num=heads,
        tp_k_head_num=kv_heads,
        qk_head_dim=dim,
        v_head_dim=v_dim,
        scaling=SCALING,
        sliding_window_size=window,
    )


def slots_of(lengths, starts):
    """SGLang's list of each request's cache slots from a position on: (bounds [4] int32, slots), made by its kernel."""
    kept = (lengths - starts).int()
    bounds = torch.cat([torch.zeros(1, dtype=torch.int32), kept.cumsum(0).int()])
    slots = torch.full((int(bounds[-1]),), -1)
    create_flashinfer_kv_indices_triton[(3,)](TABLE, REQUESTS, kept, bounds, starts.int(), slots, TABLE.stride(0))
    return bounds, slots


def decoded(heads, kv_heads, dtype=torch.float32, sinks=None, window=-1, dim=16, v_dim=16, cache=None):
    lengths = torch.tensor([5, 70, 33])
    query = numbers(3, heads, dim, dtype=dtype)
    keys, values = (numbers(300, kv_heads, size, dtype=dtype).to(cache or dtype) for size in (dim, v_dim))
    if dim != v_dim:  # latents: the values are the first part of the keys
        values = keys[..., :v_dim]
    starts = (lengths - 1 - window).clamp(min=0) if window >= 0 else torch.zeros_like(lengths)
    bounds, slots = slots_of(lengths, starts)
    output, num_splits = torch.empty(3, heads, v_dim, dtype=dtype), 2
    decode_attention_fwd(
        query,
        keys,
        values,
        output,
        bounds,
        slots,
        torch.empty(3, heads, num_splits, v_dim),
        torch.empty(3, heads, num_splits),
        torch.tensor([1, 2, 2], dtype=torch.int32),
        num_splits,
        SCALING,
        1.0,
        1.0,
        sinks=sinks,
        has_mla=dim != v_dim,
    )
    found = query.new_empty(3, heads * v_dim)
    for plan in ours._plan_decodes(TABLE, REQUESTS, lengths):
        part = ours._attend_decode(
            plan, query.flatten(1), keys, values.contiguous(), layer(heads, kv_heads, dim, v_dim, window), sinks
        )
        found[slice(None) if plan.members is None else plan.members] = part
    return output.flatten(1), found


def prefilled(heads, kv_heads, dtype=torch.float32, sinks=None, window=-1, dim=16):
    new, before = torch.tensor([3, 17, 1]), torch.tensor([0, 40, 9])
    query = numbers(21, heads, dim, dtype=dtype)
    keys, values = (numbers(300, kv_heads, dim, dtype=dtype) for _ in range(2))
    starts = (before - window).clamp(min=0) if window >= 0 else torch.zeros_like(before)
    bounds, slots = slots_of(before, starts)
    fresh = torch.cat([TABLE[i, before[i] : before[i] + new[i]] for i in range(3)])
    output = torch.empty_like(query)
    extend_attention_fwd(
        query,
        keys[fresh],
        values[fresh],
        output,
        keys,
        values,
        torch.cat([torch.zeros(1, dtype=torch.int32), new.cumsum(0).int()]),
        bounds,
        slots,
        None,
        True,
        None,
        17,
        1.0,
        1.0,
        sm_scale=SCALING,
        sliding_window_size=window,
        sinks=sinks,
        window_kv_offsets=starts.int() if window >= 0 else None,
    )
    found = torch.empty(21, heads * dim, dtype=dtype)
    for bucket in ours.plan_buckets(TABLE, REQUESTS, new.tolist(), (before + new).tolist()):
        ours._attend(
            bucket,
            query.flatten(1),
            keys.flatten(1),
            values.flatten(1),
            found,
            layer(heads, kv_heads, dim, dim, window),
            sinks,
        )
    return output.flatten(1), found


@case("decode, a key per head")
def _():
    yield decoded(2, 2)


@case("decode, shared keys")
def _():
    yield decoded(6, 2)


@case("decode, sinks")
def _():
    yield decoded(4, 2, sinks=numbers(4))
    yield decoded(2, 2, sinks=numbers(2))


@case("decode, sliding window")
def _():
    yield decoded(4, 2, window=WINDOW)
    yield decoded(4, 2, window=WINDOW, sinks=numbers(4))


@case("decode, bf16")
def _():
    yield decoded(4, 2, dtype=torch.bfloat16)
    yield decoded(4, 2, dtype=torch.bfloat16, sinks=numbers(4).bfloat16())


@case("decode, FP8 cache, a key per head")
def _():
    yield decoded(2, 2, cache=torch.float8_e4m3fn)


@case("decode, FP8 cache, shared keys")
def _():
    """The kernel rounds queries to FP8, and each weight of the softmax as exp(score - largest score). Ours does not."""
    query, keys, values = numbers(1, 4, 16), *(numbers(300, 2, 16).to(torch.float8_e4m3fn) for _ in range(2))
    output = torch.empty(1, 4, 16)
    bounds, slots = torch.tensor([0, 13], dtype=torch.int32), TABLE[0, :13]
    scratch = torch.empty(1, 4, 1, 16), torch.empty(1, 4, 1), torch.ones(1, dtype=torch.int32)
    decode_attention_fwd(query, keys, values, output, bounds, slots, *scratch, 1, SCALING, 1.0, 1.0)
    k, v = (cache.float()[slots].repeat_interleave(2, 1) for cache in (keys, values))
    weights = torch.einsum("hd,khd->hk", query[0].to(keys.dtype).float(), k) * SCALING
    weights = (weights - weights.amax(1, keepdim=True)).exp()
    rounded = weights.to(torch.float8_e4m3fn).float()
    yield output[0], torch.einsum("hk,khd->hd", rounded, v) / weights.sum(1, keepdim=True)


@case("decode, latents")
def _():
    yield decoded(2, 1, dim=288, v_dim=256)


@case("prefill, shared keys")
def _():
    yield prefilled(4, 2)


@case("prefill, sinks")
def _():
    yield prefilled(4, 2, sinks=numbers(4))


@case("prefill, sliding window")
def _():
    yield prefilled(4, 2, window=WINDOW)
    yield prefilled(4, 2, window=WINDOW, sinks=numbers(4))


@case("prefill, bf16")
def _():
    yield prefilled(4, 2, dtype=torch.bfloat16, sinks=numbers(4).bfloat16())


@case("control: a window with one key less")
def _():
    generator_state = GENERATOR.get_state()
    got, _ = decoded(4, 2, window=WINDOW - 1)
    GENERATOR.set_state(generator_state)
    yield got, decoded(4, 2, window=WINDOW)[1]


@case("control: no sinks")
def _():
    generator_state = GENERATOR.get_state()
    got, _ = prefilled(4, 2)
    GENERATOR.set_state(generator_state)
    yield got, prefilled(4, 2, sinks=torch.zeros(4))[1]

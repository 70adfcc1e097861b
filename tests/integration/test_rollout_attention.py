"""The batched CPU attention equals SGLang's own, as a function and behind whole servers."""

from __future__ import annotations

import types
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from servers import Serve, run_config, trust
from tiny_models import EOS_TOKEN_ID

from gspo_mega.config import load_config
from gspo_mega.cpu import sglang_hooks
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.rollout.client.completion import SamplingParams
from gspo_mega.rollout.pool import ServerPool

sglang_hooks.activate()  # as in a server, before the first import of SGLang

pytestmark = pytest.mark.skipif(
    sglang_hooks.has_gpu(), reason="the batched CPU attention is registered on machines without a GPU only"
)

NUM_SLOTS, CONTEXT, HEADS, KV_HEADS, DIM = 400, 64, 4, 2, 8


def backends():
    """Stock and batched backend over one cache of random numbers, with NaN in every slot nobody uses."""
    pytest.importorskip("sglang")
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    from gspo_mega.cpu.sglang_attention import BatchedCpuAttention

    torch.manual_seed(0)
    cache = types.SimpleNamespace(
        keys=torch.full((NUM_SLOTS, KV_HEADS, DIM), float("nan")),
        values=torch.full((NUM_SLOTS, KV_HEADS, DIM), float("nan")),
    )
    cache.get_key_buffer = lambda layer: cache.keys
    cache.get_value_buffer = lambda layer: cache.values
    table = types.SimpleNamespace(req_to_token=torch.zeros(8, CONTEXT, dtype=torch.int32))
    runner = types.SimpleNamespace(device="cpu", req_to_token_pool=table, token_to_kv_pool=cache)
    return TorchNativeAttnBackend(runner), BatchedCpuAttention(runner), cache, table


def layer():
    from sglang.srt.layers.radix_attention import AttentionType

    return types.SimpleNamespace(
        layer_id=0,
        tp_q_head_num=HEADS,
        tp_k_head_num=KV_HEADS,
        qk_head_dim=DIM,
        v_head_dim=DIM,
        scaling=DIM**-0.5,
        is_cross_attention=False,
        sliding_window_size=-1,
        attn_type=AttentionType.DECODER,
    )


requests = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=7)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(requests, st.booleans())
def test_one_call_equals_the_stock_loop(sizes, decode):
    """`sizes`: (cached tokens, new tokens) of each request; decoding has one new token each."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    stock, batched, cache, table = backends()
    prefixes = torch.tensor([cached for cached, _ in sizes])
    news = torch.ones_like(prefixes) if decode else torch.tensor([new for _, new in sizes])
    lengths = prefixes + news
    slots = torch.randperm(NUM_SLOTS - 1) + 1
    used = 0
    for row, length in enumerate(lengths.tolist()):
        mine = slots[used : used + length]
        used += length
        table.req_to_token[row, :length] = mine.int()
        cache.keys[mine], cache.values[mine] = torch.randn(2, length, KV_HEADS, DIM)
    batch = types.SimpleNamespace(
        forward_mode=ForwardMode.DECODE if decode else ForwardMode.EXTEND,
        seq_lens=lengths,
        extend_seq_lens=news,
        extend_prefix_lens=prefixes,
        req_pool_indices=torch.arange(len(sizes)),
        out_cache_loc=None,
        encoder_lens=None,
    )
    query = torch.randn(int(news.sum()), HEADS * DIM)
    outputs = []
    for backend in (stock, batched):
        backend.init_forward_metadata(batch)
        forward = backend.forward_decode if decode else backend.forward_extend
        outputs.append(forward(query.clone(), None, None, layer(), batch, save_kv_cache=False))
    assert torch.isfinite(outputs[1]).all()
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=2e-6)


@pytest.mark.parametrize("has_sinks", [False, True])
def test_bf16_is_widened_some_requests_at_a_time(has_sinks, monkeypatch):
    from gspo_mega.cpu import sglang_attention as module

    torch.manual_seed(0)
    lengths = torch.tensor([9, 5, 16, 11, 8])
    table = (torch.randperm(NUM_SLOTS - 1) + 1)[: 5 * 16].view(5, 16)
    keys, values = torch.randn(2, NUM_SLOTS, KV_HEADS, DIM).bfloat16()
    query = torch.randn(5, HEADS * DIM).bfloat16()
    sinks = torch.randn(HEADS) if has_sinks else None
    plan = module._plan_decode(table, None, torch.arange(5), lengths, 16)
    expected = torch.zeros(5, HEADS, DIM, dtype=torch.float64)
    for row, length in enumerate(lengths.tolist()):
        for head in range(HEADS):
            k, v = (part[table[row, :length], head * KV_HEADS // HEADS].double() for part in (keys, values))
            scores = k @ query.view(5, HEADS, DIM)[row, head].double() * DIM**-0.5
            weights = torch.cat([scores, sinks[head : head + 1].double()] if has_sinks else [scores]).softmax(0)
            expected[row, head] = weights[:length] @ v
    for at_once in (1, 2, 100):
        monkeypatch.setattr(module, "_WIDENED", at_once * 16 * DIM * KV_HEADS)
        found = module._attend_decode(plan, query, keys, values, layer(), sinks)
        assert found.dtype == torch.bfloat16
        # One rounding of the result.
        torch.testing.assert_close(found.double(), expected.flatten(1), rtol=2**-8, atol=1e-6)


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(1, 4000)), min_size=1, max_size=60))
def test_groups_waste_little_and_hold_everyone_once(sizes):
    pytest.importorskip("sglang")
    from gspo_mega.cpu.sglang_attention import group_by_length

    queries, keys = [q for q, _ in sizes], [q + k for q, k in sizes]
    groups = group_by_length(queries, keys, max_scores=200_000)
    assert sorted(i for group in groups for i in group) == list(range(len(sizes)))
    for group in groups:
        most_queries, most_keys = max(queries[i] for i in group), max(keys[i] for i in group)
        assert len(group) == 1 or len(group) * most_queries * most_keys <= 200_000
        assert all(queries[i] * 2 > most_queries and keys[i] * 2 > most_keys for i in group)


GREEDY = SamplingParams(48, 0.0, 1.0, -1, (EOS_TOKEN_ID,))
PROMPTS = [tuple(3 + (7 * i + j) % 200 for j in range(1 + 5 * i % 61)) for i in range(24)]


def greedy(config, spec, attempt):
    """(token ids, log-probs) of all prompts, sampled together."""
    import asyncio

    async def everything(pool):
        entry = await pool.acquire()
        calls = [
            entry.client.generate(p, GREEDY, request_id=str(i), deadline_seconds=120) for i, p in enumerate(PROMPTS)
        ]
        try:
            return await asyncio.gather(*calls)
        finally:
            await pool.release(entry)

    with ServerPool(config.rollout, spec, attempt) as pool:
        pool.wait_ready(1, 60)
        trust(pool)
        return pool.loop.run(everything(pool))


@pytest.fixture(scope="module")
def stock_servers(dense_model, moe_model, tmp_path_factory):
    """Both models on SGLang's own backend, started side by side."""
    serves = {}
    for name, model in (("dense", dense_model), ("moe", moe_model)):
        folder: Path = tmp_path_factory.mktemp(f"stock_{name}")
        config = run_config(
            folder, model, server={"attention_backend": "torch_native", "start_deadline_seconds": 1200.0}
        )
        serves[name] = (Serve(config, folder / "run", forked=True), config, model)
    try:
        for serve, _, _ in serves.values():
            serve.wait_for("ready")
        yield serves
    finally:
        for serve, _, _ in serves.values():
            serve.stop()


@pytest.mark.parametrize("which", ["dense", "moe"])
def test_whole_servers_agree(request, stock_servers, which):
    server = request.getfixturevalue(f"{which}_server")
    serve, config, model = stock_servers[which]
    assert "attention_backend='cpu_batched'" not in serve.log()
    assert "'attention_backend': 'cpu_batched'" in server.serve.log()
    batched = greedy(server.config, server.spec, server.attempt)
    stock = greedy(load_config(config).config, read_model_spec(model), serve.attempt)
    assert [b.token_ids for b in batched] == [s.token_ids for s in stock]
    for b, s in zip(batched, stock, strict=True):
        torch.testing.assert_close(torch.tensor(b.log_probs), torch.tensor(s.log_probs), rtol=0, atol=1e-5)

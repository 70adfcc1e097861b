"""What a server's GPU holds outside its memory fraction: its CUDA graphs as SGLang reserves memory for them, and the
buffers of its groups with the ranks that send weights.
"""

import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.plan import estimate, plan_run, render_report
from gspo_mega.plan.memory import GIB
from gspo_mega.plan.server_buffers import MIB, decode_sequences, graph_bytes, prefill_sizes, widest_elements

NO_GRAPHS = "server.options={disable_decode_cuda_graph: true, disable_prefill_cuda_graph: true}"
CASES = {
    "one GPU": (["server.tensor=1"], "dense", 80),
    "four ranks": (["server.tensor=4", "rollout.max_concurrent_requests=1024"], "dense", 80),
    "few requests": (["server.tensor=4", "rollout.max_concurrent_requests=24"], "dense", 141),
    "a small GPU": ([], "dense", 24),
    "a large GPU": (["rollout.max_concurrent_requests=2048"], "dense", 180),
    "a small cache": (["server.max_total_tokens=3000"], "dense", 80),
    "groups of the attention": (
        ["server.tensor=4", "server.attention_data=2", "rollout.max_concurrent_requests=1024"],
        "moe",
        80,
    ),
    "options": (["server.options={cuda_graph_max_bs_decode: 16, chunked_prefill_size: 2048}"], "dense", 80),
    "no prefills": (["server.options={disable_prefill_cuda_graph: true}"], "dense", 80),
    "none": ([NO_GRAPHS], "dense", 80),
    "no prefills by name": (["server.options={cuda_graph_backend_prefill: disabled}"], "dense", 80),
}


@pytest.mark.parametrize("case", CASES)
def test_graphs_take_what_sglang_reserves_for_them(load, shape, monkeypatch, case):
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("sglang is not installed")
    from sglang.srt.arg_groups import cuda_graph_hook, memory_hook
    from sglang.srt.model_executor.cuda_graph_config import Backend, default_cuda_graph_config

    overrides, kind, gib = CASES[case]
    config, spec = load("precision=bf16", *overrides).config, read_model_spec(shape(kind))
    server, options = config.server, config.server.options
    graphs = default_cuda_graph_config()
    graphs.decode.backend, graphs.prefill.backend = Backend.FULL, Backend.BREAKABLE
    for phase in ("decode", "prefill"):
        graphs_of = getattr(graphs, phase)
        if options.get(f"disable_{phase}_cuda_graph") or options.get(f"cuda_graph_backend_{phase}") == "disabled":
            graphs_of.backend = Backend.DISABLED
        graphs_of.max_bs = options.get(f"cuda_graph_max_bs_{phase}")
    chunk = options.get("chunked_prefill_size")
    arguments = SimpleNamespace(
        device="cuda",
        cuda_graph_config=graphs,
        chunked_prefill_size=chunk,
        tp_size=server.tensor,
        pp_size=1,
        attn_dp_size=server.attention_data,
        max_running_requests=config.rollout.max_concurrent_requests,
        max_total_tokens=server.max_total_tokens,
        mem_fraction_static=0.8,
        disaggregation_mode="null",
        moe_a2a_backend="none",
        model_path="a-model",
        speculative_algorithm=None,
        disable_cuda_graph_padding=False,
        enable_symm_mem=False,
        _cuda_graph_config_locked=set(),
    )
    for module in (memory_hook, cuda_graph_hook):
        monkeypatch.setattr(module, "resolving_view", lambda record: record)
        monkeypatch.setattr(module, "resolved_view", lambda record: record, raising=False)
    monkeypatch.setattr(memory_hook, "declare_resolution", lambda record, _, **values: vars(record).update(values))
    monkeypatch.setattr(memory_hook, "use_mla_backend", lambda record: False)
    monkeypatch.setattr(memory_hook, "attn_dp_enabled_of", lambda record: record.attn_dp_size > 1)
    monkeypatch.setattr(memory_hook, "get_device_memory_capacity", lambda device: gib * 1024)
    vision = "sglang.srt.arg_groups.model_overrides.qwen3_vl.expand_multimodal_decode_graph_to_running_limit"
    monkeypatch.setattr(vision, lambda *_: None)
    memory_hook.handle_gpu_memory_settings(arguments)
    sizes = prefill_sizes(config.server, spec, gib * GIB)
    captured = arguments.cuda_graph_config
    if captured.decode.backend != Backend.DISABLED:
        assert (
            decode_sequences(config.server, config.rollout.max_concurrent_requests, gib * GIB) == captured.decode.max_bs
        )
    if captured.prefill.backend != Backend.DISABLED:
        share = arguments.chunked_prefill_size // server.attention_data
        captured.prefill.bs = [size for size in captured.prefill.bs if size <= share]  # as `parallel_hook` cuts it
        assert sizes == captured.prefill.bs
    reserved = memory_hook.reserve_for_graph_mb(arguments)
    largest = max([decode_sequences(config.server, config.rollout.max_concurrent_requests, gib * GIB), *sizes])
    inside = largest * widest_elements(server, spec) * 2  # bf16
    assert graph_bytes(config, spec, gib * GIB) == reserved * MIB + inside


def test_what_the_largest_prefill_computes_in_stays_allocated(load, shape):
    """By hand: 8192 tokens, of which one layer keeps its input, the residual and its output, and the widest part."""
    config = load("server.tensor=2", "precision=bf16").config
    sizes = dict(hidden_size=1024, num_attention_heads=16, num_key_value_heads=4, head_dim=64, intermediate_size=4096)
    dense = read_model_spec(shape("dense", **sizes))
    assert (
        prefill_sizes(config.server, dense, 80 * GIB)[-1] == 8192
        and len(prefill_sizes(config.server, dense, 80 * GIB)) == 58
    )
    graphs = 2 * min(256, config.rollout.max_concurrent_requests) + 8 * 58
    assert graph_bytes(config, dense, 80 * GIB) == graphs * MIB + 8192 * (3 * 1024 + 3 * 4096 // 2) * 2
    narrow = read_model_spec(shape("dense", **sizes | dict(intermediate_size=64)))
    attention = 16 // 2 * 2 * 64 + 4 // 2 * 2 * 64
    assert graph_bytes(config, narrow, 80 * GIB) == graphs * MIB + 8192 * (3 * 1024 + attention) * 2


def test_they_are_in_every_turn_of_a_shared_gpu_and_in_the_report(load, shape):
    keys = ["precision=bf16", "cluster.gpu_memory_gib=24", "cluster.colocated=true"]
    found = []
    for more in ([], [NO_GRAPHS]):
        loaded = load(*keys, *more)
        plan = plan_run(loaded, "gpu", shape("dense"))
        figures = estimate(plan, loaded.where)
        found.append(figures)
        line = re.search(
            r"outside server.memory_fraction: 3.0 GiB context and libraries, (.+) CUDA graphs",
            render_report(plan, figures),
        )
        assert line is not None
    with_graphs, without = found
    assert without.servers.memory.graphs == 0 and with_graphs.servers.memory.graphs > 0.1 * GIB
    for phase, size in with_graphs.memory.phases.items():
        assert size - without.memory.phases[phase] == with_graphs.servers.memory.graphs
    assert {"rollout", "publish", "training"} <= with_graphs.memory.phases.keys()


# NCCL's buffers of one connection (init.cc): 8 lines of 512 threads in 8 steps of 16 bytes, 120 elements of 640 threads in
# 8 steps of 8 bytes, and 4 MiB.
CONNECTION = 524_288 + 4_915_200 + 4_194_304
EXPERTS = ["precision=bf16", "cluster={num_nodes: 4, ranks_per_node: 8, gpu: H100}", "parallel={tensor: 8, expert: 32}"]


def test_a_server_has_buffers_for_a_group_with_each_sender_and_a_sender_for_its_groups(load, shape):
    def groups(*overrides):
        loaded = load(*EXPERTS, "server.num_servers=6", *overrides)
        model = shape("moe", num_attention_heads=16, num_key_value_heads=8, num_experts=32)
        figures = estimate(plan_run(loaded, "gpu", model), loaded.where)
        return figures.servers.memory.groups, figures.memory.always["publish groups"]

    assert groups() == (0, 0), "through the disk"
    sent = "publish.method=distributed"
    assert groups(sent) == (8 * 16 * CONNECTION, 16 * CONNECTION)
    assert groups(sent, "publish.max_senders=64") == (32 * 16 * CONNECTION, 16 * CONNECTION), "all 32 expert ranks"
    assert groups(sent, "publish.servers_per_group=2") == (8 * 16 * CONNECTION, 3 * 16 * CONNECTION)


def test_too_little_room_beside_the_memory_fraction_is_said(load, shape):
    def notices(*overrides):
        loaded = load(*EXPERTS, "server.num_servers=6", "publish.method=distributed", *overrides)
        model = shape("moe", num_attention_heads=16, num_key_value_heads=8, num_experts=32)
        return [
            one for one in estimate(plan_run(loaded, "gpu", model), loaded.where).notices if "memory_fraction" in one
        ]

    assert notices() == []
    assert notices("publish.max_senders=32", "server.memory_fraction=0.95")[0].startswith(
        "server.memory_fraction 0.95 leaves"
    )
    assert (
        "GiB publish groups; lower it, or publish.max_senders"
        in notices("publish.max_senders=32", "server.memory_fraction=0.95")[0]
    )


def test_the_plan_says_how_many_ranks_send_and_where_the_limit_has_no_effect(load, shape):
    def told(model: str | Path, *overrides: str):
        loaded = load("precision=bf16", "publish.method=distributed", *overrides)
        plan = plan_run(loaded, "gpu", model)
        figures = estimate(plan, loaded.where)
        return render_report(plan, figures), [one for one in figures.notices if one.startswith("publish.max_senders")]

    experts = shape("moe", num_attention_heads=16, num_key_value_heads=8, num_experts=32)
    text, notices = told(experts, *EXPERTS)
    assert "weights by distributed from 8 ranks for 32 that own tensors (publish.max_senders)" in text and not notices
    text, notices = told(experts, *EXPERTS, "publish.max_senders=32")
    assert "weights by distributed from 32 ranks\n" in text and not notices
    stacks = Path(__file__).parents[3] / "configs/models/gpt_oss_20b.json"
    ranks = [
        "cluster={num_nodes: 2, ranks_per_node: 8, gpu: H100}",
        "parallel={expert: 16}",
        "batch.num_mini_batches=2",
    ]
    text, notices = told(stacks, *ranks, "engine.transformer_engine=false")
    assert "weights by distributed from 16 ranks\n" in text
    assert notices[0].startswith("publish.max_senders 8: all 16 ranks that own tensors of a gpt_oss send")

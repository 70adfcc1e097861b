from dataclasses import replace

import pytest

from gspo_mega.base.errors import PlanError
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.plan import estimate, plan_run, render_report
from gspo_mega.plan.memory import GIB, in_flight, server_memory

BIG = dict(
    hidden_size=1024, intermediate_size=4096, num_hidden_layers=8, vocab_size=32000, max_position_embeddings=65536
)


@pytest.mark.parametrize(
    ("pipeline", "virtual", "stage", "micro_batches", "chunks"),
    # One forward, one backward: a stage is ahead by the stages behind it. Interleaved: two a stage, and a turn a chunk.
    [
        (1, None, 0, 9, 1),
        (4, None, 0, 9, 4),
        (4, None, 3, 9, 1),
        (4, None, 0, 2, 2),
        (4, 2, 0, 9, 11),
        (4, 2, 3, 9, 5),
        (4, 2, 0, 1, 2),
    ],
)
def test_micro_batches_in_flight(load, shape, pipeline, virtual, stage, micro_batches, chunks):
    layout = replace(plan_run(load(), model=shape("dense")).layout, pipeline=pipeline, virtual_pipeline=virtual)
    assert in_flight(layout, stage, micro_batches) == chunks


def figures(load, shape, *overrides, kind="dense"):
    loaded = load("precision=bf16", "cluster.gpu_memory_gib=16", "batch.micro_batch_tokens=16384", *overrides)
    plan = plan_run(loaded, "gpu", shape(kind, **BIG))
    return plan, estimate(plan, loaded.where)


def test_the_verdict_names_peak_phase_and_part(load, shape):
    plan, found = figures(load, shape)
    assert (
        found.fits and found.memory.peak_phase == "training" and found.memory.peak == sum(found.memory.parts.values())
    )
    report = render_report(plan, found)
    assert f"peak {found.memory.peak / GIB:.1f} GiB of 16.0 GiB in training, on stage 0: fits" in report
    assert "formulas, checked on one H100 with two small models" in report
    plan, found = figures(load, shape, "cluster.gpu_memory_gib=8")
    assert not found.fits and "does not fit" in render_report(plan, found)
    assert any("does not fit by estimate" in notice and "most of it activations" in notice for notice in found.notices)


def test_weights_of_earlier_versions_are_shown_as_memory_of_the_host(load, shape):
    """Three kept with K = 2, the present ones among them; none with K = 0, where nothing is older."""
    stale = ("rollout.max_staleness=2", "diagnostics.exact_staleness=true")
    (plain, before), (plan, found) = figures(load, shape), figures(load, shape, *stale)
    size = found.states[0][1]
    assert size.snapshots == 3 * size.weights and before.states[0][1].snapshots == 0
    assert found.memory.peak == before.memory.peak, "none of it is the GPU's"
    assert f"earlier versions on the host: {size.snapshots / GIB:.1f} GiB" in render_report(plan, found)
    assert "on the host:" not in render_report(plain, before)
    assert figures(load, shape, stale[1])[1].states[0][1].snapshots == 0


def test_what_a_node_keeps_on_its_host_is_compared_with_its_memory(load, shape):
    stale = ("rollout.max_staleness=2", "diagnostics.exact_staleness=true", "cluster.ranks_per_node=4")
    plan, found = figures(load, shape, *stale, "cluster.host_memory_gib=64")
    total = 4 * found.states[0][1].snapshots
    assert f"per node, all its ranks, on the host: {total / GIB:.1f} GiB" in render_report(plan, found)
    with pytest.raises(
        PlanError,
        match=(
            r"override 'cluster.host_memory_gib=1': cluster.host_memory_gib: the 4 ranks of a node keep"
            rf" {total / GIB:.1f} GiB in its memory of 1 GiB.* weights of earlier versions {total / 4 / GIB:.1f} GiB"
        ),
    ):
        figures(load, shape, *stale, "cluster.host_memory_gib=1")


def test_state_alone_that_exceeds_the_gpu_is_refused_at_its_place(load, shape):
    with pytest.raises(
        PlanError,
        match=(
            r"override 'cluster.gpu_memory_gib=0.5': cluster.gpu_memory_gib: .* take \d+\.\d GiB of a GPU with 0.5 GiB"
            r" before"
        ),
    ):
        figures(load, shape, "cluster.gpu_memory_gib=0.5")


@pytest.mark.parametrize(
    ("override", "part", "less"),
    [
        ("recompute.granularity=full", "activations", True),
        ("batch.log_prob_chunk_tokens=64", "logits", True),
        ("optimizer.moments_dtype=bf16", "moments", True),
        ("optimizer.cpu_offload_fraction=1", "moments", True),
        ("batch.micro_batch_tokens=32768", "activations", False),
        ("precision=fp8", "FP8 copies", False),
    ],
)
def test_each_setting_moves_its_part(load, shape, override, part, less):
    # The logits are at the peak where the head's moment takes more than a layer's.
    base = ("fp8.recipe=delayed", "batch.log_prob_chunk_tokens=65536") if part == "logits" else ("fp8.recipe=delayed",)
    before, after = (figures(load, shape, *base, *changed)[1].memory for changed in ([], [override]))
    assert (after.parts[part] < before.parts[part]) == less and after.parts[part] != before.parts[part]


def test_the_head_and_a_layer_are_not_at_work_at_the_same_time(load, shape):
    """The training peak is the larger of two moments: more logits take nothing until the head's is the larger one."""

    def parts(chunk):
        memory = figures(load, shape, "recompute.granularity=full", f"batch.log_prob_chunk_tokens={chunk}")[1].memory
        return memory.by_phase["training"]

    small, less, large = parts(64), parts(65), parts(65536)
    assert small == less and small["logits"] == 0 < large["logits"]
    assert large["activations"] < small["activations"] < large["activations"] + large["logits"]


def test_a_reference_is_a_second_set_of_weights(load, shape):
    plan, found = figures(load, shape, "algorithm=grpo", "kl={coefficient: 0.1}")
    memory, without = found.memory, figures(load, shape)[1].memory
    assert memory.parts["reference"] == memory.parts["weights"] > 0 == without.parts["reference"]
    assert memory.exact - without.exact == memory.parts["reference"] and all(
        memory.phases[p] - without.phases[p] == memory.parts["reference"] for p in memory.phases
    )
    assert f"including the frozen reference of the KL term: {memory.parts['reference'] / GIB:.1f} GiB" in render_report(
        plan, found
    )


def test_publish_holds_a_bucket_besides_whole_tensors(load, shape):
    disk = figures(load, shape)[1].memory
    sent = figures(load, shape, "publish={method: distributed, bucket_bytes: 1000000}")[1].memory
    bucket = sent.by_phase["publish"]["publish"] - disk.by_phase["publish"]["publish"]
    assert bucket == 3 * 1_000_000, "one on its way, and the next one's tensors and their bytes in one tensor"
    assert sent.phases["publish"] - disk.phases["publish"] == bucket + sent.always["publish groups"]


def test_a_server_s_gpu(load, shape):
    config = load("precision=bf16", "server={tensor: 2, memory_fraction: 0.5}", "publish.verify=replicas").config
    spec = read_model_spec(shape("dense"))
    memory = server_memory(config, spec, 10_000, 100_000)
    # 3 layers, keys and values, one of two heads of 16, two bytes: 192 bytes a token in what weights leave of half.
    assert memory.weights == 10_000 and memory.cache_tokens == 40_000 // 192 and memory.cache == 40_000 // 192 * 192
    few = load(
        "precision=bf16", "server={tensor: 2, memory_fraction: 0.5, max_total_tokens: 100}", "publish.verify=replicas"
    ).config
    assert server_memory(few, spec, 10_000, 100_000).cache_tokens == 100


def test_without_a_gpu_there_is_no_verdict(load, shape):
    plan = plan_run(load(), model=shape("moe"))
    found = estimate(plan)
    assert found.fits is None and found.memory is None and found.time is None
    report = render_report(plan, found)
    assert "state    per rank: 399 k parameters and gradients" in report and "memory" not in report.split("state")[0]


def test_where_groups_lie(load, shape):
    loaded = load(
        "cluster={num_nodes: 2, ranks_per_node: 4}",
        "parallel={tensor: 2, expert: 8}",
        "precision=bf16",
        "cluster.gpu=H100",
    )
    plan = plan_run(loaded, "gpu", shape("moe"))
    found = estimate(plan)
    assert {(s.name, s.size, s.nodes) for s in found.spans} == {("tensor", 2, 1), ("data", 4, 2), ("expert", 8, 2)}
    assert any("expert groups of 8 ranks span 2 nodes" in notice for notice in found.notices)
    assert "groups inside a node: tensor; data over 2 nodes; expert over 2 nodes" in render_report(plan, found)


@pytest.mark.parametrize(
    ("cluster", "server", "nodes"),
    [
        ("{gpus_per_node: 8, ranks_per_node: 4}", "{num_servers: 4}", None),
        ("{gpus_per_node: 8, ranks_per_node: 4}", "{num_servers: 5}", 1),
        ("{num_nodes: 2, gpus_per_node: 8, ranks_per_node: 8}", "{num_servers: 5, tensor: 4}", 3),
    ],
)
def test_machines_that_servers_need(load, shape, cluster, server, nodes):
    loaded = load(f"cluster={cluster}", f"server={server}", "publish.verify=replicas", "batch.num_mini_batches=1")
    assert estimate(plan_run(loaded, "gpu", shape("dense"))).servers.nodes == nodes

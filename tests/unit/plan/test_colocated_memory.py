"""A GPU that a rank and a server use in turns: its phases in the plan, what goes to the host, and what cannot be."""

import pytest

from gspo_mega.base.errors import PlanError
from gspo_mega.launcher.slurm.size import Site, job_size
from gspo_mega.plan import estimate, plan_run, render_report
from gspo_mega.plan.memory import GIB
from gspo_mega.plan.server_buffers import CONTEXT_BYTES

BIG = dict(hidden_size=1024, intermediate_size=4096, num_hidden_layers=8, vocab_size=32000)
SHARED = "cluster.colocated=true"


def figures(load, shape, *overrides):
    loaded = load("precision=bf16", "cluster.gpu_memory_gib=24", "batch.micro_batch_tokens=1024", *overrides)
    plan = plan_run(loaded, "gpu", shape("dense", **BIG))
    return plan, estimate(plan, loaded.where)


def test_each_phase_has_what_both_sides_hold_in_it(load, shape):
    (_, own), (plan, found) = figures(load, shape), figures(load, shape, SHARED)
    memory, size, server = found.memory, found.states[0][1], found.servers.memory
    kept = CONTEXT_BYTES + server.graphs
    for phase in ("old pass", "training", "optimizer"):
        assert memory.phases[phase] == own.memory.phases[phase] + kept
    away = size.gradients + size.main + size.moments
    assert memory.phases["publish"] == own.memory.phases["publish"] - away + kept + server.weights
    reserve = own.memory.always["reserve"] + size.fp8_copies
    assert memory.phases["rollout"] == reserve + kept + round(24 * GIB * 0.85)
    assert memory.peak_phase == "rollout" and memory.peak == sum(memory.parts.values())
    host = size.weights + size.main + size.moments + server.weights
    assert found.node_host_bytes == host and own.node_host_bytes == 0
    report = render_report(plan, found)
    assert "on 1 of the ranks' own GPUs, in turns (cluster.colocated): sample, publish, train" in report
    assert f"rollout {memory.phases['rollout'] / GIB:.1f} GiB" in report


def test_a_memory_fraction_that_leaves_no_room_does_not_fit(load, shape):
    assert figures(load, shape, SHARED, "server.memory_fraction=0.6")[1].fits
    plan, found = figures(load, shape, SHARED)
    assert not found.fits and "does not fit" in render_report(plan, found)


def test_a_host_too_small_for_what_is_moved_there(load, shape):
    with pytest.raises(PlanError, match=r"in turns on the same GPUs [\d.]+ GiB \(cluster.colocated\)"):
        figures(load, shape, SHARED, "cluster.host_memory_gib=1")


def test_without_gpus_there_is_nothing_to_share(load, shape):
    with pytest.raises(PlanError, match="cluster.colocated: true without GPUs: .*memory saver needs CUDA; .*: false"):
        plan_run(load(SHARED), "cpu", shape("dense"))
    plan_run(load(SHARED), None, shape("dense"))  # a login node does not know


def test_servers_that_need_more_gpus_than_the_ranks_have(load, shape):
    keys = [SHARED, "cluster.ranks_per_node=2", "server.num_servers=3", "server.tensor=1"]
    with pytest.raises(
        PlanError, match="the 3 servers of a node with server.tensor 1 need 3 GPUs, .*have 2; .*at most 2"
    ):
        plan_run(load(*keys), "gpu", shape("dense"))


def test_a_slurm_job_needs_the_gpus_of_its_ranks_alone(load):
    keys = ["cluster.ranks_per_node=4", "cluster.num_nodes=2", "server.num_servers=4", "server.tensor=2"]
    site = Site.read({"GSPO_GPUS_PER_NODE": "4"})
    with pytest.raises(PlanError, match="needs 8 GPUs"):
        job_size(load(*keys), site)
    size = job_size(load(*keys, SHARED), site)
    assert (size.trainer_gpus, size.colocated, size.servers_by_node) == (4, True, ((0, 2), (1, 3)))

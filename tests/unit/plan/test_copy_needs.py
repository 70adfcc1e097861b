"""Copies of ranks' state in memory: what a plan says that they cost, and where it refuses them."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from gspo_mega.base.errors import ConfigError, PlanError
from gspo_mega.plan import estimate, peer_copies, plan_run, render_report
from gspo_mega.plan.memory import GIB
from gspo_mega.plan.report import plan_json

COPIES, TRAIN = "checkpoint.peer_copies=1", "train.num_steps=2"


def test_the_cost_by_hand(load, shape, monkeypatch):
    loaded = load(COPIES, TRAIN, "precision=bf16", "cluster.ranks_per_node=2", "optimizer.distributed=false")
    plan = plan_run(loaded, "gpu", shape("dense"))
    figures = estimate(plan, loaded.where)
    # bf16 weights, fp32 copies and two fp32 moments of every parameter.
    rank = figures.counts.total * (2 + 4 + 4 + 4)
    cost = figures.peer_copies
    assert (cost.rank_bytes, cost.node_bytes) == (rank, 2 * 4 * rank)
    assert cost.pause_seconds == pytest.approx(rank / 5e9)
    assert cost.seconds == pytest.approx(rank * (1 / 5e9 + 1 / 1.5e9 + 2 / 1.1e9))
    without = load(TRAIN, "precision=bf16", "cluster.ranks_per_node=2", "optimizer.distributed=false")
    other = estimate(plan_run(without, "gpu", shape("dense")), without.where)
    assert figures.node_host_bytes - other.node_host_bytes == 8 * rank and other.peer_copies is None
    assert "copies in memory (checkpoint.peer_copies): after each step" in render_report(plan, figures)
    assert json.loads(plan_json(plan, figures))["checkpoint"]["peer_copies"]["rank_bytes"] == rank
    monkeypatch.setattr(peer_copies.shutil, "disk_usage", lambda path: SimpleNamespace(free=rank))
    (notice,) = peer_copies.peer_copy_notices(cost, loaded.config.cluster)
    assert "a step without room has no copy" in notice


def test_a_host_too_small_for_them(load, shape):
    loaded = load(COPIES, TRAIN, "cluster.ranks_per_node=2", "cluster.host_memory_gib=0.01")
    with pytest.raises(PlanError, match=r"copies of the ranks' state [\d.]+ GiB \(checkpoint.peer_copies\)"):
        estimate(plan_run(loaded, "cpu", shape("dense", vocab_size=32000, hidden_size=256)), loaded.where)
    assert GIB == 2**30


def test_standby_processes(load, shape):
    def figures_of(*words):
        loaded = load(TRAIN, "cluster.ranks_per_node=2", *words)
        plan = plan_run(loaded, "cpu", shape("dense"))
        return plan, estimate(plan, loaded.where)

    plan, figures = figures_of("train.standby_processes=true")
    _, without = figures_of()
    # Half a GiB for each of two ranks.
    assert figures.node_host_bytes - without.node_host_bytes == figures.standby_bytes == 2**30
    (line,) = [line for line in render_report(plan, figures).splitlines() if "train.standby_processes" in line]
    assert "2 per node, about 1 GiB of its memory" in line
    assert json.loads(plan_json(plan, figures))["checkpoint"]["standby_bytes"] == 2**30
    with pytest.raises(ConfigError, match=r"train.standby_processes: true with train.max_restarts: 0"):
        figures_of("train.standby_processes=true", "train.max_restarts=0")


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["cluster.ranks_per_node=1"], "1 with one rank, which has no neighbour"),
        (["cluster.colocated=true"], "1 with cluster.colocated: true, whose state is not copied yet"),
        (["optimizer.cpu_offload_fraction=0.5"], "1 with optimizer.cpu_offload_fraction: above 0, whose state is not"),
        (["optimizer.moments_dtype=fp8"], "1 with optimizer.moments_dtype: fp8, whose state is not copied yet"),
        (["precision=fp8", "fp8.parameters=true"], "1 with fp8.parameters: true, whose state is not copied yet"),
    ],
)
def test_refused_by_name_before_anything_starts(load, shape, overrides, text):
    loaded = load(COPIES, TRAIN, "precision=bf16", "cluster.ranks_per_node=2", *overrides)
    with pytest.raises(PlanError, match="checkpoint.peer_copies: " + text.replace(".", r"\.")):
        plan_run(loaded, "gpu", shape("dense", hidden_size=256, intermediate_size=512))


def test_only_training_with_rollouts_has_them(load, shape):
    loaded = load(COPIES, "cluster.ranks_per_node=2")
    with pytest.raises(PlanError, match="only `gspo-mega train` copies and restarts"):
        plan_run(loaded, "cpu", shape("dense"))

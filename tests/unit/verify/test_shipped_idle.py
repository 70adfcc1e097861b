"""The shipped configurations of clusters leave at most a quarter of their GPUs' time idle, by the simulator, or say how
much and why.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from gspo_mega.config import load_config
from gspo_mega.plan import estimate, plan_run
from gspo_mega.plan.state import ModelShares
from gspo_mega.verify.simulate.events import RunEvents
from gspo_mega.verify.simulate.job import job_of

ROOT = Path(__file__).resolve().parents[3]
# On one GPU, or where ranks and servers take turns, no GPU waits for another.
SHIPPED = sorted(
    path.name
    for path in (ROOT / "configs").glob("*.yaml")
    if re.search(r"^  gpu: ", path.read_text(), re.M) and not re.search(r"^  colocated: true", path.read_text(), re.M)
)
STEPS, SKIPPED, MOST = 8, 2, 0.25
_SAID = re.compile(r"^# Idle: (\d+) % of the GPUs' time by `gspo-mega simulate`, because \w", re.M)


def idle_share(name: str) -> float:
    """Of all GPUs' time in steps: what the trainer waits and the servers have no request."""
    loaded = load_config(ROOT / "configs" / name, [], "train")
    plan = plan_run(loaded, None, None)
    figures = estimate(plan, loaded.where)
    job = job_of(plan.config, ModelShares(plan.spec), plan.layout, figures.counts, None, figures.servers.nodes)
    record = RunEvents(replace(job, save_every=0), 1).run(num_steps=STEPS)
    trainer = sum(record.waits[SKIPPED:]) / sum(record.steps[SKIPPED:])
    servers = 1 - record.servers_busy / (job.num_servers * record.elapsed)
    cluster, server = plan.config.cluster, plan.config.server
    ranks, served = cluster.num_nodes * cluster.ranks_per_node, server.num_servers * server.tensor
    return (ranks * trainer + served * servers) / (ranks + served)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_cluster_is_busy_or_says_why_not(name):
    idle = idle_share(name)
    said = _SAID.search((ROOT / "configs" / name).read_text())
    if idle <= MOST:
        assert said is None, f"{idle:.0%} needs no excuse"
    else:
        assert said is not None and abs(float(said[1]) / 100 - idle) < 0.03, f"{idle:.0%}"


def test_all_with_gpus_are_tried():
    assert (
        len(SHIPPED) >= 10
        and {"qwen3_4b_1node.yaml", "qwen3_8b_2nodes.yaml", "qwen3_5_4b_1node.yaml"} <= {*SHIPPED}
        and "qwen3_30b_a3b_8nodes.yaml" in SHIPPED
    )

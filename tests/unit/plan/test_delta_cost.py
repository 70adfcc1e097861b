"""What the plan says of publishes that send only what changed (`publish.full_every`)."""

from __future__ import annotations

import json

import pytest

from gspo_mega.base.errors import PlanError
from gspo_mega.plan import estimate, plan_run, render_report
from gspo_mega.plan.delta import HOST_LINK_BYTES_PER_SECOND, copies_host_bytes, copying_seconds, delta_cost
from gspo_mega.plan.report import plan_json

REAL = dict(
    hidden_size=1024,
    intermediate_size=4096,
    num_hidden_layers=8,
    vocab_size=32000,
    num_attention_heads=8,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=65536,
)
BATCH = ["precision=bf16", "cluster.gpu=H100", "batch={prompts_per_step: 64, group_size: 8, micro_batch_tokens: 8192}"]
STEPS = "train.num_steps=3"
EVERY = "publish.full_every=10"


def test_bytes_and_host_memory_by_hand(load, shape):
    """10^9 parameters in bf16 are 2 GB; 5% changed, with 2 bytes of value and 1 of distance each, are 0.15 GB."""

    def cost(*overrides):
        plan = plan_run(load(*BATCH, STEPS, *overrides), "gpu", shape("dense", **REAL))
        return plan.config, delta_cost(plan.config, plan.spec, plan.layout, 10**9)

    assert cost()[1] is None
    config, found = cost(EVERY)
    assert found is not None and (found.full_bytes, found.num_senders, found.sender_bytes) == (2 * 10**9, 1, 2e9)
    assert found.delta_bytes == pytest.approx(0.15e9) and found.server_bytes == 2 * 10**9
    assert found.mean_bytes == pytest.approx((2e9 + 9 * 0.15e9) / 10)
    assert copies_host_bytes(config.cluster, config.server.num_servers, found) == 4 * 10**9, (
        "the rank's, and that of the server on the same node"
    )
    assert copying_seconds(config.publish.full_every, found, 10**9) == pytest.approx(
        0.9 * 3e9 / HOST_LINK_BYTES_PER_SECOND
    )
    two = cost(EVERY, "cluster.ranks_per_node=2", "parallel.pipeline=2")[1]
    assert two is not None and (two.num_senders, two.sender_bytes) == (2, 1e9)
    one = cost(
        *(EVERY, "cluster.ranks_per_node=2", "parallel.pipeline=2"),
        *("publish.max_senders=1", "publish.method=distributed"),
    )
    assert one[1] is not None and (one[1].num_senders, one[1].sender_bytes) == (1, 2e9)


def test_the_report_says_what_is_sent_and_what_hosts_need(load, shape):
    plan = plan_run(load(*BATCH, STEPS, EVERY, "publish.method=distributed"), "gpu", shape("dense", **REAL))
    figures = estimate(plan)
    text, values = render_report(plan, figures), json.loads(plan_json(plan, figures))["servers"]["delta_publish"]
    assert "one publish in 10 sends all weights, " in text and "if 5% of the values do" in text
    assert "1 rank has a copy of " in text and "in the host's memory for it, and each server of " in text
    assert values["delta_bytes"] == pytest.approx(0.075 * values["full_bytes"])
    plain = estimate(plan_run(load(*BATCH, STEPS, "publish.method=distributed"), "gpu", shape("dense", **REAL)))
    assert figures.node_host_bytes == plain.node_host_bytes + 2 * values["full_bytes"]


def test_a_host_without_room_for_the_copies_is_refused(load, shape):
    def planned(*overrides):
        return estimate(plan_run(load(*BATCH, STEPS, *overrides), "gpu", shape("dense", **REAL)))

    room = (planned().node_host_bytes + planned().node_save_bytes) / 2**30 + 0.01
    planned(f"cluster.host_memory_gib={room}")
    with pytest.raises(PlanError, match=r"copies of what was published \d+\.\d GiB \(publish.full_every\)"):
        planned(EVERY, f"cluster.host_memory_gib={room}")

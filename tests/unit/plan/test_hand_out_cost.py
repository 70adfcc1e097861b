"""What the plan says that a step's data costs, against what is really sent for a batch of the longest lengths."""

from __future__ import annotations

import base64
from types import SimpleNamespace

import numpy as np
import pytest

from gspo_mega.base.episodes import Group, RolloutBatch, one_turn_row
from gspo_mega.base.records import Prompt
from gspo_mega.cli.main import main
from gspo_mega.data.packing import ExpertRoutes
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.plan import resolve_layout
from gspo_mega.plan.timing import HTTP_ROUTE_BYTES, hand_out
from gspo_mega.train import scatter
from gspo_mega.train.batches import assemble, fill_advantages
from gspo_mega.train.scatter import RankLink

LAYOUTS = {
    "one rank": ["cluster.ranks_per_node=1"],
    "DP4": ["cluster.ranks_per_node=4"],
    "PP2": ["cluster.ranks_per_node=4", "parallel.pipeline=2"],
    "TP2-PP2": ["cluster.ranks_per_node=4", "parallel={tensor: 2, pipeline: 2, expert: 2}"],
    "CP2": ["cluster.ranks_per_node=4", "parallel.context=2", "rollout.max_staleness=1"],
}


def full_batch(config, spec, weight_version):
    num_prompt, num_response = config.data.max_prompt_tokens, config.rollout.max_new_tokens
    shape = (num_prompt + num_response - 1, spec.num_layers, spec.moe.experts_per_token)
    routes = np.broadcast_to(np.arange(shape[-1], dtype=np.uint8), shape).copy()
    groups = []
    for number in range(config.batch.prompts_per_step):
        prompt = Prompt(f"p:{number}", "p", (3,) * num_prompt, "")
        rows = [
            one_turn_row(
                f"{number}-{sample}",
                number,
                prompt,
                [4] * num_response,
                [1] * num_response,
                [-0.5] * num_response,
                [weight_version] * num_response,
                "length",
                reward=float(sample),
                routed_experts=routes,
            )
            for sample in range(config.batch.group_size)
        ]
        groups.append(Group.from_rows(number, prompt, rows))
    return RolloutBatch(0, groups)


@pytest.mark.parametrize("layout_name", LAYOUTS)
def test_the_estimate_is_what_leaves_rank_0(load, shape, monkeypatch, layout_name):
    overrides = LAYOUTS[layout_name]
    config = load(
        "data.max_prompt_tokens=100",
        "rollout.max_new_tokens=900",
        "rollout.return_routed_experts=true",
        "batch.micro_batch_tokens=4096",
        *overrides,
    ).config
    spec = read_model_spec(shape("moe", num_hidden_layers=4))
    layout = resolve_layout(config, spec)
    monkeypatch.setattr(scatter, "PendingMessage", lambda *_: SimpleNamespace(wait=lambda: None))
    store = SimpleNamespace(set=lambda *_: None)
    replicas = [layout.ranks_of(data) for data in range(layout.data)]
    sent = []
    for with_routes in (False, True):
        batch = full_batch(config, spec, 6)
        fill_advantages(batch, config, 0)
        shards = assemble(batch, config, layout, 0, weight_version=6 + config.rollout.max_staleness)
        routes = ExpertRoutes.of(batch.trajectories, spec, to_replay=True) if with_routes else None
        wire = scatter.Exchange(store, SimpleNamespace(size=layout.world_size, rank=0, group=None), replicas)
        RankLink(wire, layout, 0).hand_out(shards, routes)
        sent.append(wire.num_sent_bytes)
    cost = hand_out(config, spec, layout)
    assert cost.shards == pytest.approx(sent[0], rel=0.02)
    assert cost.routes.handed_out == pytest.approx(sent[1] - sent[0], rel=0.02)
    given = [row.routed_experts for row in batch.trajectories]
    assert cost.routes.held == sum(one.nbytes for one in given)
    staleness = config.rollout.max_staleness
    assert cost.routes.memory == (1 + staleness) * cost.routes.held
    assert cost.ahead_bytes == (cost.shards + cost.routes.handed_out) * (staleness > 0)
    texts = [len(base64.b64encode(one.astype("<i4").tobytes())) for one in given]
    assert cost.routes.http == pytest.approx(sum(texts), rel=1e-3)


def test_the_large_model_by_hand(load, shape):
    """Qwen3-235B: 512 responses of 16384 tokens, 94 layers, 8 of 128 experts: 6.3e9 numbers."""
    config = load(
        "batch={prompts_per_step: 32, group_size: 16, micro_batch_tokens: 32768}",
        "data.max_prompt_tokens=1",
        "rollout.max_new_tokens=16384",
        "rollout.return_routed_experts=true",
        "cluster.ranks_per_node=8",
        "parallel={tensor: 4, pipeline: 2, expert: 4}",
    ).config
    spec = read_model_spec(
        shape(
            "moe",
            num_hidden_layers=94,
            num_experts_per_tok=8,
            num_experts=128,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=32768,
        )
    )
    cost = hand_out(config, spec, resolve_layout(config, spec))
    numbers = 512 * 16384 * 94 * 8
    assert cost.routes.held == numbers and cost.routes.http == pytest.approx(numbers * HTTP_ROUTE_BYTES, rel=1e-6)
    assert cost.routes.handed_out <= 1.1 * cost.routes.held
    assert cost.routes.receive_seconds + cost.routes.decode_seconds / 15 <= 60


def test_the_plan_shows_it(load, shape, tmp_path, capsys):
    load()
    model = ["--model", str(shape("moe")), "--device", "cpu"]
    overrides = ["cluster.ranks_per_node=2", "rollout.return_routed_experts=true"]
    assert main(["plan", str(tmp_path / "c.yaml"), *overrides, *model]) == 0
    shown = capsys.readouterr().out
    assert "hand-out at most" in shown and "leave rank 0, each data-parallel rank's share once" in shown
    assert "core-seconds elsewhere to decode" in shown and "handed out" in shown
    assert "of rank 0's memory for the batches" in shown and "while a step trains" not in shown
    assert main(["plan", str(tmp_path / "c.yaml"), *overrides, "rollout.max_staleness=1", *model]) == 0
    assert "while a step trains, the next one's hand-out waits in rank 0's memory: at most" in capsys.readouterr().out
    assert main(["plan", str(tmp_path / "c.yaml"), *model]) == 0
    shown = capsys.readouterr().out
    assert "hand-out" not in shown, "one rank hands out nothing"

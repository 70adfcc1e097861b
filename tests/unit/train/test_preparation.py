"""A hand-out that is made ahead is the one that would be made when its step is due, to the bit, or it is not used."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import pytest
from run_configs import smallest_yaml

from gspo_mega.base.episodes import Group, RolloutBatch, one_turn_row
from gspo_mega.base.errors import RewardError
from gspo_mega.base.records import Prompt
from gspo_mega.config import load_config
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.plan import resolve_layout
from gspo_mega.train.rank0 import Prefetch
from gspo_mega.train.scatter import Parcels, encode

SHAPES = Path(__file__).parents[3] / "configs" / "models"


@pytest.fixture
def parts(tmp_path):
    """(config, spec, layout) of a small Mixture of Experts: DP2 x PP2, tokens of two versions, routes replayed."""
    (tmp_path / "c.yaml").write_text(smallest_yaml(prompts_per_step=4))
    raw = json.loads((SHAPES / "quickstart_moe.json").read_text()) | {"num_hidden_layers": 4}
    (tmp_path / "moe.json").write_text(json.dumps(raw))
    config = load_config(
        tmp_path / "c.yaml",
        [
            *("cluster.ranks_per_node=4", "parallel.pipeline=2", "rollout.max_staleness=1"),
            *("rollout.return_routed_experts=true", "moe.routing_replay=R3"),
        ],
    ).config
    spec = read_model_spec(tmp_path / "moe.json")
    return config, spec, resolve_layout(config, spec)


def batch_of(parts, step=1, seed=0, reward=lambda sample: float(sample)) -> RolloutBatch:
    config, spec, _ = parts
    rng, groups = np.random.default_rng(seed), []
    k = spec.moe.experts_per_token
    for number in range(step * 4, step * 4 + 4):
        prompt = Prompt(f"p:{number}", "p", (3,) * 5, "")
        rows = []
        for sample in range(config.batch.group_size):
            num = int(rng.integers(2, 12))
            routes = np.argsort(rng.random((5 + num - 1, spec.num_layers, spec.moe.num_experts)))[..., :k]
            row = one_turn_row(
                f"{number}-{sample}",
                number,
                prompt,
                rng.integers(3, 20, num).tolist(),
                [1] * num,
                (-rng.random(num)).tolist(),
                [step - 1] + [step] * (num - 1),
                "length",
                reward=reward(sample),
                routed_experts=routes.astype(np.uint8),
            )
            rows.append(row)
        groups.append(Group.from_rows(number, prompt, rows))
    return RolloutBatch(step, groups, {"num_trajectories": 8.0}, {"generate": 1.0}, {"reward/mean": 0.25})


def sent(parcels: Parcels) -> list[tuple[list[int] | None, bytes]]:
    """All messages, those to rank 0 alone included, and rank 0's own routes."""
    messages = [(None, encode(one).tobytes()) for one in parcels.shards()]
    messages += [(ranks, encode(one).tobytes()) for ranks, one in parcels.routes()]
    own = [np.asarray(m.routed_experts).tobytes() for mini in parcels.own for m in mini.micro_batches]
    return [*messages, (None, b"".join(own))]


def ready(preparation: Prefetch) -> None:
    for ahead in preparation._prepared.values():
        assert ahead.future is not None
        ahead.future.result(timeout=60)


def test_what_is_made_ahead_is_what_is_made_when_it_is_due(parts):
    due, ahead = Prefetch(*parts), Prefetch(*parts)
    wanted_batch, wanted = due.take(batch_of(parts), 1, 1)
    assert due.ahead_seconds == 0
    batch = batch_of(parts)
    ahead.expect(0, 0)
    ahead.begin(1, batch.groups)
    ready(ahead)
    got_batch, got = ahead.take(batch, 1, 1)
    assert ahead.ahead_seconds > 0
    assert got_batch.counts is batch.counts and got_batch.phase_seconds is batch.phase_seconds
    assert got_batch.sampled is batch.sampled and wanted_batch.sampled == batch.sampled
    assert got.num_positions == wanted.num_positions
    assert [one.advantage for one in got_batch.trajectories] == [one.advantage for one in wanted_batch.trajectories]
    wanted_messages = sent(wanted)
    assert len(wanted_messages) == 2 + 4 + 1 and sent(got) == wanted_messages
    ahead.take(batch_of(parts, step=2), 2, 2)
    assert ahead.ahead_seconds == 0, "of the hand-out that was taken last"


def test_a_later_step_may_begin_before_one_is_taken(parts):
    """With groups of several steps complete, the next one is told as soon as the pool has given this one away."""
    preparation, batches = Prefetch(*parts), {step: batch_of(parts, step) for step in (1, 2)}
    for step, batch in batches.items():
        preparation.begin(step, batch.groups)
    ready(preparation)
    for step, batch in batches.items():
        _, got = preparation.take(batch, step, step)
        assert preparation.ahead_seconds > 0
        assert sent(got) == sent(Prefetch(*parts).take(batch_of(parts, step), step, step)[1])
    assert not preparation._prepared


@pytest.mark.parametrize("change", ["other groups", "one episode redrawn", "fewer groups", "another version", "step"])
def test_it_is_made_anew_for_any_other_batch(parts, change):
    batch, seen, step, version = batch_of(parts), batch_of(parts).groups, 1, 1
    if change == "one episode redrawn":
        seen = [Group(one.group_id, one.prompt, list(one.episodes)) for one in batch.groups]
        seen[2].episodes[1] = batch_of(parts, seed=1).groups[2].episodes[1]
    elif change == "fewer groups":
        seen = batch.groups[:-1]
    elif change in ("another version", "step"):
        seen = batch.groups
        version, step = (2, 1) if change == "another version" else (2, 2)
    preparation = Prefetch(*parts)
    preparation.begin(1, seen)
    ready(preparation)
    _, got = preparation.take(batch, step, version)
    assert preparation.ahead_seconds == 0
    assert sent(got) == sent(Prefetch(*parts).take(batch_of(parts), step, version)[1])


def test_other_groups_take_the_place_of_what_was_begun(parts, monkeypatch):
    """In order of completion a group that is dropped can bring another one into the next batch."""
    going_on, make = threading.Event(), Parcels.encode_all
    monkeypatch.setattr(Parcels, "encode_all", lambda self, is_wanted: going_on.wait(60) and make(self, is_wanted))
    preparation, first, second = Prefetch(*parts), batch_of(parts), batch_of(parts, seed=1)
    preparation.begin(1, first.groups)
    dropped = preparation._prepared[1]
    preparation.begin(1, second.groups)
    going_on.set()
    ready(preparation)
    assert dropped.future is not None and dropped.future.result(timeout=60) is None and dropped.seconds == 0, (
        "it ended early"
    )
    _, got = preparation.take(second, 1, 1)
    assert preparation.ahead_seconds > 0
    assert sent(got) == sent(Prefetch(*parts).take(batch_of(parts, seed=1), 1, 1)[1])


def test_its_error_is_raised_when_the_step_is_due(parts):
    batch = batch_of(parts, reward=lambda sample: None)
    preparation = Prefetch(*parts)
    preparation.begin(1, batch.groups)
    with pytest.raises(RewardError, match="step 2: no group of its rollout batch has two rewards"):
        preparation.take(batch, 1, 1)


def test_after_its_end_nothing_is_begun(parts):
    preparation, threads = Prefetch(*parts), threading.active_count()
    preparation.begin(1, batch_of(parts).groups)
    preparation.close()
    preparation.begin(2, batch_of(parts, step=2).groups)
    assert not preparation._prepared and threading.active_count() <= threads

"""The recorded batch holds what it promises, for any sizes; its packings keep every trajectory."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_mega.config import load_config
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.plan import resolve_layout
from gspo_mega.train.batches import assemble, plan_batch
from gspo_mega.verify.certify.batch import Draws, old_log_probs, recorded_batch, redraw, set_old_log_probs
from gspo_mega.verify.certify.measure import packing

VOCAB = 500


def config_of(*overrides):
    return load_config("configs/certify_dense.yaml", overrides, "certify").config


def sizes(prompts, group, new_tokens, prompt_tokens=24):
    return config_of(
        f"batch.prompts_per_step={prompts}",
        f"batch.group_size={group}",
        f"rollout.max_new_tokens={new_tokens}",
        f"data.max_prompt_tokens={prompt_tokens}",
        "batch.micro_batch_tokens=4096",
    )


@settings(max_examples=25, deadline=None)
@given(st.integers(3, 9), st.integers(2, 8), st.integers(8, 200))
def test_it_holds_every_awkward_shape(prompts, group, new_tokens):
    batch = recorded_batch(sizes(prompts, group, new_tokens), VOCAB)
    trajectories = batch.trajectories
    lengths = [t.num_response_tokens for t in trajectories]
    assert (min(lengths), max(lengths)) == (1, new_tokens)
    assert max(t.num_tokens for t in trajectories) == 24 + new_tokens, "a longest response has a longest prompt"
    assert sum(not any(t.response_mask) for t in trajectories) == 1
    assert any(0 < sum(t.response_mask) < len(t.response_mask) for t in trajectories)
    assert {np.sign(t.advantage) for t in trajectories} >= {-1.0, 1.0}
    if group >= 4:
        assert len({len(g.trajectories) for g in batch.groups}) == 3
    assert all(0 <= token < VOCAB for t in trajectories for token in [*t.prompt.token_ids, *t.response_token_ids])


def test_it_is_a_function_of_the_configuration():
    one, two = (recorded_batch(config_of(), VOCAB) for _ in range(2))
    assert [t.response_token_ids for t in one.trajectories] == [t.response_token_ids for t in two.trajectories]
    other = recorded_batch(config_of("run.seed=2"), VOCAB)
    assert [t.response_token_ids for t in one.trajectories] != [t.response_token_ids for t in other.trajectories]


@pytest.mark.parametrize("on_edges", [False, True])
def test_recorded_log_probs_give_the_ratios_they_are_meant_to_give(on_edges):
    config = config_of()
    batch = recorded_batch(config, VOCAB)
    rng = np.random.default_rng(0)
    current = [rng.normal(-4, 1, t.num_response_tokens) for t in batch.trajectories]
    recorded = old_log_probs(batch, current, config.objective, config.run, on_edges)
    set_old_log_probs(batch, np.concatenate(recorded))
    high, low = np.log1p(0.05), np.log1p(-0.04)
    sides = []
    for trajectory, now in zip(batch.trajectories, current, strict=True):
        active = np.array(trajectory.response_mask, bool)
        if active.any():
            log_s = (now - np.array(trajectory.rollout_log_probs))[active].mean()
            edge_distance = min(abs(log_s - high), abs(log_s - low))
            # Recorded in float32, whose spacing at -4 is 5e-7.
            assert edge_distance < 1e-6 if on_edges else edge_distance > 1e-5
            sides.append("above" if log_s > high + 1e-5 else "below" if log_s < low - 1e-5 else "inside")
    if not on_edges:
        assert {sides.count(side) > 4 for side in ("above", "below", "inside")} == {True}


def test_unwanted_tokens_are_drawn_anew_and_nothing_else():
    config = config_of()
    draws = Draws.first(config)
    before = recorded_batch(config, VOCAB, draws)
    marks = [np.zeros(t.num_tokens - 1, bool) for t in before.trajectories]
    assert not redraw(before, marks, draws), "nothing to draw"
    place = next(i for i, t in enumerate(before.trajectories) if t.num_response_tokens > 5)
    marks[place][-1] = True  # in the response
    first_of_last_group = len(marks) - len(before.groups[-1].trajectories)
    marks[first_of_last_group][0] = True  # in the prompt
    assert redraw(before, marks, draws)
    after = recorded_batch(config, VOCAB, draws)
    for i, (old, new) in enumerate(zip(before.trajectories, after.trajectories, strict=True)):
        assert (old.response_token_ids == new.response_token_ids) == (i != place)
        assert (old.prompt.token_ids == new.prompt.token_ids) == (old.group_id != before.groups[-1].group_id)
        assert old.advantage == new.advantage and old.response_mask == new.response_mask


@pytest.mark.parametrize("kind", ["planned", "shuffled", "one_pack", "one_each", "uneven"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_packing_keeps_every_trajectory_once(kind, ranks):
    config = config_of(f"cluster.ranks_per_node={ranks}", "batch.num_mini_batches=1")
    layout = resolve_layout(config, read_model_spec("configs/models/certify_dense.json"))
    batch = recorded_batch(config, VOCAB)
    count = len(batch.trajectories)
    plans = packing(kind, count, config.run.seed, layout, plan_batch(batch, config, layout, 0))
    shards = assemble(batch, config, layout, 0, plans)
    assert len(shards) == ranks
    rows = [
        r for (mini_batch,) in shards for m in mini_batch.micro_batches for r in m.trajectory_index.tolist() if r >= 0
    ]
    assert sorted(rows) == list(range(count))
    assert len({len(mini_batch.micro_batches) for (mini_batch,) in shards}) == 1, (
        "equally many micro-batches on every rank"
    )
    if kind == "one_pack":
        assert {len(mini_batch.micro_batches) for (mini_batch,) in shards} == {1}
    if kind == "one_each":
        assert all(m.num_sequences == 1 for (mini_batch,) in shards for m in mini_batch.micro_batches)
    if kind == "uneven" and ranks > 1:
        held = [sum((m.trajectory_index >= 0).sum() for m in mini_batch.micro_batches) for (mini_batch,) in shards]
        assert max(held) > 1.5 * min(held)

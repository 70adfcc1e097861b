"""The positions that a plan counts if packs share prefixes: by hand, against the packer, and in what they cost."""

import json
from dataclasses import replace
from itertools import product

import pytest

from gspo_mega.base.episodes import Group, RolloutBatch, one_turn_row
from gspo_mega.base.records import Prompt
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.models.tensors import count_parameters, forward_flops_per_token, layer_flops
from gspo_mega.plan import estimate, plan_run, render_report
from gspo_mega.plan.gpus import GPUS, MATRIX_SHARE
from gspo_mega.plan.report import plan_json
from gspo_mega.plan.sharing import Positions, step_positions
from gspo_mega.plan.state import ModelShares
from gspo_mega.plan.timing import hand_out, train_time
from gspo_mega.train.batches import assemble, fill_advantages
from gspo_mega.verify.simulate.job import constant, job_of
from gspo_mega.verify.simulate.outcome import MeasuredStep, fit

# Planned lengths are half the most: prompts of 4 tokens, responses of 3.
LENGTHS = ("data.max_prompt_tokens=8", "rollout.max_new_tokens=6", "precision=fp32")
ON = "batch.share_prefixes=prompts"


def planned(load, shape, *overrides, **layout):
    plan = plan_run(load(*LENGTHS, *overrides), "cpu", shape("dense"))
    return step_positions(plan.config, replace(plan.layout, **layout))


def batch(prompts, group_size, mini_batches, budget):
    return (
        f"batch={{prompts_per_step: {prompts}, group_size: {group_size}, num_mini_batches: {mini_batches},"
        f" micro_batch_tokens: {budget}, share_prefixes: prompts}}"
    )


def test_positions_and_pairs_by_hand(load, shape):
    step = planned(load, shape, batch(8, 4, 1, 4096))
    # A row of 7 tokens has 1 + 2 + ... + 7 = 28 pairs. A group's prompt has 4 tokens and 1 + 2 + 3 + 4 = 10 pairs; each
    # response has 3, which attend to 5, 6 and 7 positions.
    assert step.rows == Positions(8 * 4 * 7, 8 * 4 * 28)
    assert step.computed == step.least == Positions(8 * (4 + 4 * 3), 8 * (10 + 4 * 18))
    assert step.num_repeated == 0 and step.num_trained == 8 * 4 * 3
    assert step.shared_fraction == pytest.approx(1 - 16 / 28)
    assert step.rows.as_long_as == 7, "the mean of 1 to 7 is 4, as in a sequence of 7"


def test_a_pack_that_cuts_a_group_repeats_its_prompt(load, shape):
    # A pack of 11 tokens has room for the prompt and 2 responses of 3: a group of 5 is in 3 packs.
    step = planned(load, shape, batch(8, 5, 2, 16), pack_multiple_tokens=11)
    assert step.num_repeated == 8 * 2
    assert step.computed.tokens == 8 * (3 * 4 + 5 * 3) and step.least.tokens == 8 * (4 + 5 * 3)
    assert step.computed.pairs == step.least.pairs + 8 * 2 * 10


def test_ranks_cut_a_group_that_they_share(load, shape):
    step = planned(load, shape, batch(8, 4, 8, 4096), data=2)
    assert step.num_repeated == 8, "a mini-batch has one group, and each rank computes its prompt"
    assert planned(load, shape, batch(8, 4, 4, 4096), data=2).num_repeated == 0


def test_whole_rows_compute_all(load, shape):
    step = planned(load, shape)
    assert step.computed == step.rows and step.least.tokens < step.rows.tokens and step.shared_fraction == 0


def recorded(prompts, group_size):
    groups = []
    for g in range(prompts):
        prompt = Prompt(f"p:{g}", "p", (1, 2, 3, 4 + g), "")
        rows = [
            one_turn_row(
                trajectory_id=f"{g}:{k}",
                group_id=g,
                prompt=prompt,
                response_token_ids=[40 + k, 3, 9],
                response_mask=[1] * 3,
                rollout_log_probs=[-1.0] * 3,
                weight_versions=[0] * 3,
                finish_reason="length",
                reward=float(k % 2),
            )
            for k in range(group_size)
        ]
        groups.append(Group.from_rows(g, prompt, rows))
    return RolloutBatch(0, groups)


@pytest.mark.parametrize("data", [1, 2, 3, 4])
def test_the_packer_computes_as_many(load, shape, data):
    """Over groups, mini-batches and room: exactly on one or two ranks, and nearly always on more."""
    counted = []
    for prompts, group_size, minis, budget in product((3, 4, 7), (2, 5, 8), (1, 2, 3), (14, 16, 19, 28, 200)):
        plan = plan_run(load(*LENGTHS, batch(prompts, group_size, minis, budget)), "cpu", shape("dense"))
        layout = replace(plan.layout, data=data)
        rows = recorded(prompts, group_size)
        fill_advantages(rows, plan.config, 0)
        shards = assemble(rows, plan.config, layout, 0)
        packs = [pack for shard in shards for mini in shard for pack in mini.micro_batches]
        real = sum(pack.num_computed for pack in packs if (pack.trajectory_index >= 0).any())
        counted.append(step_positions(plan.config, layout).computed.tokens / real)
    # On three or four ranks two parts of a group may meet in one pack, which then has the prompt once.
    assert sum(share != 1 for share in counted) <= (10 if data > 2 else 0) < len(counted)
    assert min(counted) > 0.85 and max(counted) < 1.15


def test_flops_of_layers_are_those_of_a_token_without_the_head(shape):
    spec = read_model_spec(shape("dense", tie_word_embeddings=False))
    head = 2 * spec.vocab_size * spec.hidden_size
    assert layer_flops(spec, 10, 55) == pytest.approx(10 * (forward_flops_per_token(spec, 10) - head))


def test_the_report_says_what_is_computed_and_the_ideal(load, shape):
    loaded = load(*LENGTHS, batch(8, 4, 8, 4096))
    plan = plan_run(loaded, "cpu", shape("dense"))
    step, spec = step_positions(plan.config, plan.layout), plan.spec
    reached, ideal = step.fewer_flops(spec)
    assert ideal == layer_flops(spec, 224, 896) / layer_flops(spec, 128, 656) == reached
    text = " ".join(render_report(plan).split())
    assert "of 224 positions of a step's rows 128 are computed, each prompt once: 42.9% fewer" in text
    assert f"{ideal:.2f} times fewer FLOPs, at best {ideal:.2f} (prompts and responses of half their most" in text
    assert json.loads(plan_json(plan, estimate(plan)))["positions"]["computed"] == {"tokens": 128, "pairs": 656}


def test_a_run_that_could_share_is_told_what_it_would_save(load, shape):
    def said(*overrides, device="cpu", model=None):
        plan = plan_run(load(*LENGTHS, *overrides), device, model or shape("dense"))
        return [line for line in render_report(plan).splitlines() if "share_prefixes" in line]

    (line,) = said("batch.group_size=4")
    assert "batch.share_prefixes off: with `prompts`, of 224 positions" in line and "128 are computed" in line
    assert said(device=None) == [line]
    assert "with `prompts`, which has not yet run on a GPU, of 224 positions" in said(device="gpu")[0]
    assert not said("batch.num_mini_batches=9"), "a mini-batch has whole groups, and there are 8"
    assert said(model="configs/models/certify_olmo3.json") and not said("engine.batch_invariant=true"), "refused with"
    assert not said("rollout.max_new_tokens=200"), "less than a tenth"
    on = said(ON)
    assert len(on) == 1 and on[0].endswith("share_prefixes prompts: a pack computes the prompt of a group once")


@pytest.mark.parametrize("more", [(), ("algorithm=grpo", "kl={coefficient: 0.1}")])
def test_every_pass_takes_the_time_of_what_it_computes(load, shape, more):
    """Long prompts, so that no layer is too short to fill a GPU: the layers' time is that of their FLOPs."""
    sizes = "batch={prompts_per_step: 64, group_size: 8, num_mini_batches: 4, micro_batch_tokens: 200000"
    given = ("data.max_prompt_tokens=4000", "rollout.max_new_tokens=2000", "precision=fp32", *more)
    long = dict(max_position_embeddings=8192, num_hidden_layers=4, hidden_size=1024, intermediate_size=4096)
    plans = {}
    for mode in ("off", "prompts"):
        own = load(*given, sizes + f", share_prefixes: {mode}}}")
        plan = plan_run(own, "cpu", shape("dense", **long))
        plans[mode] = plan, train_time(plan.config, plan.layout, ModelShares(plan.spec), GPUS["H100"])
    (whole, off), (shared, on) = plans.values()
    step = step_positions(shared.config, shared.layout)
    assert step.num_repeated == 0
    tokens = step.rows.tokens / step.computed.tokens
    assert tokens == pytest.approx(8 * 3000 / (2000 + 8 * 1000))
    attention = {}
    for name, one in (("off", step.rows), ("on", step.computed)):
        # 3 passes of 4 layers with 4 heads of 16 + 16 numbers, 2 FLOPs each, for every pair.
        attention[name] = 3 * 4 * 2 * one.pairs * 4 * 32 / (GPUS["H100"].bf16_flops * MATRIX_SHARE["fp32"])
    assert attention["off"] / attention["on"] == pytest.approx(8 * 3000 * 3001 / (2000 * 2001 + 8 * 1000 * 5001))
    linear = off.training["layers"] - attention["off"], on.training["layers"] - attention["on"]
    assert linear[0] / linear[1] == pytest.approx(tokens)
    assert on.training["head"] == pytest.approx(off.training["head"]), "as many tokens are trained"
    passes = 2 if more else 1
    layers, head = on.training["layers"] / 3, on.training["head"] / 4
    assert on.old_pass == pytest.approx(passes * (layers + head)), "the old policy and the reference share too"
    assert (
        hand_out(shared.config, shared.spec, shared.layout).shards
        >= hand_out(whole.config, whole.spec, whole.layout).shards
    )


def test_a_simulated_step_trains_what_is_computed(load, shape):
    jobs = {}
    for mode in ("off", "prompts"):
        loaded = load(*LENGTHS, f"batch.share_prefixes={mode}", "batch.group_size=4", "batch.num_mini_batches=1")
        plan = plan_run(loaded, "cpu", shape("dense"))
        jobs[mode] = job_of(plan.config, ModelShares(plan.spec), plan.layout, count_parameters(plan.spec), constant(3))
    step = step_positions(plan.config, plan.layout)
    off, on = jobs["off"], jobs["prompts"]
    assert off.shared_tokens == 0 and on.shared_tokens == step.rows.tokens - step.computed.tokens == 8 * 3 * 4
    computed = step.computed.tokens
    assert on.mean_train == pytest.approx(on.train_fixed + on.train_token * computed)
    # Two more sampled tokens are computed, whatever is shared.
    assert on.train_seconds(step.rows.tokens + 2) - on.mean_train == pytest.approx(2 * on.train_token)
    assert on.mean_train <= off.mean_train

    # A run without sharing that took 2 s to train: with it, the part that is computed takes as long per position.
    fitted, factors = fit(on, MeasuredStep(rollout=1.0, training=2.0, publish=0.0))
    assert fitted.train_seconds(step.rows.tokens + step.rows.tokens - computed) == pytest.approx(2.0, rel=1e-6)
    assert fitted.mean_train == pytest.approx(on.mean_train * factors.train)
    assert fitted.mean_train < 2.0
    same, _ = fit(on, MeasuredStep(1.0, 2.0, 0.0, step.shared_fraction))
    assert same.mean_train == pytest.approx(2.0, rel=1e-6)

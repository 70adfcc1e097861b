"""What must not be called good although the reward rises."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from gspo_mega.report.run_record import RunRecord
from gspo_mega.report.verdicts import verdicts_of

STEPS = 40
SETTINGS = {
    "algorithm": "gspo",
    "batch.prompts_per_step": 32,
    "mismatch.budget": 0.5,
    "mismatch.correction": "mask",
    "objective.clip_low": 3e-4,
    "objective.clip_high": 4e-4,
    "optimizer.clip_grad": 1.0,
    "optimizer.lr": 1e-6,
}
HEALTHY = {
    "reward/mean": 0.3,
    "groups/num_groups": 32.0,
    "groups/constant_fraction": 0.2,
    "rollout/num_groups_missing": 0.0,
    "policy/kept_fraction": 0.98,
    "policy/clip_fraction": 0.15,
    "policy/token_clip_fraction": 0.15,
    "policy/entropy": 0.6,
    "policy/k3": 1e-4,
    "mismatch/k3": 6e-4,
    "mismatch/budget_share": 0.2,
    "optimizer/grad_norm": 0.8,
    "response/length_mean": 300.0,
    "response/truncated_fraction": 0.0,
}


def lines(settings=None, **changed):
    """The verdicts of a run that learns; `changed`: (first value, last value) or a value of all steps, by metric."""
    chance = random.Random(3)
    run = RunRecord(Path("/runs/one"), "one", "train", steps=list(range(1, STEPS + 1)))
    run.settings = SETTINGS | (settings or {})
    values = HEALTHY | {"reward/mean": (0.3, 0.7)} | {name.replace("__", "/"): value for name, value in changed.items()}
    for name, value in values.items():
        first, last = value if isinstance(value, tuple) else (value, value)
        # By a constant factor per step, as what runs away does.
        ratio = (last / first) ** (1 / (STEPS - 1)) if first > 0 and last > 0 else 1.0
        run.series[name] = [first * ratio**step * chance.uniform(0.98, 1.02) for step in range(STEPS)]
    found = {verdict.topic: verdict for verdict in verdicts_of(run)}
    return found, found["What to look at"]


def test_a_healthy_run_has_nothing_that_stands_out():
    found, look = lines()
    assert found["Learning"].level == "good" and look.text == "nothing stands out", found
    assert lines(policy__entropy=(0.6, 0.15), optimizer__grad_norm=(0.05, 0.9), response__length_mean=(300, 800))[1].level == (
        "good"
    ), "as in runs that learn"  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "topic", "said"),
    [
        (
            dict(rollout__num_groups_missing=29.0, groups__num_groups=3.0, rollout__num_groups_filtered=93.0),
            "Groups",
            "of 32 are missing from a step",
        ),
        (dict(rollout__num_groups_missing=8.0), "Groups", "could be scored"),
        (dict(groups__constant_fraction=0.97, groups__trained_constant_fraction=0.0), "Signal", "have one reward"),
        (dict(policy__kept_fraction=0.4), "Correction", "mismatch.correction mask drops 60% of the responses"),
        (dict(optimizer__grad_norm=(1.0, 500.0)), "Gradient norm", "at the start"),
        (dict(optimizer__grad_norm=0.0), "Gradient norm", "nothing is learnt"),
        (dict(policy__entropy=(1.0, 0.01)), "Entropy", "at the start"),
        (dict(policy__entropy=(0.5, 6.0)), "Entropy", "degenerates"),
        (dict(policy__k3=(1e-4, 0.3)), "Size of updates", "lower optimizer.lr"),
        (dict(mismatch__k3=(6e-4, 1e-2)), "Growth of the mismatch", "gspo-mega mismatch"),
        (dict(mismatch__k3=0.18), "Size of the mismatch", "k3 is 0.18 nats per token"),
        (dict(response__length_mean=(300.0, 12.0)), "Response length", "Trajectories"),
        (dict(rollout__num_servers_given_up=1.0), "Servers given up", "not started again"),
        (dict(critic__num_skipped=1.0), "Critic's gradients", "non-finite"),
        (dict(optimizer__lr=0.0), "Learning rate", "nothing is learnt"),
        (dict(optimizer__lr=(1e-6, 1e-12)), "Learning rate", "nothing is learnt"),
        (dict(optimizer__grad_norm=1e4), "Clipped gradients", "clipping leaves 1"),
        (dict(policy__entropy=1e-4), "Entropy", "below 0.001"),
        (dict(policy__entropy=11.0), "Entropy", "above 7"),
        (dict(policy__k3=1.0), "Size of updates", "above 0.1"),
        (dict(policy__kl_reference=50.0), "Distance to the reference", "above 5"),
        (dict(policy__kl_reference=(1e-3, 0.9)), "Distance to the reference", "at the start"),
        (dict(policy__ess=0.05), "Weights of sequences", "below 0.5"),
        (dict(critic__explained_variance=-3.0), "Critic's error", "worse than the mean"),
        (dict(rollout__num_request_failures=128.0, rollout__num_turns=256.0), "Requests to servers", "logs"),
        (
            dict(rollout__num_response_faults=100.0, rollout__num_trajectories=256.0),
            "Responses that cannot be scored",
            "count as 0",
        ),
    ],
)
def test_what_stands_out(changed, topic, said):
    found, look = lines(**changed)
    assert found["Learning"].level == "good", "although the reward rises"
    assert found[topic].level == "warning" and said in found[topic].text, found[topic]
    assert look.level == "warning" and found[topic].metric in look.text


def test_a_schedule_that_ends_at_0_does_not_stand_out():
    assert lines(optimizer__lr=(1e-6, 1e-8))[1].text == "nothing stands out"


def test_a_held_out_accuracy_that_rose_and_fell_stands_out_although_the_reward_rises():
    run = RunRecord(Path("/runs/one"), "one", "train", steps=list(range(5)))
    run.series = {"eval/accuracy": [0.3, 0.5, 0.7, 0.5, 0.35], "eval/accuracy_standard_error": [0.02] * 5}
    found = {verdict.topic: verdict for verdict in verdicts_of(run)}
    assert found["Held-out accuracy"].level == "note" or found["Held-out accuracy"].level == "good"
    assert "0.700 ± 0.020 at step 2" in found["Held-out accuracy since its best"].text
    run.series["eval/accuracy"] = [0.3, 0.5, 0.62, 0.6, 0.58]
    assert "Held-out accuracy since its best" not in {verdict.topic for verdict in verdicts_of(run)}


def test_a_single_spike_of_the_norm_is_no_drift():
    run = RunRecord(Path("/runs/one"), "one", "train", steps=list(range(STEPS)))
    run.series = {"optimizer/grad_norm": [1.0] * (STEPS - 1) + [900.0]}
    assert "Gradient norm" not in {verdict.topic for verdict in verdicts_of(run)}


@pytest.mark.parametrize("algorithm", ["grpo", "dapo", "cispo", "dppo", "gmpo", "sapo", "vespo"])
def test_a_large_mismatch_is_named_whatever_the_algorithm_clips(algorithm):
    """k3 .18, which is a share of the range of GSPO in each of these that a sequence's mean would not show."""
    _, look = lines({"algorithm": algorithm}, mismatch__k3=0.18, mismatch__budget_share=0.3)
    assert look.level == "warning" and "mismatch/k3" in look.text


@pytest.mark.parametrize("algorithm", ["sapo", "vespo"])
def test_what_clips_nothing_is_not_said_to_have_a_range_that_hardly_acts(algorithm):
    found, _ = lines({"algorithm": algorithm}, policy__clip_fraction=0.0, policy__token_clip_fraction=0.0)
    assert found["Clipping"].text.startswith(f"{algorithm} clips nothing") and "range" not in found["Clipping"].text
    assert found["Mismatch of trainer and servers"].level == "note"


def test_where_tokens_are_clipped_a_thousandth_is_usual():
    found, _ = lines({"algorithm": "grpo"}, policy__clip_fraction=8e-4, policy__token_clip_fraction=8e-4)
    assert "hardly acts" not in found["Clipping"].text and "0.13% of tokens" in found["Clipping"].text

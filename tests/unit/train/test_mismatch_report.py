"""The split of the engine gap by length and sign of A, and the warnings that name a cause."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from run_configs import make_config

from gspo_mega.algorithm.correction import MAXIMUM_NAMES, mismatch_sums
from gspo_mega.config.clip_range import band_of
from gspo_mega.metrics.catalogue import find_metric
from gspo_mega.metrics.tables import LENGTH_BINS, rows_by_length
from gspo_mega.train.mismatch_report import WARN_AGAIN_STEPS, GapRows, gap_metrics, gap_warnings

FILE = Path("run/config.resolved.yaml")
# Mean d and length of five responses, and A. The default clip range is 3e-4 / 4e-4.
MEANS = np.array([5e-4, -5e-4, 1e-4, -1e-4, -2e-3])
LENGTHS = np.array([10, 63, 64, 300, 20_000])
WIDTH = math.log(1 + 4e-4) - math.log(1 - 3e-4)
ADVANTAGES = np.array([1.0, -1.0, -1.0, 1.0, -2.0])


def band(config):
    return band_of(config.algorithm, config.objective)


BAND = band(make_config())


def columns(means=MEANS, lengths=LENGTHS):
    parts = []
    for mean, length in zip(means, lengths, strict=True):
        d = torch.full((int(length),), mean, dtype=torch.float64)
        ids = torch.zeros(len(d), dtype=torch.int64)
        parts.append(mismatch_sums(d - 1, torch.full_like(d, -1.0), torch.ones_like(d), ids, 1))
    return {
        "mismatch_sums": torch.cat([sums for sums, _ in parts]).numpy(),
        "mismatch_maxima": torch.cat([maxima for _, maxima in parts]).numpy(),
    }


def gap_of(rows=None, weights=None, stale=None, advantages=ADVANTAGES):
    count = len(MEANS)
    train = {} if weights is None else {"correction_weight": np.array(weights)}
    return GapRows.measured(
        columns(),
        train,
        np.ones(count, bool) if rows is None else np.array(rows, bool),
        advantages,
        np.zeros(count, bool) if stale is None else np.array(stale, bool),
    )


def test_the_bins_are_fixed_and_each_length_is_in_one():
    assert {name: int(name.split("-")[0]) for name in LENGTH_BINS} == LENGTH_BINS
    lengths = np.array([0, 1, 63, 64, 255, 256, 1023, 1024, 4095, 4096, 16383, 16384, 10**7])
    found = rows_by_length(lengths)
    assert {name: lengths[rows].tolist() for name, rows in found.items()} == {
        "1-63": [1, 63],
        "64-255": [64, 255],
        "256-1023": [256, 1023],
        "1024-4095": [1024, 4095],
        "4096-16383": [4096, 16383],
        "16384-up": [16384, 10**7],
    }
    assert list(rows_by_length(np.array([5, 70]))) == ["1-63", "64-255"]


def test_the_split_by_hand():
    metrics = gap_metrics(BAND, gap_of(weights=[1.0, 0.0, 1.0, 1.0, 0.0]))
    assert all(find_metric(name) for name in metrics)
    short = {name: metrics[f"mismatch/length/1-63/{name}"] for name in ("num_sequences", "log_s_mean", "log_s_sd")}
    assert short == pytest.approx({"num_sequences": 2, "log_s_mean": 0.0, "log_s_sd": 5e-4}, abs=1e-15)
    assert metrics["mismatch/length/1-63/k3"] == pytest.approx(5e-4**2 / 2, rel=1e-3)
    assert metrics["mismatch/length/1-63/budget_share"] == pytest.approx(5e-4 / WIDTH)
    assert metrics["mismatch/length/1-63/kept_fraction"] == 0.5
    # A > 0 above 4e-4, and A < 0 below -3e-4.
    assert metrics["mismatch/length/1-63/clip_fraction"] == 1.0
    assert metrics["mismatch/length/64-255/clip_fraction"] == 0.0
    assert metrics["mismatch/advantage/positive/clip_fraction"] == 0.5
    assert metrics["mismatch/advantage/negative/clip_fraction"] == pytest.approx(2 / 3)
    assert metrics["mismatch/advantage/negative/kept_fraction"] == pytest.approx(1 / 3)
    assert metrics["mismatch/advantage/negative/log_s_mean"] == pytest.approx(-2.4e-3 / 3)
    tokens = 63 * 5e-4**2 + 64 * 1e-4**2 + 20_000 * 2e-3**2
    assert metrics["mismatch/advantage/negative/k3"] == pytest.approx(tokens / 20_127 / 2, rel=2e-3)
    assert metrics["mismatch/budget_share"] == pytest.approx(3.2e-3 / 5 / WIDTH)
    assert not any("1024-4095" in name for name in metrics)


def test_without_a_correction_or_a_clip_range_those_numbers_are_absent():
    metrics = gap_metrics(None, gap_of())
    assert "mismatch/length/1-63/k3" in metrics
    assert not any(name.endswith(("/clip_fraction", "/kept_fraction", "/budget_share")) for name in metrics)
    assert not any(
        name.endswith("/kept_fraction") for name in gap_metrics(band(make_config(algorithm="grpo")), gap_of())
    )


def test_only_what_was_measured_before_an_update_counts():
    metrics = gap_metrics(BAND, gap_of(rows=[1, 0, 1, 0, 0]))
    assert metrics["mismatch/advantage/positive/num_sequences"] == 1
    assert metrics["mismatch/k1"] == pytest.approx(-(10 * 5e-4 + 64 * 1e-4) / 74)
    assert len(MAXIMUM_NAMES) == gap_of().maxima.shape[1]


def warnings(config, gap, summary, step, **more):
    metrics = gap_metrics(band(config), gap) | more
    return gap_warnings(config, FILE, gap, metrics, summary, step)


def test_a_passed_budget_is_said_once_and_then_rarely():
    config, summary = make_config(), {}
    (line,) = warnings(config, gap_of(), summary, 1)
    assert line.startswith("notice   the engines' log-probs differ by 0.91 of the clip range before any update")
    assert "old_log_probs: trainer keeps this out of the ratio." in line
    assert "the mean |log s| is 0.91 widths of the clip range; mismatch.budget is 0.5; k3" in line
    assert "`gspo-mega mismatch run/config.resolved.yaml`" in line
    assert "One step does not show its cause." in line
    assert [
        bool(warnings(config, gap_of(), summary, step)) for step in (2, WARN_AGAIN_STEPS, WARN_AGAIN_STEPS + 1)
    ] == [
        False,
        False,
        True,
    ]
    assert warnings(make_config(mismatch=dict(budget=0.95)), gap_of(), {}, 1) == []


def test_a_passed_budget_is_a_warning_where_it_moves_the_update_or_no_precision_explains_it():
    (line,) = warnings(make_config(old_log_probs="rollout"), gap_of(), {}, 1)
    assert line.startswith("warning  the engines' log-probs differ by 0.91") and "keeps this out" not in line
    for k3, word in ((0.019, "notice   "), (0.021, "warning  ")):
        (line,) = warnings(make_config(), gap_of(), {}, 1, **{"mismatch/k3": k3})
        assert line.startswith(word)


@pytest.mark.parametrize(
    ("sections", "stale", "more", "said"),
    [
        ({}, [1, 1, 1, 1, 1], {}, "Staleness is part of it: all responses were sampled with older weights."),
        (
            {},
            [1, 1, 0, 0, 1],
            {},
            "The cause is staleness: 0.14 for responses of the current weights, 1.43 for the 60%",
        ),
        ({}, [0, 0, 1, 1, 0], {}, "The cause is the engines, with staleness on top: 1.43 for responses"),
        ({}, None, {"routing/changed_since_rollout": 0.04}, "Routing is part of it: 4.00% of (token, layer) pairs"),
        ({}, None, {"routing/changed_since_rollout": 1e-4}, "Routing is part of it: 0.01% of (token, layer) pairs"),
        (
            dict(moe=dict(routing_replay="R3"), rollout=dict(return_routed_experts=True)),
            None,
            {},
            "Routing is not: R3 replays the server's.",
        ),
        (
            dict(precision="bf16", server=dict(quantization="fp8_block", kv_cache="fp8")),
            None,
            {},
            "The trainer computes in bf16, the server in bf16, fp8_block, fp8.",
        ),
    ],
)
def test_a_cause_is_named_where_a_step_can_tell(sections, stale, more, said):
    config = make_config(**sections)
    (line,) = warnings(config, gap_of(stale=stale), {}, 1, **more)
    assert said in line and "does not show its cause" not in line


def test_routes_that_next_to_never_change_are_no_cause():
    (line,) = warnings(make_config(), gap_of(), {}, 1, **{"routing/changed_since_rollout": 1e-6})
    assert "Routing" not in line and "does not show its cause" in line


def test_the_budget_command_is_given_the_weights_that_the_run_has_now():
    config, metrics = make_config(), gap_metrics(BAND, gap_of())
    (line,) = gap_warnings(config, FILE, gap_of(), metrics, {}, 1, Path("run/hf_steps/step_00000020"))
    assert line.endswith(
        "`gspo-mega mismatch run/config.resolved.yaml model.path=run/hf_steps/step_00000020` measures each cause separately"
    )
    (line,) = gap_warnings(config, FILE, gap_of(), metrics, {}, 1)
    assert line.endswith("measures each cause separately, with the weights of the run's start")


def test_server_log_probs_as_old_ones_that_clip_nothing_are_not_warned_of():
    config = make_config(old_log_probs="rollout", mismatch=dict(budget=100.0))
    share = "policy/mini_batch/0/clip_fraction_"
    assert warnings(config, gap_of(), {}, 1, **{f"{share}negative": 0.0, f"{share}positive": 0.0}) == []
    summary = {}
    assert warnings(config, gap_of(), summary, 1, **{f"{share}negative": 0.0}) == []
    assert len(warnings(config, gap_of(), summary, 2, **{f"{share}negative": 0.0, f"{share}positive": 0.1})) == 1


def test_server_log_probs_as_old_ones_say_what_they_clip_with_no_update():
    config, summary = make_config(old_log_probs="rollout", mismatch=dict(budget=100.0)), {}
    measured = {"policy/mini_batch/0/clip_fraction_negative": 0.81, "policy/mini_batch/0/clip_fraction_positive": 0.02}
    (line,) = warnings(config, gap_of(), summary, 1, **measured)
    assert line.startswith(
        "warning  old_log_probs: rollout clips 0.81 of the responses with A < 0 and 0.02 of those with A > 0 with no"
        " update at all (clip range 0.0003 / 0.0004)"
    )
    assert warnings(config, gap_of(), summary, 50, **measured) == []
    assert len(warnings(config, gap_of(), summary, 1 + WARN_AGAIN_STEPS, **measured)) == 1
    # A step without any A < 0 measured nothing, so it says nothing yet.
    assert warnings(config, gap_of(), {}, 1) == []
    grpo = make_config(algorithm="grpo", old_log_probs="rollout", mismatch=dict(budget=100.0))
    # 1 of 10 tokens clipped in one response and none of 1000 in another are .05, not 1 of 1010.
    said = "clips 0.81 of a response's tokens, in the mean over responses, with A < 0"
    assert said in warnings(grpo, gap_of(), {}, 1, **measured)[0]


def test_a_correction_that_drops_much_says_so():
    config = make_config(mismatch=dict(budget=100.0))
    gap = gap_of(weights=[1.0, 0.0, 1.0, 1.0, 0.0])
    (line,) = warnings(config, gap, {}, 1, **{"policy/kept_fraction": 0.6})
    assert line.startswith("warning  mismatch.correction mask dropped 0.40 of the responses")
    assert warnings(config, gap, {}, 1, **{"policy/kept_fraction": 0.95}) == []


def test_of_nothing():
    empty = gap_of(rows=[0] * 5)
    metrics = gap_metrics(BAND, empty)
    assert metrics["mismatch/budget_share"] == 0.0 and all(math.isfinite(value) for value in metrics.values())


def test_a_difference_that_a_batch_invariant_engine_must_not_have_is_named():
    on = make_config(engine=dict(batch_invariant=True), mismatch=dict(budget=100.0))
    (line,) = warnings(on, gap_of(stale=[0, 0, 1, 1, 1]), {}, 1)
    assert line.startswith(
        "warning  engine.batch_invariant: 2 of 2 responses that these weights sampled have log-probs that are not the"
        " servers' to the last bit; the largest difference is 5.0e-04 nats"
    )
    assert warnings(on, gap_of(stale=[1] * 5), {}, 1) == []
    off = make_config(mismatch=dict(budget=100.0))
    assert warnings(off, gap_of(), {}, 1) == []

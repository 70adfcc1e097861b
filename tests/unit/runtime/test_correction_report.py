"""Whether the mismatch correction acted is measured, and that it never did is said once."""

import math

import pytest
import torch
from run_configs import make_config

from gspo_mega.algorithm.mismatch import acted_on, sequence_mismatch_weights
from gspo_mega.config.schema import Mismatch
from gspo_mega.runtime.correction_report import (
    NOTICE_AFTER_STEPS,
    correction_metrics,
    correction_notice,
    note_correction,
)

# Log ratios of sequences at known mismatch: weights .984 to 1.007, and one of 1000 tokens with one 20 nats off.
ORDINARY = torch.tensor([math.log(0.984), 0.0, math.log(1.007), -20 / 1000], dtype=torch.float64)


@pytest.fixture
def config():
    def make(old_log_probs="trainer", **mismatch):
        return make_config(mismatch=Mismatch(**mismatch), old_log_probs=old_log_probs)

    return make


@pytest.mark.parametrize("mode", ["none", "truncate", "mask"])
@pytest.mark.parametrize("cap", [1.001, 1.5, 2.0])
def test_it_acted_where_the_bound_changed_a_weight(mode, cap):
    log_ratio = torch.linspace(-1, 1, 401, dtype=torch.float64)
    weights, keep = sequence_mismatch_weights(log_ratio, mode, cap)
    changed = (
        ~keep | ((weights - log_ratio.exp()).abs() > 1e-12) if mode != "none" else torch.zeros(401, dtype=torch.bool)
    )
    assert torch.equal(acted_on(log_ratio, mode, cap), changed)


def test_the_metrics_of_a_step(config):
    found = correction_metrics(config(), ORDINARY)
    assert found == {"mismatch/acted_fraction": 0.0, "mismatch/log_weight_abs_max": pytest.approx(0.02)}
    assert correction_metrics(config(cap=1.005), ORDINARY)["mismatch/acted_fraction"] == 0.25
    assert correction_metrics(config(cap=1.005, correction="mask"), ORDINARY)["mismatch/acted_fraction"] == 0.75
    assert (
        correction_metrics(config(correction="none"), ORDINARY)
        == correction_metrics(config(old_log_probs="rollout"), ORDINARY)
        == {}
    )


def run(config, num_steps, *ratios):
    summary, said = {}, []
    for step in range(num_steps):
        note_correction(summary, correction_metrics(config, ratios[min(step, len(ratios) - 1)]))
        said.append(correction_notice(config.mismatch, summary))
    return summary, said


def test_that_it_never_acted_is_said_once_a_run(config):
    summary, said = run(config(), NOTICE_AFTER_STEPS + 5, ORDINARY)
    assert [step for step, line in enumerate(said, 1) if line] == [NOTICE_AFTER_STEPS]
    (line,) = filter(None, said)
    assert (
        line
        == "notice   mismatch.correction truncate has not acted in 100 steps: no weight reached the cap 2; all weights"
        " were between 0.980199 and 1.0202"
    )
    assert correction_notice(config().mismatch, summary, at_end=True) is None


def test_a_shorter_run_says_it_at_its_end(config):
    summary, said = run(config(correction="mask"), 3, ORDINARY)
    assert said == [None] * 3
    assert "mask has not acted in 3 steps: no sequence was dropped by the cap 2" in correction_notice(
        config(correction="mask").mismatch, summary, at_end=True
    )


def test_nothing_is_said_of_one_that_acted_or_is_off(config):
    summary, said = run(config(), NOTICE_AFTER_STEPS, ORDINARY, torch.tensor([1.0], dtype=torch.float64), ORDINARY)
    assert not any(said) and correction_notice(config().mismatch, summary, at_end=True) is None
    summary, said = run(config(correction="none"), NOTICE_AFTER_STEPS, ORDINARY)
    assert summary == {} and not any(said) and correction_notice(config().mismatch, summary, at_end=True) is None

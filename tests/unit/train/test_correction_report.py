"""Whether the mismatch correction acted is measured, and that it never did is said once."""

import numpy as np
import pytest
from run_configs import make_config

from gspo_mega.train.mismatch_report import NOTICE_AFTER_STEPS, correction_metrics, correction_notice, record_correction

# Four responses within 0.13 of the centre; then one beyond the bound, and one that two tokens vetoed.
ORDINARY = dict(weights=[1.0] * 4, deviations=[0.1, -0.13, 0.0, 0.05], vetoes=[0, 0, 0, 0])
ACTED = dict(weights=[1.0, 0.0, 1.0, 0.0], deviations=[0.1, -0.7, 0.0, 0.3], vetoes=[0, 0, 0, 2])


@pytest.fixture
def config():
    def make(old_log_probs="trainer", **mismatch):
        return make_config(mismatch=mismatch, old_log_probs=old_log_probs)

    return make


def metrics_of(config, values, present=(True,) * 4):
    columns = {f"correction_{name[:-1]}": np.array(column, float) for name, column in values.items()}
    columns["correction_vetoes"] = columns.pop("correction_vetoe")
    columns["correction_centre"] = np.full(4, -1e-3)
    return correction_metrics(config.mismatch, config.old_log_probs, columns, np.array(present))


def test_the_metrics_of_a_step(config):
    assert metrics_of(config(), ORDINARY) == {
        "mismatch/acted_fraction": 0.0,
        "mismatch/weight_mean": 1.0,
        "mismatch/centre": -1e-3,
        "mismatch/deviation_abs_max": 0.13,
        "mismatch/num_token_vetoes": 0.0,
        "mismatch/num_vetoed_sequences": 0.0,
    }
    found = metrics_of(config(), ACTED)
    assert found["mismatch/acted_fraction"] == 0.5 and found["mismatch/deviation_abs_max"] == 0.7
    assert found["mismatch/num_token_vetoes"] == 2 and found["mismatch/num_vetoed_sequences"] == 1
    # Rows without an active token are in nothing.
    assert metrics_of(config(), ACTED, (True, False, True, False))["mismatch/acted_fraction"] == 0.0
    cut = ACTED | dict(weights=[1.01, 0.9, 1.0, 1.02])
    truncated = metrics_of(config(correction="truncate", bound_nats=0.2), cut)
    assert truncated["mismatch/acted_fraction"] == 0.25, "a weight is cut above only"
    assert truncated["mismatch/weight_mean"] == pytest.approx(0.9825)


def test_there_are_none_without_a_correction(config):
    assert metrics_of(config(correction="none"), ACTED) == metrics_of(config(old_log_probs="rollout"), ACTED) == {}


def run(config, num_steps, *steps):
    summary, said = {}, []
    for step in range(num_steps):
        record_correction(summary, metrics_of(config, steps[min(step, len(steps) - 1)]))
        said.append(correction_notice(config.mismatch, summary))
    return summary, said


def test_that_it_never_acted_is_said_once_a_run(config):
    summary, said = run(config(), NOTICE_AFTER_STEPS + 5, ORDINARY)
    assert [step for step, line in enumerate(said, 1) if line] == [NOTICE_AFTER_STEPS]
    (line,) = filter(None, said)
    assert (
        line == "notice   mismatch.correction mask has not acted in 100 steps: no response was dropped; the furthest"
        " response deviated by 0.13 nats, mismatch.bound_nats is 0.5"
    )
    assert correction_notice(config().mismatch, summary, at_end=True) is None


def test_a_shorter_run_says_it_at_its_end(config):
    summary, said = run(config(correction="truncate"), 3, ORDINARY)
    assert said == [None] * 3
    line = correction_notice(config(correction="truncate").mismatch, summary, at_end=True)
    assert "truncate has not acted in 3 steps: no weight was cut; the furthest" in line


def test_nothing_is_said_of_one_that_acted_or_is_off(config):
    summary, said = run(config(), NOTICE_AFTER_STEPS, ORDINARY, ACTED, ORDINARY)
    assert not any(said) and correction_notice(config().mismatch, summary, at_end=True) is None
    summary, said = run(config(correction="none"), NOTICE_AFTER_STEPS, ORDINARY)
    assert summary == {} and not any(said) and correction_notice(config().mismatch, summary, at_end=True) is None

"""The progress line, the final table, and phases that account for the step's time."""

from __future__ import annotations

import pytest

from gspo_mega.metrics import writer
from gspo_mega.metrics.catalogue import find_metric
from gspo_mega.metrics.reductions import PhaseTimer
from gspo_mega.metrics.tables import PHASES
from gspo_mega.metrics.writer import final_table, progress_line


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_phases_and_other_add_up_to_the_step():
    clock = Clock()
    timer = PhaseTimer(clock)
    clock.now += 1
    with timer.phase("rollout"):
        clock.now += 2
        with timer.phase("publish"):
            clock.now += 4
        clock.now += 8
    with pytest.raises(KeyError), timer.phase("train"):
        clock.now += 16
        raise KeyError
    with timer.phase("train"):
        clock.now += 32
    clock.now += 64
    seconds = timer.finish_step()
    assert seconds == {
        "time/step_seconds": 127,
        "time/rollout_seconds": 10,
        "time/publish_seconds": 4,
        "time/train_seconds": 48,
        "time/other_seconds": 65,
    }
    assert sum(seconds.values()) == 2 * seconds["time/step_seconds"]
    assert all(find_metric(name) for name in seconds)
    clock.now += 3
    assert timer.finish_step() == {"time/step_seconds": 3, "time/other_seconds": 3}


def test_start_step_forgets_what_went_before():
    clock = Clock()
    timer = PhaseTimer(clock)
    with timer.phase("checkpoint"):
        clock.now += 5
    clock.now += 5
    timer.start_step()
    with timer.phase("train"):
        clock.now += 2
    assert timer.finish_step() == {"time/step_seconds": 2, "time/train_seconds": 2, "time/other_seconds": 0}


def test_phases_have_names_and_end():
    timer = PhaseTimer()
    for name in ("trian", "other"):
        with pytest.raises(ValueError, match="valid: rollout, "), timer.phase(name):
            pass
    with pytest.raises(RuntimeError, match="inside a phase"), timer.phase("train"):
        timer.finish_step()
    with pytest.raises(RuntimeError, match="inside a phase"), timer.phase("train"):
        timer.start_step()


def test_progress_line_shows_what_there_is():
    line = progress_line(
        7,
        {
            "reward/mean": 0.4567,
            "policy/clip_fraction": 0.16,
            "mismatch/k3": 1.2e-7,
            "time/step_seconds": 4.25,
            "time/rollout_seconds": 3.0,
            "time/publish_seconds": 0.01,
            "rollout/num_retries": 2,
            "rollout/num_episode_failures": 3,
            "rollout/num_reward_failures": 0,
        },
        num_steps=100,
    )
    assert (
        line
        == "step   7/100  reward 0.457  clip 0.160  mismatch k3 1.2e-07  4.2 s (rollout 3.0)  retries: 2  episode failures: 3"
    )
    assert progress_line(9, {"eval/accuracy": 0.5, "eval/measured_step": 6}) == "step 9  accuracy of step 6 0.500"
    assert progress_line(3, {"reward/mean": float("nan")}) == "step 3  reward nan"


def test_the_console_reads_only_metrics_that_exist():
    for _, name, *_ in (*writer._PROGRESS, *writer._FAILURES):
        find_metric(name)
    assert set(writer._PHASE_ORDER) <= set(PHASES)


def test_final_table_is_aligned():
    table = final_table(
        [("accuracy", "0.30 +- 0.02", "0.61 +- 0.02"), ("steps", "0", "100")], headers=("", "before", "after")
    )
    assert table.splitlines() == [
        "                before         after",
        "--------  ------------  ------------",
        "accuracy  0.30 +- 0.02  0.61 +- 0.02",
        "steps                0           100",
    ]
    with pytest.raises(ValueError, match="different width"):
        final_table([("a", "b"), ("c",)])

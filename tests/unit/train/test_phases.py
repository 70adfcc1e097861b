"""A step's phases count its time, name its sign of life and reach its kill points, each at its moment."""

from __future__ import annotations

import pytest

from gspo_mega.base import failpoints, progress
from gspo_mega.train.phases import Phases


@pytest.fixture
def reached(tmp_path):
    failpoints.arm(f"record={tmp_path / 'points'}", 0)
    yield lambda: (tmp_path / "points").read_text().split() if (tmp_path / "points").exists() else []
    failpoints.arm(None, 0)


def test_the_moments_of_a_step(reached):
    phases = Phases()
    with phases.phase("rollout"):
        pass
    assert list(phases.each_in_phase("old_log_probs", range(2))) == [0, 1]
    for _ in phases.each_in_phase("train", range(2)):
        assert progress.current()[0] == "train"
    assert reached() == [
        "rollout.batch",
        *["step.old_pass"] * 2,
        *["step.optimizer"] * 2,
        "step.trained",
    ]
    with phases.phase("publish"):
        pass
    with phases.phase("report"):
        assert reached()[-1] == "step.published"
    with phases.phase("write"):
        seconds = phases.timer.finish_step()
        assert reached()[-1] == "step.published"
    assert reached()[-1] == "step.written"
    assert {"time/train_seconds", "time/report_seconds"} <= seconds.keys() and "time/write_seconds" not in seconds


def test_every_moment_of_a_step_has_its_phase(reached):
    phases = Phases()
    for name in ("rollout", "assemble", "old_log_probs", "train", "publish", "report", "write", "checkpoint"):
        for _ in phases.each_in_phase(name, [0]):
            pass
    of_a_step = {point for point in failpoints.MOMENTS if point.startswith("step.")} | {"rollout.batch"}
    assert set(reached()) == of_a_step


def test_a_phase_that_fails_is_not_at_its_end(reached):
    phases = Phases()
    with pytest.raises(ArithmeticError):
        for _ in phases.each_in_phase("train", range(2)):
            raise ArithmeticError
    with pytest.raises(ArithmeticError), phases.phase("write"):
        raise ArithmeticError
    assert reached() == []


def test_an_unknown_phase_is_refused():
    with pytest.raises(ValueError, match="phase 'lunch'"), Phases().phase("lunch"):
        pass

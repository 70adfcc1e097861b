"""The bounds of the watchdog: derived from what the phases themselves may take, or as the configuration says."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo_mega.config import load_config
from gspo_mega.config.derived import teacher_folders
from gspo_mega.plan import plan_run, render_report
from gspo_mega.plan.estimate import estimate
from gspo_mega.plan.watchdog_bounds import patience

CONFIGS = Path(__file__).parents[3] / "configs"
QUICKSTART = CONFIGS / "quickstart.yaml"


def bounds(*overrides):
    return patience(load_config(QUICKSTART, list(overrides)).config)


def test_a_phase_with_deadlines_of_its_own_lets_them_speak_first():
    found = bounds(
        "rollout.max_attempts=8",
        "rollout.progress_deadline_seconds=200",
        "rollout.no_server_deadline_seconds=400",
        "publish.deadline_seconds=1000",
    )
    assert found.bound("rollout") > 8 * 200 + 400 and found.bound("eval") == found.bound("rollout")
    assert found.bound("publish") > 1000
    assert (
        found.bound("old_log_probs") == found.bound("train") == 900
        and found.bound("assemble") == found.bound("anything") == 900
    )


def test_an_agent_has_its_own_time_before_a_run_is_stuck():
    agent = (
        "rollout.episode=my.agents:play",
        "episodes={max_tokens: 512, deadline_seconds: 9000}",
        "data.chat_template=true",
    )
    short, long = (bounds(*agent, f"episodes.turn_deadline_seconds={seconds}") for seconds in (60, 7200))
    for phase in ("rollout", "eval"):
        assert long.bound(phase) - short.bound(phase) == 7140 and long.bound(phase) > 7200


def test_the_configuration_has_the_last_word_and_may_switch_it_off():
    found = bounds("watchdog.train_seconds=7", "watchdog.silence_seconds=11")
    assert (found.bound("train"), found.silence, found.key("old_log_probs")) == (7, 11, "watchdog.train_seconds")
    assert bounds("watchdog.enabled=false") is None


@pytest.mark.parametrize("num_ranks, seconds", [(2, 5.0), (512, 10.24)])
def test_many_ranks_write_less_often(num_ranks, seconds):
    assert bounds().interval(num_ranks) == pytest.approx(seconds)


def test_tight_bounds_are_looked_at_often():
    assert bounds("watchdog.train_seconds=1").interval(2) == pytest.approx(0.1)


@pytest.mark.parametrize("file", sorted(path.name for path in CONFIGS.glob("*.yaml")))
def test_no_phase_is_given_up_within_what_the_plan_expects_of_it(file):
    loaded = load_config(CONFIGS / file)
    read = [loaded.config.model.path, *teacher_folders(loaded.config.teacher)]
    is_here = all(Path(path).exists() for path in read)  # what the quickstart has made, if it has run
    stand_in = CONFIGS / "models" / ("quickstart_wide.json" if "fp8" in file else "quickstart_moe.json")
    plan = plan_run(loaded, model=None if is_here else stand_in)
    figures = estimate(plan)
    found = patience(loaded.config, figures)
    if figures.time is not None:
        assert found.bound("train") >= figures.time.train.total and found.bound("publish") >= figures.time.publish
    assert found.bound("checkpoint") >= figures.save_seconds
    assert "after which a rank counts as stuck" in render_report(plan, figures)

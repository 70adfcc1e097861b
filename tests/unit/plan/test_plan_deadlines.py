"""Deadlines that the plan's own estimates exceed are refused; those of the shipped configurations hold."""

from pathlib import Path

import pytest

from gspo_mega.base.errors import PlanError
from gspo_mega.config import load_config
from gspo_mega.plan import estimate, plan_run
from gspo_mega.plan.estimate import LEAST_SIGNAL_SECONDS, grace_seconds, signal_seconds
from gspo_mega.plan.validate import validate_deadlines

ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "configs"
LARGEST = CONFIGS / "qwen3_235b_a22b_32nodes.yaml"
REAL = [path for path in sorted(CONFIGS.glob("*.yaml")) if "  gpu: " in path.read_text()]


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


def refused(*overrides):
    loaded = load_config(LARGEST, overrides)
    with pytest.raises(PlanError) as caught:
        estimate(plan_run(loaded, "gpu"), loaded.where)
    return str(caught.value)


def test_a_total_deadline_that_the_rollout_exceeds():
    text = refused("rollout.request_deadline_seconds=600")
    assert text.startswith(
        "override 'rollout.request_deadline_seconds=600': rollout.request_deadline_seconds: 600 s is shorter than a"
        " rollout (1153 s by estimate): "
    )
    assert text.endswith("Set it above 1153, or leave it out")
    estimate(plan_run(load_config(LARGEST, ["rollout.request_deadline_seconds=1300"]), "gpu"))


def test_a_publish_that_takes_longer_than_it_may():
    text = refused("publish.deadline_seconds=2", "rollout.request_deadline_seconds=600")
    first, second = text.splitlines()
    assert first.startswith("override 'rollout.request")
    assert (
        second.startswith(
            "override 'publish.deadline_seconds=2': publish.deadline_seconds: 2 s is shorter than a publish ("
        )
        and "by estimate). Set it above " in second
    )
    replay = load_config(LARGEST, ["publish.deadline_seconds=2", "train={num_steps: 1, from_rollouts: x}"])
    estimate(plan_run(replay, "gpu"))  # which publishes nothing


def test_a_save_that_ranks_do_not_wait_for():
    loaded = load_config(LARGEST)
    time = estimate(plan_run(loaded, "gpu")).time
    with pytest.raises(
        PlanError,
        match=(
            r"qwen3_235b_a22b_32nodes.yaml:\d+:\d+: checkpoint: a save takes 1800 s by estimate, and ranks wait at"
            r" most 1800 s"
        ),
    ):
        validate_deadlines(loaded.config, time, 1800.0, loaded.where)
    validate_deadlines(loaded.config, time, 1799.0, loaded.where)


def test_a_watchdog_that_does_not_wait_for_a_save():
    text = refused("watchdog.checkpoint_seconds=300")
    assert text.startswith(
        "override 'watchdog.checkpoint_seconds=300': watchdog.checkpoint_seconds: 300 s is shorter than a save (329 s"
        " by estimate). Set it above 329, or"
    )
    estimate(plan_run(load_config(LARGEST, ["watchdog.checkpoint_seconds=330"]), "gpu"))


def test_without_a_gpu_by_name_there_is_no_estimate_to_refuse_by():
    loaded = load_config(
        LARGEST, ["rollout.request_deadline_seconds=121", "cluster.gpu=null", "cluster.gpu_memory_gib=80"]
    )
    assert estimate(plan_run(loaded, "gpu")).time is None


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_shipped_deadlines_hold(path):
    """Those between keys hold since the file loads; the signal that a job asks for leaves time for its stop."""
    loaded = load_config(path, (), "train")
    figures = estimate(plan_run(loaded, "gpu"), loaded.where)
    assert figures.save_seconds < figures.stop_seconds < grace_seconds(signal_seconds(figures.stop_seconds))


def test_the_signal_comes_early_enough_and_in_whole_minutes():
    assert signal_seconds(0.0) == signal_seconds(200.0) == LEAST_SIGNAL_SECONDS
    assert signal_seconds(329.1) == 480 and signal_seconds(1000.0) == 1320
    for stop in (1.0, 100.0, 329.1, 5000.0):
        assert grace_seconds(signal_seconds(stop)) >= 1.25 * stop


def test_a_stop_waits_for_training_and_publish_and_save():
    loaded = load_config(LARGEST)
    figures = estimate(plan_run(loaded, "gpu"))
    assert figures.stop_seconds == pytest.approx(figures.save_seconds + figures.time.total - figures.time.rollout)

"""How long the ranks of one machine have to stop: never shorter than the plan expects a stop to take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gspo_mega.config import load_config
from gspo_mega.launcher import local as module
from gspo_mega.plan.estimate import estimate

REPOSITORY = Path(__file__).parents[3]


class Noted:
    """In the supervisor's place: starts nothing."""

    grace: list[float] = []

    def __init__(self, attempt, specs, say, stop_grace_seconds, *others) -> None:
        self.grace.append(stop_grace_seconds)

    def run(self) -> int:
        return 0


@pytest.mark.parametrize(("stop_seconds", "expected"), [(1.0, 300.0), (1000.0, 1250.0)])
def test_a_stop_has_the_time_that_the_plan_expects(tmp_path, monkeypatch, stop_seconds, expected):
    monkeypatch.setattr(module, "Supervisor", Noted)
    monkeypatch.setattr(
        module, "check_what_is_read", lambda *arguments, **more: []
    )  # the model is a shape without weights
    monkeypatch.setattr(module, "estimate", lambda *arguments: replace(estimate(*arguments), stop_seconds=stop_seconds))
    shape = REPOSITORY / "configs/models/quickstart_moe.json"
    loaded = load_config(
        REPOSITORY / "configs/quickstart.yaml", [f"model.path={shape}", f"run.dir={tmp_path}"], "train"
    )
    assert module.launch(loaded, "train", lambda line: None) == 0
    assert Noted.grace[-1] == expected

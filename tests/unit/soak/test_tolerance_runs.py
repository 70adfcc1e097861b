"""A run of the tolerance study: the row that it gets, however it ends, and when it gets none."""

import json
import math

import pytest
import tolerance
import tolerance_arms
import tolerance_figures
import tolerance_rows
from tolerance_cases import WRITTEN, row

from gspo_mega.config import load_config


@pytest.fixture
def one_run(monkeypatch, tmp_path):
    """one_run(arm, k3): the row of a run that ends because its numbers are no longer finite."""
    k3_first = [0.0]
    monkeypatch.setattr(tolerance.Study, "cold_start", lambda self: (tmp_path, "abc", (0.4, 0.02)))
    monkeypatch.setattr(tolerance, "measured", lambda steps: dict.fromkeys(WRITTEN, 0.5) | {"k3_first": k3_first[0]})

    def call(command, log, good=(0,)):
        name = next(word.removeprefix("run.name=") for word in command if word.startswith("run.name="))
        (tmp_path / "arms" / name).mkdir(parents=True)
        (tmp_path / "arms" / name / "metrics.jsonl").write_text(json.dumps({"step": 3, "reward/mean": 0.5}) + "\n")
        assert tolerance.NumericsError.exit_code in good and 1 not in good, "another failure is the machine's: no row"
        return tolerance.NumericsError.exit_code

    monkeypatch.setattr(tolerance, "call", call)

    def run(arm, k3):
        k3_first[0] = k3
        return tolerance.Study(tmp_path).run(arm, 1)

    return run


def test_every_run_of_the_study_has_a_name_that_a_run_may_have():
    arms = (*tolerance_arms.ARMS, *tolerance_arms.breaking_arms(1))
    names = [tolerance.run_name(arm, seed) for arm, seed in tolerance_arms.in_order(arms, tolerance_arms.SEEDS)]
    assert len(names) == len(set(names)) == 57 + 12
    for name in names:
        assert load_config("configs/quickstart_fp8.yaml", [f"run.name={name}"]).config.run.name == name


def test_a_run_that_is_no_longer_finite_has_a_row(one_run):
    made = one_run(tolerance_arms.Arm("anchors"), 3e-13)
    assert (made.outcome, made.accuracy, made.before, made.num_steps) == ("not finite", 0.0, 0.4, 3)
    assert made.before_se == 0.02


@pytest.mark.parametrize("written", [None, "", '{"step": 0, "eval/accuracy": 0.4}\n'])
def test_a_run_that_ends_in_its_first_step_has_a_row(monkeypatch, tmp_path, written):
    """Otherwise the study would make that run again at every start, and never come to the next."""
    monkeypatch.setattr(tolerance.Study, "cold_start", lambda self: (tmp_path, "abc", (0.4, 0.02)))

    def call(command, log, good=(0,)):
        (tmp_path / "arms" / f"{arm.name}-seed1").mkdir(parents=True)
        if written is not None:
            (tmp_path / "arms" / f"{arm.name}-seed1" / "metrics.jsonl").write_text(written)
        return tolerance.NumericsError.exit_code

    monkeypatch.setattr(tolerance, "call", call)
    arm = tolerance_arms.Arm("dose", bits=0, old="rollout")
    made = tolerance.Study(tmp_path).run(arm, 1)
    assert (made.outcome, made.num_steps, made.accuracy) == ("ended", 0, 0.0) and math.isnan(made.k3_first)
    path = tmp_path / "rows.csv"
    tolerance_rows.append_row(path, made)
    assert tolerance_rows.finished(tolerance_rows.read_rows(path), tolerance.PROTOCOL) == {(arm.name, 1)}


def test_a_run_that_succeeds_without_a_step_is_no_row(monkeypatch, tmp_path):
    """Nothing was trained, and the numbers are not why: the command is broken."""
    monkeypatch.setattr(tolerance.Study, "cold_start", lambda self: (tmp_path, "abc", (0.4, 0.02)))
    monkeypatch.setattr(tolerance, "call", lambda *_: 0)
    with pytest.raises(tolerance.Failed, match="no step"):
        tolerance.Study(tmp_path).run(tolerance_arms.Arm("anchors"), 1)


def test_table_and_figures_take_a_run_that_ended_in_its_first_step():
    name, nothing = "gspo-fp32-same-0bits-old_rollout", dict.fromkeys(WRITTEN, math.nan)
    ended = row(name, 2, 0.0, outcome="ended", num_steps=0, accuracy_se=0.0, **nothing)
    rows = [row(k3_first=4e-13), row(name, 1, 0.3, outcome="collapsed", k3_first=0.03), ended]
    text = tolerance_figures.table(rows)
    assert f"| `{name}` | 0.300 0.000 |" in text and "3.0e-02" in text and "2 of 2" in text and "nan" not in text
    assert "1 run ended in the first step" in text
    for draw, num_marks in ((tolerance_figures.draw_arms, 3), (tolerance_figures.draw_dose, 2)):
        drawn = draw(rows)
        assert "nan" not in drawn and drawn.count("<circle") == num_marks + 3


@pytest.mark.parametrize(
    ("arm", "k3"),
    [
        (tolerance_arms.Arm("dose", bits=3), 3e-13),
        (tolerance_arms.Arm("grid", server="fp8_block"), 3e-13),
        (tolerance_arms.Arm("anchors"), 1e-4),
    ],
)
def test_an_arm_whose_gap_is_not_there_has_no_row(one_run, arm, k3):
    with pytest.raises(tolerance.Failed, match="not what it is called"):
        one_run(arm, k3)

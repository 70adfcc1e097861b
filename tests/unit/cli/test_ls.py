"""`gspo-mega ls`: every run below a folder, whatever state its files are in."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from gspo_mega.base.errors import ConfigError
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.cli.main import main
from gspo_mega.cli.status import ago, shown_pairs
from gspo_mega.config import load_config, render_config
from gspo_mega.launcher import restarts
from gspo_mega.launcher.attempt_state import StateKeeper


def made(path, steps=0, command="train", measured_at=None):
    folder = RunFolder(path)
    attempt = folder.new_attempt()
    attempt.command_file.write_text(f"{command}\n")
    folder.config_file.write_text(render_config(load_config("configs/quickstart.yaml").config))
    lines = [
        {"step": step, "time": 0.0, "reward/mean": step / 10} | ({"eval/accuracy": 0.25} if step == measured_at else {})
        for step in range(1, steps + 1)
    ]
    folder.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with StateKeeper(attempt):
        pass
    return folder


def listed(capsys, *arguments):
    assert main(["ls", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_each_run_is_a_line_the_latest_sign_of_life_first(tmp_path, capsys):
    made(tmp_path / "study" / "arm" / "first", steps=3, measured_at=2)
    second = made(tmp_path / "second", steps=1, command="sft")
    second.latest_checkpoint_file.parent.mkdir()
    second.latest_checkpoint_file.write_text("step_00000001\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "study" / "link").symlink_to(tmp_path / "second")
    made(second.path / "eval", steps=1)  # a run inside a run is that run's own affair
    rows = [line.split() for line in listed(capsys, tmp_path).splitlines()]
    assert rows[0][:4] == ["run", "command", "state", "step"] and len(rows) == 3
    steps = load_config("configs/quickstart.yaml").config.train.num_steps
    assert rows[1][:2] == [str(second.path), "sft"] and rows[1][-1] == "step_00000001"
    assert rows[2][:2] == [str(tmp_path / "study/arm/first"), "train"]
    assert rows[2][3:6] == [f"3/{steps}", "0.300", "0.250"]


def test_an_evaluation_has_an_accuracy_and_status_says_how_far_a_run_is(tmp_path, capsys):
    measured = made(tmp_path / "eval", command="eval")
    measured.latest_attempt().result_file.write_text('{"accuracy": 0.11, "num_samples": 100}')
    (row,) = [line.split() for line in listed(capsys, tmp_path).splitlines()[1:]]
    assert row[1] == "eval" and row[5] == "0.110"
    assert dict(shown_pairs(measured, 0.0))["accuracy"] == "0.110"
    run = made(tmp_path / "train", steps=3, measured_at=2)
    speed = {"speed/tokens_per_second": 100.0, "time/step_seconds": 60.0}
    with run.metrics_file.open("a") as file:
        file.write(json.dumps({"step": 4, "time": 0.0, "reward/mean": 0.4, **speed}) + "\n")
    steps = load_config("configs/quickstart.yaml").config.train.num_steps
    with StateKeeper(run.latest_attempt()):
        shown = dict(shown_pairs(run, time.time()))
    assert (
        shown["step"].startswith(f"4/{steps}, reward 0.400") and shown["accuracy"] == "0.250, of the weights of step 2"
    )
    assert shown["speed"].endswith(f"; about {ago((steps - 4) * 60.0)} left at this speed")
    StateKeeper(run.latest_attempt()).tell("finished")
    assert "left" not in dict(shown_pairs(run, time.time()))["speed"]


def test_json_is_what_status_says_and_a_damaged_run_hides_no_other(tmp_path, capsys):
    good = made(tmp_path / "good", steps=2)
    bad = made(tmp_path / "bad", steps=2)
    bad.metrics_file.write_text("no json\n")
    found = {one["run"]: one for one in map(json.loads, listed(capsys, "--json", tmp_path).splitlines())}
    assert found[str(good.path)]["step"] == 2 and found[str(good.path)]["command"] == "train"
    assert "metrics.jsonl" in found[str(bad.path)]["problem"]
    text = listed(capsys, tmp_path)
    assert f"{bad.path}: {bad.metrics_file}: its last line is not" in text and str(good.path) in text


@pytest.mark.parametrize("text", ["a: [", "[" * 20_000], ids=["open", "deep"])
def test_a_configuration_that_is_no_yaml_is_a_problem_of_its_run(tmp_path, capsys, text):
    bad = made(tmp_path / "bad", steps=2)
    bad.config_file.write_text(text)
    assert f"{bad.config_file}: no YAML" in listed(capsys, tmp_path)


@pytest.mark.parametrize("value", ['"much"', "[]", "true", "NaN", "1e999", "1" + "0" * 400])
def test_a_metric_that_is_no_number_is_a_problem_of_its_run(tmp_path, capsys, value):
    bad = made(tmp_path / "bad", steps=2)
    bad.metrics_file.write_text(f'{{"step": 3, "time": 0.0, "reward/mean": {value}}}\n')
    assert str(bad.path) + ": " in listed(capsys, tmp_path)
    json.loads(listed(capsys, "--json", tmp_path), parse_constant=pytest.fail)


def test_a_pipe_in_place_of_a_file_does_not_hold_it_up(tmp_path, capsys):
    bad = made(tmp_path / "bad", steps=2)
    bad.metrics_file.unlink()
    os.mkfifo(bad.metrics_file)
    assert "is a named pipe, not a file" in listed(capsys, tmp_path)


def test_one_run_a_run_without_an_attempt_and_a_folder_without_runs(tmp_path, capsys, monkeypatch):
    run = made(tmp_path / "runs" / "one", steps=2)
    assert str(run.path) in listed(capsys, run.path)
    prepared = tmp_path / "prepared" / "two"
    prepared.mkdir(parents=True)
    (prepared / "config.resolved.yaml").write_text("{}")
    assert "no_attempt" in listed(capsys, tmp_path / "prepared")
    (tmp_path / "nothing").mkdir()
    assert listed(capsys, tmp_path / "nothing") == f"no runs in {tmp_path / 'nothing'}\n"
    monkeypatch.chdir(tmp_path)
    assert listed(capsys).splitlines()[1].startswith("runs/one ")


def test_a_folder_that_is_not_there_is_named(tmp_path, capsys):
    assert main(["ls", str(tmp_path / "no")]) == ConfigError.exit_code
    assert f"{tmp_path / 'no'} is no folder" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["a\x1b[31m", "[red]x[/red]"])
def test_a_name_is_shown_and_never_acts(tmp_path, capsys, name):
    made(tmp_path / name, steps=1)
    text = listed(capsys, tmp_path)
    assert "\x1b" not in text and ("[red]x[/red]" in text or "a\\x1b" in text)


def test_a_number_of_steps_that_is_none_is_left_out(tmp_path, capsys):
    run = made(tmp_path / "run", steps=1)
    for value in ('"[/x]"', "2026-01-01", "!!set {a}", ".inf", "&x [*x]", "0x" + "f" * 5000):
        run.config_file.write_text(f"train: {{num_steps: {value}}}\n")
        assert listed(capsys, tmp_path).splitlines()[1].split()[3] in ("1", "-")
        json.loads(listed(capsys, "--json", tmp_path))


def test_another_users_folder_hides_no_run(tmp_path, capsys, monkeypatch):
    """Root may read everything; `scandir` refuses here as it would to another user."""
    good = made(tmp_path / "good", steps=1)
    (tmp_path / "closed").mkdir()
    is_dir = Path.is_dir

    def refused(path, **options):
        if path.parent.name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return is_dir(path, **options)

    monkeypatch.setattr(Path, "is_dir", refused)
    assert str(good.path) in listed(capsys, tmp_path)


def test_an_evaluation_is_found_where_the_tail_of_a_long_file_begins_inside_a_line(tmp_path, capsys, monkeypatch):
    run = made(tmp_path / "run", steps=40, measured_at=20)
    lines = run.metrics_file.read_bytes().splitlines(keepends=True)
    monkeypatch.setattr(restarts, "_LONG_TAIL_BYTES", sum(map(len, lines[20:])) + 40)
    assert "damaged" not in listed(capsys, tmp_path)

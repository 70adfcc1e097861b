"""`gspo-mega report`: from a run's folder to one file, also of a run that is damaged or in the middle of a write."""

import base64
import hashlib
import json
import math
import re
import zlib
from pathlib import Path

import numpy as np
import pytest
from report_runs import HOSTILE, add_gaps, add_held_out, make_run

from gspo_mega.base.run_folder import RunFolder
from gspo_mega.cli.main import main
from gspo_mega.report import page
from gspo_mega.report.page import embedded, make_report
from gspo_mega.report.run_record import MOST_POINTS, differences, flat, read_run, schema_defaults
from gspo_mega.report.sampled_episodes import evenly, gap_codes, sample_run


def test_a_run_as_records(tmp_path):
    run = read_run(make_run(tmp_path / "one"))
    assert run.steps == list(range(1, 13)) and run.series["reward/mean"][0] == pytest.approx(0.3)
    assert ("objective.clip_low", "0.003", "0.0003") in run.changed and run.versions == "torch 2.11"
    assert not any(key.startswith("certify") for key, _, _ in run.changed)
    assert [(one.number, one.state) for one in run.attempts] == [(1, "failed"), (2, "finished")]
    assert run.attempts[0].restart == "starts again; because rank 0: lost"


def test_an_attempt_whose_record_is_of_another_release(tmp_path):
    folder = make_run(tmp_path / "one")
    (folder / "attempts" / "0001" / "state.json").write_text('{"state": "failed", "mood": "bad"}')
    (folder / "attempts" / "0002" / "state.json").write_text('{"state"')
    run = read_run(folder)
    assert [one.state for one in run.attempts] == ["unknown", "unknown"] and len(run.problems) == 2


def test_a_torn_last_line_and_a_step_written_twice(tmp_path):
    folder = make_run(tmp_path / "one")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 12, "time": 1, "reward/mean": 0.9}\n{"step": 13, "ti')
    run = read_run(folder)
    assert run.steps[-1] == 12 and run.series["reward/mean"][-1] == 0.9


def test_what_was_measured_beside_training_is_with_the_step_that_it_measured(tmp_path):
    folder = make_run(tmp_path / "one")
    before = read_run(folder).series["reward/mean"]
    late = {"eval/accuracy": 0.25, "eval/measured_step": 10, "eval/beside/seconds": 3.0}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 13, "time": 1.0, "reward/mean": 0.5} | late) + "\n")
        file.write(json.dumps({"step": 13, "time": 2.0, "eval/accuracy": 0.75}) + "\n")
    run = read_run(folder)
    assert (run.series["eval/accuracy"][9], run.series["eval/accuracy"][12]) == (0.25, 0.75)
    assert run.series["reward/mean"] == [*before, 0.5], "a second line of a step takes nothing from the first"


def test_a_damaged_journal_and_configuration_leave_the_rest(tmp_path):
    folder = make_run(tmp_path / "one")
    (folder / "config.resolved.yaml").write_text("run: {name: one, nonsense: 1}\n")
    (folder / "journal" / "step_00000001").write_bytes(b"nonsense")
    sample = sample_run(RunFolder(folder), 1000)
    assert len(sample.episodes) == 2 and sample.num_steps_shown == 1
    assert any("advantages are not shown" in problem for problem in sample.problems)
    assert any("step_00000001" in problem for problem in sample.problems)
    assert all(one["a"] is None for one in sample.episodes)


def test_episodes_of_the_page(tmp_path):
    sample = sample_run(RunFolder(make_run(tmp_path / "one")), 1000)
    first, second = sample.episodes[:2]
    assert (first["s"], first["r"], first["a"], second["r"], second["a"]) == (1, 0.0, -1.0, 1.0, 1.0)
    assert first["n"] == [{"t": [5, 6], "x": HOSTILE, "l": [-1000, -500], "v": [[0, 2]], "f": "stop"}]
    assert sample.is_whole and sample.prompts["train:7"]["answer"] == "2"


def test_the_mismatch_of_tokens_where_it_is_recorded(tmp_path):
    folder = make_run(tmp_path / "one")
    add_gaps(folder, 1)
    sample = sample_run(RunFolder(folder), 1000)
    assert ["d" in one["n"][0] for one in sample.episodes] == [False, False, True, True] and sample.has_gaps
    nats = [math.copysign(1e-7 * 10 ** ((abs(code) - 1) / 16), code) for code in sample.episodes[2]["n"][0]["d"]]
    assert nats == pytest.approx([-0.2, 3e-6], rel=0.08)
    assert gap_codes(np.array([0, 1e-9, 1e-7, -1e-7, np.nan, np.inf])) == [0, 0, 1, -1, None, 190]
    (folder / "journal" / "step_00000001.gaps").write_bytes(b"nonsense")
    damaged = sample_run(RunFolder(folder), 1000)
    assert len(damaged.episodes) == 4 and "step_00000001.gaps: not a file" in damaged.problems[0]


def test_a_page_that_is_watched_waits_for_the_mismatch_of_the_step_that_is_trained_on(tmp_path):
    folder = make_run(tmp_path / "one")
    config = folder / "config.resolved.yaml"
    config.write_text(config.read_text().replace("token_mismatch: false", "token_mismatch: true"))
    assert sample_run(RunFolder(folder), 1000, consumed=True).last_step == 1
    add_gaps(folder, 1)
    assert sample_run(RunFolder(folder), 1000, consumed=True).last_step == 2


def test_a_sample_is_smaller_and_says_so(tmp_path):
    sample = sample_run(RunFolder(make_run(tmp_path / "one", num_groups=3)), 8)
    assert len(sample.episodes) == 4 and sample.num_recorded == 12 and not sample.is_whole
    assert evenly(list(range(100)), 5) == [0, 25, 50, 74, 99] and evenly([1, 2], 5) == [1, 2]
    html = make_report([make_run(tmp_path / "two")])
    assert "trajectories are a sample" not in html


def test_long_runs_are_thinned(tmp_path):
    folder = make_run(tmp_path / "one")
    lines = [json.dumps({"step": step, "time": 1.0, "reward/mean": 0.5}) + "\n" for step in range(1, 5002)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    run = read_run(folder)
    assert run.every == 3 and len(run.steps) <= MOST_POINTS and run.steps[-1] == 5001


def test_one_file_with_nothing_to_fetch_and_nothing_executable_from_a_model(tmp_path, capsys):
    folder = make_run(tmp_path / "one")
    assert main(["report", str(folder), str(make_run(tmp_path / "two"))]) == 0
    assert capsys.readouterr().out.startswith(f"{folder / 'report.html'} (0.")
    html = (folder / "report.html").read_text()
    assert "<script>window" not in html and "default-src 'none'" in html
    assert not any(word in html for word in ('src="', "@import", 'href="http'))
    packed = html.split('id="episodes">')[1].split("</script>")[0]
    runs = json.loads(zlib.decompress(base64.b64decode(packed)))
    assert [len(run["episodes"]) for run in runs] == [4, 4]


def test_held_out_answers_of_the_first_and_the_last_evaluation(tmp_path):
    folder = make_run(tmp_path / "one")
    assert _data_of(make_report([folder]))["runs"][0]["answers"] == [], "as a run of an earlier release"
    for step, marks in ((0, [True, False]), (5, [None, None]), (12, [True, True])):
        add_held_out(folder, step, marks)
    html = make_report([folder])
    (shown,) = _data_of(html)["runs"][0]["answers"]
    assert (shown["name"], shown["first_step"], shown["last_step"], shown["num_prompts"]) == ("gsm8k", 0, 12, 2)
    first = shown["prompts"][0]
    assert (first["row"], first["before"]["correct"], first["after"]["correct"]) == (2, False, True)
    assert first["after"]["response"] == f"{HOSTILE} 12" and HOSTILE not in html
    (folder / "evaluations" / "step_00000012.jsonl").write_text("nonsense\n")
    run = _data_of(make_report([folder]))["runs"][0]
    assert run["answers"][0]["last_step"] == 5 and "step_00000012.jsonl:1: is not a line with" in run["notes"][-1]


def test_held_out_answers_of_a_page_are_bounded(tmp_path, monkeypatch):
    folder = make_run(tmp_path / "one")
    for name in ("a", "b"):
        add_held_out(folder, {"a": 0, "b": 1}[name], [True] * 16, name)
    size = len(_data_of(make_report([folder]))["runs"][0]["answers"][0]["prompts"])
    monkeypatch.setattr(page, "_MOST_ANSWER_CHARACTERS", 1000)
    shown = _data_of(make_report([folder]))["runs"][0]["answers"]
    assert size == 16 and [(one["num_prompts"], len(one["prompts"])) for one in shown] == [(16, 1), (16, 1)]


def _data_of(html):
    return json.loads(html.split('id="data">')[1].split("</script>")[0])


def test_data_cannot_end_its_tag():
    text = embedded({"a": "</script><script>", "b": float("nan"), "c": "\u2028\ud800"})
    assert "<" not in text and json.loads(text) == {"a": "</script><script>", "b": None, "c": "\u2028?"}


def test_settings_and_defaults():
    assert flat({"a": {"b": 1, "c": []}, "d": {}}) == {"a.b": 1, "a.c": [], "d": {}}
    assert differences({"a": 1, "b": 2, "c": None}, {"a": 1, "b": 3}) == [("b", "2", "3")]


def test_a_list_of_sections_has_its_default():
    sinks = [{"sink": "jsonl", "options": {}}, {"sink": "tensorboard", "options": {}}]
    assert differences({"metrics.sinks": sinks}, schema_defaults()) == []
    (changed,) = differences({"metrics.sinks": sinks[:1]}, schema_defaults())
    assert changed[0] == "metrics.sinks" and "tensorboard" in changed[2]


def test_the_plotting_library_is_the_released_file():
    assets = Path(page.__file__).parent / "assets"
    for line in (assets / "uPlot.sha256").read_text().splitlines():
        checksum, name = line.split()
        assert hashlib.sha256((assets / name).read_bytes()).hexdigest() == checksum
    assert "MIT License" in (assets / "uPlot.LICENSE").read_text()


def test_files_of_the_page_are_short():
    for file in (Path(page.__file__).parent / "assets").iterdir():
        lines = file.read_text().splitlines()
        assert len(lines) <= 350 and (file.name.startswith("uPlot") or max(map(len, lines)) <= 200), file.name


def test_no_name_is_declared_twice_over_the_scripts_of_the_page():
    """They share one scope: a second declaration would leave a whole file out."""
    assets = Path(page.__file__).parent / "assets"
    names = []
    for file in sorted(assets.glob("*.js")):
        for line in file.read_text().splitlines() if not file.name.startswith("uPlot") else ():
            if found := re.match(r"(?:const|let|var|(?:async )?function) (.*)", line):
                names += re.findall(r"(?:^|, )(\w+)(?= =|\()", found[1].split("{")[0])
    assert len(names) > 60 and "store" in names and "smoothed" in names
    assert sorted(names) == sorted(set(names))

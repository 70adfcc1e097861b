"""`gspo-mega simulate`: its report, JSON and SVG, and its errors."""

import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from gspo_mega.cli.main import main

ROOT = Path(__file__).parents[3]
CONFIG = "configs/qwen3_235b_a22b_32nodes.yaml"
SHORT = ("--days", "0.5")


@pytest.fixture(autouse=True)
def in_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_report_json_and_svg_say_the_same_twice(capsys, tmp_path):
    words = [CONFIG, *SHORT, "--mtbf", "500", "rollout.max_staleness=1"]
    assert main(["simulate", *words]) == 0
    report = capsys.readouterr().out
    for title in ("job ", "step ", "idle ", "stale ", "failures ", "save ", "split ", "assumed "):
        assert f"\n{title}" in f"\n{report}"
    assert "Young" in report and "Daly" in report and "<- simulated above" in report
    assert main(["simulate", *words, "--json", "--svg", str(tmp_path / "figure.svg")]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["job"]["gpus"] == 256 and values["job"]["max_staleness"] == 1
    steps = values["step_seconds"]
    assert steps["p5"] <= steps["p50"] <= steps["p95"] and f"{steps['mean']:.1f}" in report
    assert sum(values["staleness_share"]) == pytest.approx(1.0)
    assert sum(values["seconds"].values()) == pytest.approx(values["elapsed_seconds"])
    assert [row["step"] for row in values["splits"]] == sorted(row["step"] for row in values["splits"])
    assert all(row["trainer_nodes"] + row["server_nodes"] == 32 for row in values["splits"])
    assert main(["simulate", *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == values, "the same seed"
    figure = ElementTree.fromstring((tmp_path / "figure.svg").read_text())
    assert figure.tag.endswith("svg") and len(list(figure.iter("{http://www.w3.org/2000/svg}rect"))) > 30


def test_gpus_that_change_hands_are_counted_once(capsys):
    assert main(["simulate", "configs/qwen3_06b_1gpu.yaml", *SHORT, "--length-distribution", "constant:512"]) == 0
    report = capsys.readouterr().out
    assert "1 GPU: the trainer and 1 server, in turns;" in report and "while the other has the GPUs" in report
    step, tokens = (float(re.search(found, report)[1]) for found in (r"\n {10}step +([\d.]+)", r"([\d.]+) tokens per"))
    assert step * tokens == pytest.approx(32 * 8 * (256 + 512), rel=0.02)  # prompts of half max_prompt_tokens


def test_nodes_are_divided_as_fast_as_possible(capsys):
    assert main(["simulate", CONFIG, *SHORT, "--nodes", "48", "--json", "--length-distribution", "constant:4096"]) == 0
    values = json.loads(capsys.readouterr().out)
    best = values["splits"][0]
    assert (values["job"]["trainer_nodes"], values["job"]["server_nodes"]) == (
        best["trainer_nodes"],
        best["server_nodes"],
    )
    assert best["trainer_nodes"] + best["server_nodes"] == 48


def test_rates_of_a_measured_run(capsys, tmp_path):
    row = {"time/step_seconds": 130.0, "time/rollout_seconds": 90.0, "time/publish_seconds": 10.0}
    (tmp_path / "metrics.jsonl").write_text("\n".join([json.dumps(row)] * 5))
    words = ["configs/qwen3_4b_1node.yaml", "--days", "1", "--fit", str(tmp_path), "--json", "checkpoint.every_steps=0"]
    assert (
        main(["simulate", *words, "rollout.max_staleness=0"]) == 0
    )  # the row is of a run that samples and trains in turns
    values = json.loads(capsys.readouterr().out)
    assert values["step_seconds"]["mean"] == pytest.approx(130.0, rel=0.02)
    assert values["trainer_wait_seconds"]["mean"] == pytest.approx(90.0, rel=0.02)
    assert values["job"]["publish_seconds"] == 10.0 and values["fit"]["decode"] > 0


def broken(folder, name, text):
    (folder / name).write_text(text)
    return str(folder / name)


@pytest.mark.parametrize(
    "words, told",
    [
        (["--nodes", "1"], "--nodes 1: trainer and servers need a node each; at least 2"),
        (["--days", "0"], "--days 0: give a number above 0"),
        (["--mtbf", "-1"], "--mtbf -1: give a number above 0"),
        (["--days", "nan"], "--days nan: give a number above 0"),
        (["--seed", "-1"], "--seed -1: give a whole number from 0 on"),
        (["--length-distribution", "nowhere"], "nowhere: no such file or folder; valid: constant:TOKENS"),
        (["--length-distribution", "constant:99999"], "not a length from 1 to rollout.max_new_tokens (16384)"),
        (["--length-distribution", "lognormal:x"], "not numbers; valid: constant:TOKENS"),
        (["--length-distribution", "lognormal:99999"], "a mean of 99999 tokens with at most 16384"),
        (["--length-distribution", "docs"], "the folder holds no journal"),
        (["--fit", "nowhere"], "--fit nowhere: no such file; valid: the folder of a run, or its metrics.jsonl"),
        (["--svg", "nowhere/x.svg", *SHORT], "--svg nowhere/x.svg: cannot be written: No such file"),
        (["server.tensor=4"], "leaves a cache of 0 tokens, while one response may take 18432; use more GPUs"),
        (["--nodes", "5"], "5 nodes cannot be divided between trainer and servers: "),
        (["train.rollouts_only=true"], "train.rollouts_only: the simulation is of a run that samples and trains"),
        (["cluster.gpu=null"], "cluster.gpu: not given, so nothing says how long a step takes; give it, or --fit"),
    ],
)
def test_what_cannot_be_simulated_is_said(words, told, capsys):
    assert main(["simulate", CONFIG, *words]) == (10 if "a cache of 0 tokens" in told else 2)
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    "option, text, told",
    [
        ("--length-distribution", "12\n\nmany\n", ":3: 'many' is not a length; one whole number from 1 per line"),
        ("--length-distribution", "\n", "the file is empty; one length per line"),
        ("--fit", "{}\n", "no step with time/step_seconds and time/rollout_seconds"),
        ("--fit", "{\n", ":1: not a line of metrics.jsonl"),
        (
            "--fit",
            '{"time/step_seconds": 3, "time/rollout_seconds": 1, "rollout/staleness_max": 1}',
            "the run sampled ahead",
        ),
    ],
)
def test_files_that_cannot_be_used(option, text, told, capsys, tmp_path):
    assert main(["simulate", CONFIG, option, broken(tmp_path, "file", text)]) == 2
    assert told in capsys.readouterr().err


def test_lengths_of_a_file(capsys, tmp_path):
    file = broken(tmp_path, "lengths", "100\n200\n300\n")
    assert main(["simulate", CONFIG, "--days", "0.1", "--length-distribution", file]) == 0
    assert f"3 lengths of {file}" in capsys.readouterr().out


def test_it_imports_no_torch():
    """A login node has none."""
    program = (
        "import sys; from gspo_mega.cli.main import main;"
        f" main(['simulate', {CONFIG!r}, '--days', '0.1']); print([m for m in ('torch', 'aiohttp') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "[]"

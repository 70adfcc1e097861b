"""tools/draw_curve.py: the committed figure is that of the committed numbers; what it draws of a run."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "tools" / "draw_curve.py"
DOCS = ROOT / "docs"
SVG = "{http://www.w3.org/2000/svg}"


def call(*arguments):
    # -I -S: with the standard library alone.
    command = [sys.executable, "-I", "-S", str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True)


@pytest.mark.parametrize("name", ["quickstart_curve", "smollm2_curve"])
def test_the_committed_figure_is_of_the_committed_numbers(tmp_path, name):
    committed = (DOCS / f"{name}.svg").read_text()
    title = ET.fromstring(committed).find(f"{SVG}title").text
    call(DOCS / f"{name}.csv", tmp_path / "curve.svg", "--title", title)
    assert (tmp_path / "curve.svg").read_text() == committed


def test_a_run_s_metrics_become_numbers_and_a_figure(tmp_path):
    lines = [{"step": n, "time": 1.0, "reward/mean": n / 10, "policy/entropy": None} for n in range(1, 5)]
    lines[3] |= {"eval/accuracy": 0.5, "eval/accuracy_standard_error": 0.02}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out, numbers = tmp_path / "curve.svg", tmp_path / "curve.csv"
    call(tmp_path / "metrics.jsonl", out, "--csv", numbers, "--before", "0.25", "0.03", "--title", "a < b")
    assert numbers.read_text().splitlines() == [
        "step,reward,accuracy,accuracy_standard_error",
        "0,,0.25,0.03",
        "1,0.1,,",
        "2,0.2,,",
        "3,0.3,,",
        "4,0.4,0.5,0.02",
    ]
    figure = ET.parse(out).getroot()
    rewards, accuracy = (line.get("points").split() for line in figure.iter(f"{SVG}polyline"))
    assert (len(rewards), len(accuracy)) == (4, 2)
    heights = [float(point.split(",")[1]) for point in rewards]
    assert heights == sorted(heights, reverse=True)  # more reward is further up
    assert figure.find(f"{SVG}title").text == "a < b"


def test_a_file_without_steps_is_refused(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    command = [sys.executable, str(SCRIPT), str(tmp_path / "metrics.jsonl"), str(tmp_path / "curve.svg")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0 and "no step with a reward" in done.stderr

"""docs/configuration.md and docs/metrics.md are what tools/write_docs.py writes, and it writes all there is."""

import subprocess
import sys
from pathlib import Path

import pytest

from gspo_mega.config.explain import all_keys
from gspo_mega.metrics.catalogue import CATALOGUE

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "tools" / "write_docs.py"


def call(*arguments):
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True)


def test_the_generated_pages_are_up_to_date():
    done = call("--check")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", ["configuration.md", "metrics.md"])
def test_an_outdated_page_is_found_and_written(tmp_path, page):
    assert call("--docs", str(tmp_path)).returncode == 0
    assert (tmp_path / page).read_text() == (ROOT / "docs" / page).read_text()
    (tmp_path / page).write_text("old")
    done = call("--check", "--docs", str(tmp_path))
    assert done.returncode == 1 and page in done.stderr and (tmp_path / page).read_text() == "old"


def test_every_key_and_every_metric_is_on_its_page():
    lines = (ROOT / "docs/configuration.md").read_text().splitlines()
    documented, section = set(), None
    for line in lines:
        if line.startswith("## "):
            section = line[3:].strip("`")
        elif line.startswith("| `") and section is not None:
            key = line.split("`")[1]
            documented.add(key if section == "The file itself" else f"{section}.{key}")
    assert {".".join(path) for path in all_keys()} <= documented
    metrics = (ROOT / "docs/metrics.md").read_text()
    assert [name for name in CATALOGUE if f"| `{name}` |" not in metrics] == []

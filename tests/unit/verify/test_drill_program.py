"""A whole drill of a program that trains in a second: its faults, its rows, and what it says of a program with a bug."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gspo_mega.base import processes
from gspo_mega.base.errors import ConfigError
from gspo_mega.config import load_config
from gspo_mega.verify.drill.program import Drill, Settings, read_rows

KINDS = (
    "kill the supervisor",
    "kill at a declared point",
    "stop every process a while",
    "no space at a declared point",
)
OVERRIDES = ["batch.group_size=8"]


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Makes a drill of the program with a bug."""
    import gspo_mega.verify.drill.program as program

    monkeypatch.setattr(program, "_SETTLE_SECONDS", 0.2)
    said: list[str] = []

    def make(bug: str = "", kinds=KINDS, **more) -> Drill:
        config = Path("configs/quickstart.yaml").absolute()
        command = [sys.executable, str(Path(__file__).with_name("small_train.py")), bug]
        settings = Settings(
            load_config(config, OVERRIDES, "train"), [str(config), *OVERRIDES], tmp_path / "drill",
            **{"seed": 1, "patience_seconds": 300.0, "live_share": 0.0, "command": command, **more},
        )  # fmt: skip
        drill = Drill(settings, kinds, {}, said.append)
        drill.prepare()
        return drill

    yield make
    processes.adopt_orphans(False)


def test_a_drill_goes_on_from_its_rows_and_finds_a_program_that_continues_wrongly(make, tmp_path):
    make().run(1, None)
    rows = read_rows(tmp_path / "drill/rows.jsonl")
    assert any(row.tried and row.ended != "went on" for row in rows), rows
    assert all(row.equal and not row.problems for row in rows), rows
    assert list((tmp_path / "drill/trials").iterdir()) == [], "the folders of sound trials are removed"

    with (tmp_path / "drill/rows.jsonl").open("a") as file:
        file.write('{"trial": 1, "is_l')  # a drill was killed while it wrote
    make("forgets a step").run(len(rows) + 1, None)  # only after a second start
    longer = read_rows(tmp_path / "drill/rows.jsonl")
    assert longer[: len(rows)] == rows and longer[len(rows)].trial == rows[-1].trial + 1
    assert any("differs: checkpoint/weights" in row.problems and not row.equal for row in longer[len(rows) :])
    assert list((tmp_path / "drill/trials").iterdir()), "its folder is kept"
    with pytest.raises(ConfigError, match="another configuration or seed"):
        make(seed=2)

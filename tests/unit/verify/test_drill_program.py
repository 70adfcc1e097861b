"""A whole drill of a program that trains in a second: its faults, its rows, and what it says of a program with a bug."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from gspo_mega.base import processes
from gspo_mega.base.errors import ConfigError
from gspo_mega.config import load_config
from gspo_mega.verify.drill.kinds import Fault
from gspo_mega.verify.drill.plan import Row, Trial
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
            load_config(config, OVERRIDES, "train"), [str(config), *OVERRIDES],
            **{"folder": tmp_path / "drill", "seed": 1, "patience_seconds": 300.0, "live_share": 0.0, "command": command, **more},
        )  # fmt: skip
        drill = Drill(settings, kinds, {}, said.append)
        drill.prepare()
        return drill

    yield make
    processes.adopt_orphans(False)


def test_a_drill_goes_on_from_its_rows_and_finds_a_program_that_continues_wrongly(make, tmp_path):
    """In a file that another drill began."""
    file = tmp_path / "rows.jsonl"
    other = Row(7, False, KINDS[0], "", "SIGKILL", True, "", True, [], 1.0, "", "other")
    file.write_text(json.dumps(asdict(other)) + "\n")
    make(rows=file).run(2, None)
    assert read_rows(file)[0] == other
    rows = read_rows(file)[1:]
    assert {row.trial for row in rows} == {0}, "it counts its own trials"
    assert any(row.tried and row.ended != "went on" for row in rows), rows
    assert all(row.equal and not row.problems for row in rows), rows
    assert list((tmp_path / "drill/trials").iterdir()) == [], "the folders of sound trials are removed"

    with file.open("a") as torn:
        torn.write('{"trial": 1, "is_l')  # a drill was killed while it wrote
    make("forgets a step", rows=file).run(sum(row.tried for row in rows) + 2, None)  # only after a second start
    longer = read_rows(file)[1:]
    assert longer[: len(rows)] == rows and {row.trial for row in longer[len(rows) :]} == {1}
    assert any("differs: checkpoint/weights" in row.problems and not row.equal for row in longer[len(rows) :])
    assert list((tmp_path / "drill/trials").iterdir()), "its folder is kept"
    with pytest.raises(ConfigError, match="another configuration or seed"):
        make(seed=2)


def test_every_fault_of_a_run_is_struck_and_its_row_says_what_it_did(make):
    """Two faults that begin with a command take two commands. What has no process is looked for twice, and is no trial."""
    point = {"when": "point", "point": "step.trained", "amount": 0.5}
    faults = (
        Fault("kill a rank", "steps"),
        Fault("stop every process a while", **point, seconds=0.1),
        Fault("no space at a declared point", "point", point="save.rename.before", hit=2),
        Fault("kill at a declared point", **point),
    )
    rows = {row.kind: row for row in make()._try(Trial(0, False, faults))}
    assert [kind for kind, row in rows.items() if not row.tried] == ["kill a rank"]
    assert rows["no space at a declared point"].ended.startswith("exit code 6")
    assert rows["kill at a declared point"].ended == "killed by SIGKILL"
    assert rows["stop every process a while"].ended == "went on"
    assert all(row.equal and not row.problems and row.code and row.drill for row in rows.values())

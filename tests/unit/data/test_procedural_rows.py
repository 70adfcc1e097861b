"""Rows of reasoning-gym: made once, split by seed, scored by the package's own scorer in a process of its own.

The package is stood in for by a small one of the same interface, and the real one is used as well, in the environment
of its own that `launch/setup.sh --tests` makes.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from procedural_package import write_package

from gspo_mega.base.errors import DataError, RewardError
from gspo_mega.config.schema.data import Data
from gspo_mega.data.procedural_rows import make_rows
from gspo_mega.rewards import builtin
from gspo_mega.rewards.functions import load_function

REAL = Path(sys.prefix) / "opt" / "reasoning_gym" / "bin" / "python"
PINNED = Path(__file__).parents[3] / "launch" / "env" / "reasoning-gym.txt"


@pytest.fixture
def package(tmp_path, monkeypatch):
    file = write_package(tmp_path / "packages")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    monkeypatch.setattr(builtin, "_SCORERS", {})
    yield file
    for scorer in builtin._SCORERS.values():
        scorer.process.end()


def data_of(tmp_path, tasks=None, **more):
    made = {"num_rows": 30, "num_held_out": 10, "folder": str(tmp_path / "made"), "tasks": tasks or {"sums": 1.0}}
    return Data(max_prompt_tokens=9, reasoning_gym={**made, **more})


def rows_in(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_rows_are_made_once_and_split_without_a_question_in_both(tmp_path, package):
    data = data_of(tmp_path, {"sums": 1.0, "raises": 2.0})
    assert make_rows(data) == [f"data.reasoning_gym: 2 tasks written to {tmp_path / 'made'} (reasoning-gym 0.0)"]
    train, held_out = rows_in(tmp_path / "made/sums.train.jsonl"), rows_in(tmp_path / "made/held_out.jsonl")
    assert len(train) == 30 and len(held_out) == 20
    questions = [row["prompt"] for row in train]
    assert len(set(questions)) == 30 and not set(questions) & {row["prompt"] for row in held_out}
    assert all(str(eval(row["prompt"])) == row["answer"] for row in train)
    before = {path.name: path.read_bytes() for path in (tmp_path / "made").iterdir()}
    package.unlink()  # nothing is made again
    assert make_rows(data) == []
    assert {path.name: path.read_bytes() for path in (tmp_path / "made").iterdir()} == before


def test_files_of_other_settings_are_not_taken(tmp_path, package):
    make_rows(data_of(tmp_path))
    for more in ({"num_rows": 31}, {"seed": 1}, {"tasks": ({"name": "sums", "options": {"widest": 50}},)}):
        with pytest.raises(DataError, match=rf"made with another data\.reasoning_gym\.{next(iter(more))}; set"):
            make_rows(data_of(tmp_path, **more))


def test_what_cannot_be_made_is_said_and_leaves_no_manifest(tmp_path, package):
    for tasks, said in (
        ({"sum": 1.0}, "data.reasoning_gym.tasks: sum: ValueError: Dataset 'sum' not registered"),
        ({"tiny": 1.0}, "tiny has too few different items: .* ask for fewer"),
        (({"name": "sums", "options": {"wide": 1}},), "sums: TypeError: .*'wide'"),
        (
            {"new": 1.0},
            "new: ValueError: item 0 is another one when it is made again, so that no answer could be scored",
        ),
        ({"ends": 1.0}, r"data\.reasoning_gym\.tasks: ends: its process ended \(exit code 3\)"),
    ):
        with pytest.raises(DataError, match=said):
            make_rows(data_of(tmp_path, tasks))
        assert not (tmp_path / "made" / "made_by.json").exists()


def test_a_python_without_the_package_is_named(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with pytest.raises(DataError, match=r"has no package reasoning-gym\. Make a venv .* data\.procedural_python"):
        make_rows(data_of(tmp_path))
    with pytest.raises(RewardError, match="has no package reasoning-gym; make a venv"):
        load_function("reasoning_gym", {})
    with pytest.raises(RewardError, match="nowhere/python cannot be started"):
        load_function("reasoning_gym", {"python": "/nowhere/python"})
    nowhere = data_of(tmp_path).model_copy(update={"procedural_python": "/nowhere/python"})
    with pytest.raises(DataError, match=r"data\.procedural_python: /nowhere/python cannot be started"):
        make_rows(nowhere)


def scored(row, response, **options):
    return load_function("reasoning_gym", options)(
        prompt=row["prompt"], response=response, answer=row["answer"], metadata=row, **options
    )


def test_an_answer_is_scored_by_the_packages_own_scorer(tmp_path, package):
    make_rows(data_of(tmp_path, {"sums": 1.0, "raises": 1.0}))
    row = rows_in(tmp_path / "made/sums.train.jsonl")[3]
    right = {"reward": 1.0, "correct": True}
    assert scored(row, f" {row['answer']}\n") == right
    assert scored(row, f"<answer>1</answer> no, <answer> {row['answer']} </answer>.") == right
    assert scored(row, "x") == {"reward": 0.01, "correct": False}
    with pytest.raises(ValueError, match="ValueError: no"):
        scored(rows_in(tmp_path / "made/raises.train.jsonl")[0], "x")
    assert scored(row, row["answer"]) == right, "one failure is one scoring's"


def test_a_task_that_draws_from_pythons_shared_random_numbers_makes_items_that_are_found_again(tmp_path, package):
    make_rows(data_of(tmp_path, {"global": 1.0}))
    rows = rows_in(tmp_path / "made/global.train.jsonl")
    assert all(str(eval(row["prompt"])) == row["answer"] for row in rows), "question and answer of one item"
    for row in reversed(rows):
        assert scored(row, row["answer"])["correct"]


def test_an_item_that_depends_on_the_order_of_a_set_is_found_again_by_another_process(tmp_path, package):
    """As those of isomorphic_strings do."""
    make_rows(data_of(tmp_path, {"set": 1.0}))
    for row in rows_in(tmp_path / "made/held_out.jsonl"):
        assert not scored(row, "x")["correct"]


def test_a_task_without_an_answer_of_its_own_is_scored_by_what_it_asks_for(tmp_path, package):
    """Where many answers are right, as with a colouring of a graph, the package names none."""
    make_rows(data_of(tmp_path, {"open": 1.0}))
    row = rows_in(tmp_path / "made/open.train.jsonl")[0]
    assert row["answer"] is None
    assert scored(row, str(eval(row["prompt"])))["correct"] and not scored(row, "x")["correct"]


def test_an_item_that_the_package_makes_otherwise_now_is_not_scored(tmp_path, package):
    make_rows(data_of(tmp_path))
    row = rows_in(tmp_path / "made/sums.train.jsonl")[0]
    row["reasoning_gym"]["digest"] = "0" * 16
    with pytest.raises(ValueError, match="sums 0: this reasoning-gym makes another item of that place"):
        scored(row, row["answer"])
    with pytest.raises(ValueError, match=r"is for prompts of data\.reasoning_gym"):
        scored({"prompt": "", "answer": ""}, "x")


def test_a_scorer_that_ended_fails_one_scoring_and_is_started_again(tmp_path, package):
    make_rows(data_of(tmp_path))
    row = rows_in(tmp_path / "made/sums.train.jsonl")[0]
    scored(row, "x")
    first = builtin._SCORERS[sys.executable].process
    os.kill(first.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"its process ended \(exit code -9\)"):
        scored(row, "x")
    assert scored(row, row["answer"])["correct"]
    first.end()


@pytest.mark.skipif(
    not REAL.exists(), reason="reasoning-gym is not installed; launch/setup.sh --tests does it, with a C compiler"
)
def test_the_real_package(tmp_path, monkeypatch):
    monkeypatch.setattr(builtin, "_SCORERS", {})
    python = str(REAL)
    data = data_of(tmp_path, {"leg_counting": 1.0, "chain_sum": 1.0}).model_copy(update={"procedural_python": python})
    made = re.search(r"^reasoning-gym==(\S+)", PINNED.read_text(encoding="utf-8"), re.MULTILINE)
    assert made is not None and make_rows(data)[0].endswith(f"(reasoning-gym {made[1]})")
    held_out = rows_in(tmp_path / "made/held_out.jsonl")
    assert len(held_out) == 20
    for row in held_out:
        assert scored(row, f"So it is <answer>{row['answer']}</answer>", python=python)["correct"]
        assert not scored(row, "nothing", python=python)["correct"]
    builtin._SCORERS[python].process.end()

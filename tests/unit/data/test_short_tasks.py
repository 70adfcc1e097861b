"""Short tasks: no problem is in both splits, and the built-in rewards read the answers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gspo_mega.data.short_tasks import TASKS
from gspo_mega.rewards.builtin import gsm8k
from gspo_mega.rewards.json_responses import json_schema

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("name", TASKS)
def test_splits_share_no_problem_and_seeds_differ(name):
    task = TASKS[name]
    train, heldout = (list(task.rows(split, 90, 1)) for split in ("train", "heldout"))
    prompts = {row["prompt"] for row in train}, {row["prompt"] for row in heldout}
    assert [len(found) for found in prompts] == [90, 90] and not prompts[0] & prompts[1]
    assert train == list(task.rows("train", 90, 1)) != list(task.rows("train", 90, 2))
    share = sum(task.split_of(problem) == "heldout" for problem in task.problems) / len(task.problems)
    assert 0.09 < share < 0.16


def test_too_many_problems_are_refused():
    with pytest.raises(ValueError, match="9000 train problems are asked for; there are 4"):
        list(TASKS["json"].rows("train", 9000, 1))


def test_rewards_accept_the_answer_and_nothing_else():
    options = dict(metadata={}, schema={"type": "object"}, compare=True)
    row = next(TASKS["json"].rows("train", 1, 1))
    value = json.loads(row["answer"])
    for response, right in (
        (row["answer"], True),
        (json.dumps(value | {"count": 0}), False),
        ("Sure! " + row["answer"], False),
    ):
        assert json_schema(prompt="", response=response, answer=row["answer"], **options)["correct"] is right

    rows = {row["prompt"]: row["answer"] for row in TASKS["arithmetic"].rows("train", 500, 1)}
    for prompt, answer in rows.items():
        _, _, a, operation, b, *_ = prompt.replace("?", "").split()
        assert int(answer) == {"times": int(a) * int(b), "plus": int(a) + int(b)}[operation]
        assert gsm8k(prompt=prompt, response=f"It is {answer}.", answer=answer, metadata={}) == 1
        assert gsm8k(prompt=prompt, response=f"It is {answer}1.", answer=answer, metadata={}) == 0


def test_the_tools_write_files_and_show_answers(tmp_path):
    def run(name: str, *words: object) -> subprocess.CompletedProcess:
        command = [sys.executable, ROOT / "tools" / name, *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    for _ in range(2):  # a second call changes nothing
        done = run("make_short_task.py", tmp_path, "--num-train", 8, "--num-heldout", 4)
        assert done.returncode == 0 and "8 train problems, 4 held-out problems" in done.stdout, done.stderr
    done = run("make_short_task.py", tmp_path, "--seed", 2, "--num-train", 8, "--num-heldout", 4)
    assert done.returncode == 2 and "these exist with other content" in done.stderr
    assert len((tmp_path / "train.jsonl").read_text().splitlines()) == 8

    line = dict(set="held_out", row=1, sample=0, prompt="templated", answer="x")
    (tmp_path / "before").write_text(json.dumps(line | dict(response="y", correct=False)) + "\n")
    (tmp_path / "after").write_text(json.dumps(line | dict(response="x\n", correct=True)) + "\n")
    (tmp_path / "prompts").write_text('{"prompt": "Which?"}\n')
    done = run("before_and_after.py", tmp_path / "prompts", tmp_path / "before", tmp_path / "after")
    assert done.stdout.splitlines() == ["Which?", '  before (wrong): "y"', '  after  (right): "x\\n"']
    done = run("before_and_after.py", tmp_path / "prompts", tmp_path / "train.jsonl", tmp_path / "after")
    assert done.returncode == 2 and "two files of `gspo-mega eval --out`" in done.stderr

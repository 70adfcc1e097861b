"""The shipped held-out sets: they load, and rows of the public data sets' columns pass their checks."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from pathlib import Path

import pytest

from gspo_mega.base.errors import DataError
from gspo_mega.config import load_config
from gspo_mega.config.prompt_sources import eval_sets
from gspo_mega.launcher import inputs

SHIPPED = Path(__file__).parents[3] / "configs" / "eval"
# Written by hand in the shape of the public data sets.
ROWS = {
    "gsm8k": {"question": "Ann has 4 pens and buys 3. How many?", "answer": "4 + 3 = <<4+3=7>>7 pens.\n#### 7"},
    "math500": {
        "problem": "Find $x$ if $2x = 1$.",
        "solution": "So $x = \\boxed{\\frac{1}{2}}$.",
        "answer": "\\frac{1}{2}",
        "subject": "Algebra",
        "level": 1,
        "unique_id": "test/algebra/1.json",
    },
    "mbpp": {
        "task_id": 1,
        "text": "Write a function to add two numbers.",
        "code": "def add(a, b): return a + b",
        "test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"],
        "test_setup_code": "",
    },
    "codeforces": {
        "id": "1/A",
        "description": "Print twice n.",
        "input_format": "One number n.",
        "output_format": None,
        "official_tests": [{"input": "2\n", "output": "4\n"}],
    },
    "humaneval": {
        "task_id": "HumanEval/0",
        "prompt": 'def double(n: int) -> int:\n    """Twice n."""\n',
        "entry_point": "double",
        "canonical_solution": "    return 2 * n\n",
        "test": "def check(candidate):\n    assert candidate(2) == 4\n",
    },
    "livecodebench": {
        "question_title": "Twice",
        "question_content": "Return twice n.",
        "platform": "leetcode",
        "starter_code": "class Solution:\n    def twice(self, n: int) -> int:\n        ",
        "public_test_cases": '[{"input": "2", "output": "4", "testtype": "functional"}]',
        "private_test_cases": base64.b64encode(
            zlib.compress(pickle.dumps('[{"input": "3", "output": "6", "testtype": "functional"}]'))
        ).decode(),
        "metadata": "{}",
    },
    "aime": {"id": 0, "problem": "Find the remainder of $7^{2}$ divided by 1000.", "answer": "049"},
}


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_shipped_set_reads_rows_of_its_data_set(path, tmp_path):
    file = tmp_path / "rows.jsonl"

    def load(row):
        file.write_text(json.dumps(row) + "\n")
        return load_config(path, [f"eval.sets.0.path={json.dumps(str(file))}", f"run.dir={tmp_path}"], "eval")

    loaded = load(ROWS[path.stem])
    (one,) = eval_sets(loaded.config.eval, loaded.config.data)
    assert one.name == path.stem and [entry.function for entry in one.reward] in (["gsm8k"], ["math"], ["code"])
    assert one.template is None or one.template.endswith(("within \\boxed{}.", "of Python code."))
    check_data(loaded)
    with pytest.raises(DataError, match=rf"rows.jsonl:1: no key '{one.data.prompt_key}'.*eval.sets.0.prompt_key choo"):
        check_data(load({"other": "x", one.data.answer_key: "7"}))


def check_data(loaded):
    """The check of the rows alone; the others need a model."""
    inputs._check_data(loaded, "eval")


def test_every_shipped_set_has_rows():
    assert {path.stem for path in SHIPPED.glob("*.yaml")} == set(ROWS)

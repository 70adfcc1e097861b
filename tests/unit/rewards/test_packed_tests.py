"""Tests as LiveCodeBench's rows hold them: read without running anything, called by the name that the starter code has."""

from __future__ import annotations

import base64
import json
import os
import pickle
import zlib

import pytest

from gspo_mega.rewards import code
from gspo_mega.rewards.code import listed_tests
from gspo_mega.rewards.functions import problem_of_answer

STDIN = {"input": "2\n", "output": "4\n", "testtype": "stdin"}
CALL = {"input": "[1, 2]\n3", "output": "6", "testtype": "functional"}
STARTER = "class Solution:\n    def addTo(self, numbers: List[int], more: int) -> int:\n        "


def packed(tests, protocol=4):
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests), protocol=protocol))).decode()


def row(public, private, starter="", metadata="{}"):
    return {
        "public_test_cases": json.dumps(public),
        "private_test_cases": private,
        "starter_code": starter,
        "metadata": metadata,
    }


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_compressed_tests_are_read(protocol):
    many = [STDIN | {"input": f"{k}\n"} for k in range(300)]
    tests = listed_tests(row([STDIN], packed(many, protocol)))
    assert len(tests) == 301 and tests[300].asked["input"] == "299\n" and tests[0].expected == "4\n"


def test_plain_tests_are_read():
    tests = listed_tests(row([STDIN], json.dumps([STDIN, STDIN])))
    assert [test.asked["input"] for test in tests] == ["2\n"] * 3
    assert len(listed_tests({"public_test_cases": [STDIN], "private_test_cases": None})) == 1


@pytest.mark.parametrize(
    ("starter", "metadata", "name"),
    [
        (STARTER, "{}", "addTo"),
        (STARTER, '{"func_name": "other"}', "other"),
        (STARTER, {"func_name": "other"}, "other"),
        ("def plain(a, b):", None, "plain"),
        ("def plain(a, b):\n    ", "no JSON", "plain"),
        ("class Solution:\n    def __init__(self):\n        pass\n\n    def last(self, x):\n", "", "last"),
    ],
)
def test_functional_tests_call_what_the_starter_code_names(starter, metadata, name):
    tests = listed_tests(row([CALL], packed([CALL]), starter, metadata))
    assert [test.asked["call"] for test in tests] == [{"function": name, "arguments": [[1, 2], 3]}] * 2
    assert tests[0].expected == 6


class Opens:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_pickle_that_is_no_text_is_refused_and_not_run(tmp_path):
    harm = base64.b64encode(zlib.compress(pickle.dumps(Opens(str(tmp_path / "made"))))).decode()
    assert "`private_test_cases` is no pickled text: it holds" in str(problem_of_answer(row([], harm), ["code"]))
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (row([], "no base64!"), "`private_test_cases` is neither JSON nor base64 of compressed tests: "),
        (row([], base64.b64encode(b"plain").decode()), "`private_test_cases` is neither JSON nor base64"),
        (row([], base64.b64encode(zlib.compress(b"x")).decode()), "`private_test_cases` is no pickled text: "),
        (row([], packed({"a": 1})), "`private_test_cases` is dict, no list of tests"),
        (row([], base64.b64encode(zlib.compress(pickle.dumps("{"))).decode()), "`private_test_cases` is no JSON: '{'"),
        (row([CALL], "[]"), "a functional test names no `function`, nor does starter code beside it"),
        (row([CALL], "[]", "not python ("), "a functional test names no `function`, nor does starter code"),
        (row([], "[]"), "the answer holds no test"),
    ],
)
def test_rows_that_cannot_be_read_are_refused(answer, said):
    problem = problem_of_answer(answer, ["code"])
    assert problem is not None and said in problem and problem.endswith("(reward code)")


def test_what_unpacks_to_too_much_is_refused(monkeypatch):
    monkeypatch.setattr(code, "_MOST_BYTES", 1000)
    problem = problem_of_answer(row([], packed([STDIN] * 100)), ["code"])
    assert problem is not None and "has more than 1000 bytes of tests" in problem

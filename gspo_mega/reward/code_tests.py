"""The tests of a program that a row of data holds, and whether what the program gave is what they expect.

Owns the forms of tests that are read, and the comparison. Running them is `programs.py`'s.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

from gspo_mega.reward import packed_tests

_MOST_TESTS = 10_000
_NUMBER = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_FORMS = (
    "valid: [{input, output}, ...], {inputs, outputs}, either with `function` for calls; a list of assert statements;"
    " {test, entry_point}; or LiveCodeBench's {public_test_cases, private_test_cases, starter_code}"
)


@dataclass(frozen=True)
class CodeTest:
    """One test. `asked`: `input`, `call` or `asserts`, as the sandbox takes them. `expected`: the output or the result;
    asserts expect True.
    """

    asked: dict[str, Any]
    expected: Any

    def passes(self, outcome: dict[str, Any], tolerance: float) -> bool:
        """Whether a run of the program ended well with what is expected."""
        if outcome["ended"] != "done":
            return False
        if "input" in self.asked:
            return same_output(outcome["said"], self.expected, tolerance)
        return "result" in outcome and same_value(outcome["result"], self.expected, tolerance)


def problem_of_code_answer(answer: Any) -> str | None:
    """Why an answer of a data file is no list of tests, or None."""
    try:
        listed_tests(answer)
    except ValueError as error:
        return str(error)
    return None


def listed_tests(answer: Any) -> list[CodeTest]:
    """The tests that a row's answer is, or the JSON in its text. Raises ValueError with what is wrong."""
    if isinstance(answer, str):
        try:
            answer = json.loads(answer)
        except (ValueError, RecursionError):
            raise ValueError(f"the answer {answer[:60]!r} is no JSON of tests; {_FORMS}") from None
    tests = list(_listed(answer))
    if not tests:
        raise ValueError(f"the answer holds no test; {_FORMS}")
    if len(tests) > _MOST_TESTS:
        raise ValueError(f"the answer holds {len(tests)} tests; at most {_MOST_TESTS}")
    return tests


def _listed(answer: Any) -> list[CodeTest]:
    if isinstance(answer, dict) and packed_tests.KEYS[0] in answer:
        tests, function = packed_tests.unpacked(answer)
        return [_test(one, function if _is_functional(one) else None) for one in tests]
    if isinstance(answer, dict):
        function = answer.get("function") or answer.get("fn_name")
        if "inputs" in answer and "outputs" in answer:
            inputs, outputs = answer["inputs"], answer["outputs"]
            if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
                raise ValueError("`inputs` and `outputs` are not two lists of one length")
            return [_test({"input": one, "output": two}, function) for one, two in zip(inputs, outputs)]
        if isinstance(answer.get("test"), str) and isinstance(answer.get("entry_point"), str):
            return [CodeTest({"asserts": f"{answer['test']}\n\ncheck({answer['entry_point']})\n"}, True)]
        if isinstance(answer.get("tests"), list):
            return [_test(one, function) for one in answer["tests"]]
    if isinstance(answer, list):
        return [_test(one, None) for one in answer]
    raise ValueError(f"the answer is {type(answer).__name__}, no list of tests; {_FORMS}")


def _is_functional(one: Any) -> bool:
    return isinstance(one, dict) and one.get("testtype") == "functional"


def _test(one: Any, function: Any) -> CodeTest:
    if isinstance(one, str):
        return CodeTest({"asserts": one}, True)
    if not isinstance(one, dict) or "input" not in one or "output" not in one:
        raise ValueError(f"the test {str(one)[:60]!r} is none; {_FORMS}")
    function = one.get("function") or one.get("fn_name") or function
    given, expected = one["input"], one["output"]
    if function is None:
        if one.get("testtype") == "functional":
            raise ValueError("a functional test names no `function`, nor does starter code beside it")
        return CodeTest({"input": _text(given)}, _text(expected))
    if not isinstance(function, str):
        raise ValueError(f"`function` is {function!r}, no name")
    if isinstance(given, str):  # a JSON value per line
        try:
            given = [json.loads(line) for line in given.splitlines() if line.strip()]
            expected = json.loads(expected) if isinstance(expected, str) else expected
        except ValueError:
            raise ValueError(f"the test of {function} has arguments that are no JSON: {given[:60]!r}") from None
    if not isinstance(given, list):
        raise ValueError(f"the test of {function} has arguments that are no list: {str(given)[:60]!r}")
    return CodeTest({"call": {"function": function, "arguments": given}}, expected)


def _text(value: Any) -> str:
    """What a program reads or writes: a text, or the lines of one."""
    if isinstance(value, list):
        return "\n".join(str(line) for line in value) + "\n"
    return value if isinstance(value, str) else str(value)


def same_output(given: str, expected: str, tolerance: float) -> bool:
    """Whether two outputs are the same, apart from white space at the ends of lines and of the whole; numbers with a
    point or an exponent may differ by `tolerance`.
    """
    ours, theirs = ([line.rstrip() for line in text.strip().splitlines()] for text in (given, expected))
    if ours == theirs:
        return True
    pairs = [(one.split(), two.split()) for one, two in zip(ours, theirs)]
    return len(ours) == len(theirs) and all(
        len(one) == len(two) and all(_same_word(a, b, tolerance) for a, b in zip(one, two)) for one, two in pairs
    )


def _same_word(given: str, expected: str, tolerance: float) -> bool:
    if given == expected:
        return True
    if not (set(expected + given) & set(".eE") and _NUMBER.fullmatch(given) and _NUMBER.fullmatch(expected)):
        return False
    return math.isclose(float(given), float(expected), rel_tol=tolerance, abs_tol=tolerance)


def same_value(given: Any, expected: Any, tolerance: float) -> bool:
    """Whether two values of JSON are the same, however deep they are nested. Numbers of which one is no whole number
    may differ by `tolerance`.
    """
    pairs = [(given, expected)]
    while pairs:
        one, two = pairs.pop()
        if isinstance(one, list) and isinstance(two, list) and len(one) == len(two):
            pairs += zip(one, two)
        elif isinstance(one, dict) and isinstance(two, dict) and one.keys() == two.keys():
            pairs += ((one[key], two[key]) for key in one)
        elif not _is_same_scalar(one, two, tolerance):
            return False
    return True


def _is_same_scalar(given: Any, expected: Any, tolerance: float) -> bool:
    if isinstance(given, list | dict) or isinstance(expected, list | dict):
        return False
    if isinstance(given, bool) or isinstance(expected, bool):
        return given is expected
    if isinstance(given, int | float) and isinstance(expected, int | float):
        if isinstance(given, int) and isinstance(expected, int):
            return given == expected
        try:
            return math.isclose(given, expected, rel_tol=tolerance, abs_tol=tolerance)
        except OverflowError:  # a whole number beyond every float
            return False
    return given == expected

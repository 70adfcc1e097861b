"""The tests of a program that a row of data holds, and whether what the program gave is what they expect.

Owns the forms of tests that are read, and the comparison. Running them is `programs.py`'s.
"""

from __future__ import annotations

import ast
import json
import math
import re
import textwrap
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from gspo_mega.rewards import packed_tests

_MOST_TESTS = 10_000
_NUMBER = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_FORMS = (
    "valid: [{input, output}, ...], {inputs, outputs}, either with `function` for calls; a list of assert statements;"
    " {test, entry_point}, also with `prompt`; {test_list}, also with `test_setup_code` or `test_imports`; or"
    " LiveCodeBench's {public_test_cases, private_test_cases, starter_code}"
)


@dataclass(frozen=True)
class CodeTest:
    """One test. `asked`: `input`, `call` or `asserts`, as the sandbox takes them, and a `prelude` that runs before the
    program. `expected`: the output or the result; asserts expect True. `is_exact`: nothing may differ by the tolerance.
    `begun`: the beginning of a function and its name, which a program may continue instead of defining it anew.
    """

    asked: dict[str, Any]
    expected: Any
    is_exact: bool = False
    begun: tuple[str, str] | None = None

    def whole(self, program: str) -> str:
        """The program; one that continues the function that is begun follows that beginning."""
        if self.begun is None or re.search(rf"(?m)^[ \t]*(?:async\s+)?def\s+{re.escape(self.begun[1])}\b", program):
            return program
        body = program if program[:1] in (" ", "\t") else textwrap.indent(program, "    ")
        whole = f"{self.begun[0].rstrip()}\n{body}"
        return whole if _is_python(whole) else program

    def passes(self, outcome: dict[str, Any], tolerance: float) -> bool:
        """Whether a run of the program ended well with what is expected."""
        if outcome["ended"] != "done":
            return False
        if self.is_exact and "input" in self.asked:
            return same_lines(outcome["said"], self.expected)
        if self.is_exact:
            return "result" in outcome and bool(outcome["result"] == self.expected)
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
        listed = [_test(one, function if _is_functional(one) else None) for one in tests]
        return [CodeTest({"prelude": packed_tests.PRELUDE} | one.asked, one.expected, is_exact=True) for one in listed]
    if isinstance(answer, dict):
        function = answer.get("function") or answer.get("fn_name")
        if "inputs" in answer and "outputs" in answer:
            inputs, outputs = answer["inputs"], answer["outputs"]
            if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
                raise ValueError("`inputs` and `outputs` are not two lists of one length")
            return [_test({"input": one, "output": two}, function) for one, two in zip(inputs, outputs)]
        if isinstance(answer.get("test"), str) and isinstance(answer.get("entry_point"), str):
            asked = {"asserts": f"{answer['test']}\n\ncheck({answer['entry_point']})\n"}
            if not answer.get("prompt"):
                return [CodeTest(asked, True)]
            prelude = _prelude("prompt", answer["prompt"])
            return [CodeTest({"prelude": prelude} | asked, True, begun=(prelude, answer["entry_point"]))]
        if isinstance(answer.get("test_list"), list):
            lines = [*(answer.get("test_imports") or []), answer.get("test_setup_code") or ""]
            prelude = _prelude("test_setup_code", "\n".join(map(str, lines)).strip())
            tests = [_test(one, None) for one in answer["test_list"]]
            return [CodeTest({"prelude": prelude} | one.asked, one.expected) for one in tests] if prelude else tests
        if isinstance(answer.get("tests"), list):
            return [_test(one, function) for one in answer["tests"]]
    if isinstance(answer, list):
        return [_test(one, None) for one in answer]
    raise ValueError(f"the answer is {type(answer).__name__}, no list of tests; {_FORMS}")


def _prelude(key: str, text: Any) -> str:
    if not isinstance(text, str) or not _is_python(text):
        raise ValueError(f"`{key}` is no Python: {str(text)[:60]!r}")
    return text


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


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


def same_lines(given: str, expected: str) -> bool:
    """Whether two outputs have the same lines apart from white space around them; a line of numbers has to have the
    same values, exactly, however they are written. LiveCodeBench's rule.
    """
    ours, theirs = ([line.strip() for line in text.strip().split("\n")] for text in (given, expected))
    if len(ours) != len(theirs):
        return False
    return all(one == two or _same_decimals(one, two) for one, two in zip(ours, theirs))


def _same_decimals(one: str, two: str) -> bool:
    try:
        return [Decimal(word) for word in one.split()] == [Decimal(word) for word in two.split()]
    except InvalidOperation:
        return False


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
    one, two = float(given), float(expected)
    if math.isinf(one) or math.isinf(two):  # beyond every float, where all are alike
        return _same_decimals(given, expected)
    return _is_close(one, two, tolerance)


def _is_close(given: float, expected: float, tolerance: float) -> bool:
    """Whether two numbers differ by at most `tolerance`: of their size, or, where 0 is expected, of 1."""
    return math.isclose(given, expected, rel_tol=tolerance, abs_tol=0.0 if expected else tolerance)


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
            return _is_close(given, expected, tolerance)
        except OverflowError:  # a whole number beyond every float
            return False
    return given == expected

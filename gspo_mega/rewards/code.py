"""The built-in reward `code`: which of a row's tests does the program in a response pass?

`code` finds the program, runs it against the tests in a process of the sandbox (`sandbox/sandbox_server.py`), and
counts its time. What the tests expect never reaches that process, except in assert statements, which run there: outputs
and results are compared here.

Tests are read in several forms (`listed_tests`), among them those of LiveCodeBench's rows (`unpacked`): JSON texts or
compressed texts, and the function that starter code names. A compressed text is a pickle, which is read without
executing it.
"""

from __future__ import annotations

import ast
import base64
import binascii
import collections
import json
import math
import pickletools
import re
import sys
import tempfile
import textwrap
import zlib
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from gspo_mega.base.errors import RewardError
from gspo_mega.base.processes import DEFAULT_TOTAL_SECONDS, LineProcess
from gspo_mega.rewards.blame import HeldUp
from gspo_mega.rewards.fenced_code import program_of

KEYS = ("public_test_cases", "private_test_cases")
# LiveCodeBench's own harness runs this before a program: it imports these modules and the names in them, and raises the
# recursion limit. Its starter code uses `List` without importing it.
_MODULES = (
    "string re datetime collections heapq bisect copy math random statistics itertools functools operator io sys json"
)
PRELUDE = (
    "".join(f"from {name} import *\n" for name in [*_MODULES.split(), "builtins", "typing"])
    + "".join(f"import {name}\n" for name in _MODULES.split())
    + "sys.setrecursionlimit(50000)\n"
)
_MOST_BYTES = 1024**3
# The operations of a pickle of one text, except the text itself.
_AROUND = {"PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT", "STOP"}


def unpacked(row: dict[str, Any]) -> tuple[list[Any], str | None]:
    """Return the tests of a row's public and private test cases, and the function that functional ones call. Raises
    ValueError with what is wrong.
    """
    tests = [test for key in KEYS if row.get(key) for test in _tests(key, row[key])]
    return tests, _function_of(row.get("metadata"), row.get("starter_code"))


def _tests(key: str, value: Any) -> list[Any]:
    if isinstance(value, str):
        text = value if value.lstrip()[:1] == "[" else _decompressed(key, value)
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            raise ValueError(f"`{key}` is no JSON: {text[:60]!r}") from None
    if not isinstance(value, list):
        raise ValueError(f"`{key}` is {type(value).__name__}, no list of tests")
    return value


def _decompressed(key: str, packed: str) -> str:
    """Return the text in `packed`, which is a pickled text, compressed by zlib and encoded in base64. Raises
    ValueError.
    """
    try:
        stream = zlib.decompressobj()
        content = stream.decompress(base64.b64decode(packed, validate=True), _MOST_BYTES)
    except (binascii.Error, zlib.error, ValueError) as error:
        raise ValueError(f"`{key}` is neither JSON nor base64 of compressed tests: {error}") from None
    if stream.unconsumed_tail:
        raise ValueError(f"`{key}` has more than {_MOST_BYTES} bytes of tests")
    texts = []
    try:
        for operation, argument, _ in pickletools.genops(content):
            if "UNICODE" in operation.name:
                texts.append(argument)
            elif operation.name not in _AROUND:
                raise ValueError(f"it holds {operation.name}")
    except Exception as error:  # pickletools raises several kinds for bytes that are no pickle
        raise ValueError(f"`{key}` is no pickled text: {error}") from None
    if len(texts) != 1:
        raise ValueError(f"`{key}` is no pickled text: it holds {len(texts)}")
    return texts[0]


def _function_of(metadata: Any, starter: Any) -> str | None:
    """Return the function name that `metadata` gives (func_name), or that of the last function in the starter code."""
    if isinstance(metadata, str):
        try:
            metadata = json.loads(metadata)
        except ValueError:
            metadata = None
    if isinstance(metadata, dict) and isinstance(metadata.get("func_name"), str):
        return metadata["func_name"]
    if not isinstance(starter, str):
        return None
    for body in ("pass", "    pass", "        pass"):  # the last function of the starter code has no body
        try:
            tree = ast.parse(f"{starter.rstrip()}\n{body}\n")
        except (SyntaxError, ValueError):
            continue
        names = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        names = [name for name in names if not name.startswith("__")]
        return names[-1] if names else None
    return None


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
    program. `expected`: the output or the result; asserts expect True. `is_exact`: the tolerance does not apply.
    `begun`: the beginning of a function and its name, which a program may continue instead of defining it anew.
    """

    asked: dict[str, Any]
    expected: Any
    is_exact: bool = False
    begun: tuple[str, str] | None = None

    def whole(self, program: str) -> str:
        """Return the whole program; if it continues the function that `begun` begins, that beginning comes first."""
        if self.begun is None or re.search(rf"(?m)^[ \t]*(?:async\s+)?def\s+{re.escape(self.begun[1])}\b", program):
            return program
        body = program if program[:1] in (" ", "\t") else textwrap.indent(program, "    ")
        whole = f"{self.begun[0].rstrip()}\n{body}"
        return whole if _is_python(whole) else program

    def passes(self, outcome: dict[str, Any], tolerance: float) -> bool:
        """Return whether a run of the program ended well and gave what is expected."""
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
    """Return why an answer of a data file is no list of tests, or None."""
    try:
        listed_tests(answer)
    except ValueError as error:
        return str(error)
    return None


def listed_tests(answer: Any) -> list[CodeTest]:
    """Return the tests in a row's answer, which may also be a JSON text. Raises ValueError with what is wrong."""
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
    if isinstance(answer, dict) and KEYS[0] in answer:
        tests, function = unpacked(answer)
        listed = [_test(one, function if _is_functional(one) else None) for one in tests]
        return [CodeTest({"prelude": PRELUDE} | one.asked, one.expected, is_exact=True) for one in listed]
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
    """Return a program's input or output as text; it may be given as lines."""
    if isinstance(value, list):
        return "\n".join(str(line) for line in value) + "\n"
    return value if isinstance(value, str) else str(value)


def same_lines(given: str, expected: str) -> bool:
    """Return whether two outputs have the same lines apart from white space around them; a line of numbers has to have
    the same values, exactly, however they are written. LiveCodeBench's rule.
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
    """Return whether two outputs are the same, apart from white space at the ends of lines and of the whole; numbers
    with a point or an exponent may differ by `tolerance`.
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
    """Return whether two numbers differ by at most `tolerance`: relative to their size, or in absolute terms if 0 is
    expected.
    """
    return math.isclose(given, expected, rel_tol=tolerance, abs_tol=0.0 if expected else tolerance)


def same_value(given: Any, expected: Any, tolerance: float) -> bool:
    """Return whether two JSON values are the same, however deep they are nested. Two numbers may differ by `tolerance`
    unless both are integers.
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


WALLS = ("auto", "namespaces", "landlock")
# A test may sleep as long again as it may compute, and this many seconds more.
_WAIT = 1.0
# On a busy machine, a test may take this many times its own time; after that the scoring is tried again.
_BUSY = 4
# What a test costs the sandbox in addition to the program's own time, on a machine that is free.
_EACH_SECONDS = 0.005
# How a test that broke a limit ended, by the name of the share of such tests among the parts of the reward.
_ENDS = {"timed_out": "time", "out_of_memory": "memory", "over_output": "output", "killed": "killed"}
_SERVER = Path(__file__).parent / "sandbox" / "sandbox_server.py"
_SERVERS: dict[str, LineProcess] = {}
_HELD_UP = {
    "held_up": "a program did not get the processor time that it may use: the machine is busy",
    "lost": "a program was killed by somebody else, or could not begin: the machine's memory may be exhausted",
}


def check_code(
    seconds: float = 2.0,
    total_seconds: float = DEFAULT_TOTAL_SECONDS,
    memory_bytes: int = 512 * 1024**2,
    folder_bytes: int = 64 * 1024**2,
    output_bytes: int = 1024**2,
    partial: bool = True,
    tolerance: float = 1e-6,
    python: str | None = None,
    isolation: str = "auto",
    unsafe: bool = False,
) -> None:
    """Start the sandbox before the first scoring has a deadline.

    Raises RewardError if an option is not valid, or if this machine provides no isolation and `unsafe` is not set.
    """
    numbers = {"seconds": seconds, "total_seconds": total_seconds, "memory_bytes": memory_bytes}
    for name, value in (numbers | {"folder_bytes": folder_bytes, "output_bytes": output_bytes}).items():
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise RewardError(f"reward 'code': {name} is {value!r}; a number above 0 is expected")
    if isolation not in WALLS:
        raise RewardError(f"reward 'code': isolation is {isolation!r}; valid: {', '.join(WALLS)}")
    if not isinstance(unsafe, bool):
        raise RewardError(f"reward 'code': unsafe is {unsafe!r}; true or false is expected")
    if unsafe and isolation != "auto":
        raise RewardError("reward 'code': unsafe contradicts isolation; keep one of them")
    _server(_settings(memory_bytes, folder_bytes, output_bytes, isolation, unsafe), python or sys.executable)


def code(
    *,
    prompt: str,
    response: str,
    answer: Any,
    metadata: dict[str, Any],
    seconds: float = 2.0,
    total_seconds: float = DEFAULT_TOTAL_SECONDS,
    memory_bytes: int = 512 * 1024**2,
    folder_bytes: int = 64 * 1024**2,
    output_bytes: int = 1024**2,
    partial: bool = True,
    tolerance: float = 1e-6,
    python: str | None = None,
    isolation: str = "auto",
    unsafe: bool = False,
) -> dict[str, float | bool]:
    """Return the share of the row's tests that the program in the response passes; with `partial: false`, 1 if it
    passes all, else 0. Its parts: `passed`, the share, and the shares of tests that the program ended otherwise:
    `timed_out`, `out_of_memory`, `over_output`, and `killed`, by a signal of its own or a system call that is refused.

    A test may compute for `seconds`; all of them together take `total_seconds`, and tests that are left then count as
    timed out. Time that a program waited for the machine does not count.

    Raises ValueError if the answer is no list of tests, HeldUp if the machine did not let a program run to its end, and
    RuntimeError if the sandbox failed.
    """
    tests = listed_tests(answer)
    program = program_of(response)
    if program is None:
        return {"reward": 0.0, "correct": False, "passed": 0.0, **dict.fromkeys(_ENDS, 0.0)}
    settings = _settings(memory_bytes, folder_bytes, output_bytes, isolation, unsafe)
    passed, spent = 0, 0.0
    ends: collections.Counter[str] = collections.Counter()
    for index, test in enumerate(tests):
        left = total_seconds - spent
        if left <= 0:
            ends["time"] += len(tests) - index
            break
        own = min(2 * seconds + _WAIT, left)
        limits = {"seconds": seconds, "wall_seconds": own, "most_seconds": _BUSY * own}
        outcome, took = _run({"program": test.whole(program)} | test.asked | limits, settings, python or sys.executable)
        if outcome["ended"] in ("held_up", "lost"):
            raise HeldUp(_HELD_UP[outcome["ended"]])
        spent += took + _EACH_SECONDS
        won = test.passes(outcome, tolerance)
        passed += won
        ends[outcome["ended"]] += 1
        if not won and not partial:
            break
    right = passed == len(tests)
    share = passed / len(tests)
    return {
        "reward": share if partial else float(right),
        "correct": right,
        "passed": share,
        **{name: ends[ended] / len(tests) for name, ended in _ENDS.items()},
    }


def _settings(memory_bytes: float, folder_bytes: float, output_bytes: float, isolation: str, unsafe: bool) -> str:
    return json.dumps(
        {
            "walls": "none" if unsafe else isolation,
            "memory_bytes": int(memory_bytes),
            "file_bytes": int(folder_bytes),
            "folder_bytes": int(folder_bytes),
            "output_bytes": int(output_bytes),
        }
    )


def _server(settings: str, python: str) -> LineProcess:
    """Return the running sandbox of these settings, started if there is none."""
    key = f"{python} {settings}"
    if key not in _SERVERS:
        environment = {
            "PATH": "/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "PYTHONHASHSEED": "0",
            "TMPDIR": tempfile.gettempdir(),
        }
        try:
            server = LineProcess([python, "-s", "-P", str(_SERVER), settings], environment)
        except OSError as error:
            raise RewardError(f"reward 'code': {python} cannot be started: {error}") from error
        if "ready" not in server.greeting:
            raise RewardError(
                f"reward 'code': this machine does not let programs be run behind walls ({server.greeting['error']})."
                " Allow unprivileged user name spaces, or use a kernel with Landlock (Linux 6.2 or newer). Where the"
                " whole run is isolated from outside, the option `unsafe: true` runs them without"
            )
        _SERVERS[key] = server
    return _SERVERS[key]


def _ask(message: dict[str, Any], settings: str, python: str) -> dict[str, Any]:
    """Return how one test ended: `ended`, `said` and, if it gave one that is JSON, `result`. Raises RuntimeError."""
    return _run(message, settings, python)[0]


def _run(message: dict[str, Any], settings: str, python: str) -> tuple[dict[str, Any], float]:
    """Return the result of `_ask`, and the program's own seconds."""
    server = _server(settings, python)
    outcome = server.ask(message)
    if "ended" not in outcome:
        _SERVERS.pop(f"{python} {settings}", None)
        server.end()
        raise RuntimeError(f"the sandbox failed: {outcome['error']}")
    took = outcome.pop("took")
    if "result" in outcome:
        try:
            outcome["result"] = json.loads(outcome["result"])
        except (ValueError, RecursionError):  # no JSON, of too many digits, or nested too deep: no result
            del outcome["result"]
            outcome["ended"] = "raised"
    return outcome, took

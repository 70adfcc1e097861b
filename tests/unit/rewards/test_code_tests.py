"""The tests that a row holds for the reward `code`: the forms that are read, what is refused, and the comparison."""

import json
import time

import pytest

from gspo_mega.rewards.code import code, listed_tests, same_output, same_value
from gspo_mega.rewards.fenced_code import program_of
from gspo_mega.rewards.functions import problem_of_answer


@pytest.mark.parametrize(
    ("answer", "asked", "expected"),
    [
        ([{"input": "1\n", "output": "2\n"}], {"input": "1\n"}, "2\n"),
        ({"inputs": ["1\n"], "outputs": ["2\n"]}, {"input": "1\n"}, "2\n"),
        ({"inputs": [["1", "2"]], "outputs": [["3"]]}, {"input": "1\n2\n"}, "3\n"),
        ([{"input": "1", "output": "2", "testtype": "stdin"}], {"input": "1"}, "2"),
        ({"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}, {"call": {"function": "add", "arguments": [1, 2]}}, 3),
        (
            {"function": "f", "tests": [{"input": '[1]\n"a"', "output": "[2]"}]},
            {"call": {"function": "f", "arguments": [[1], "a"]}},
            [2],
        ),
        ([{"function": "f", "input": [1], "output": None}], {"call": {"function": "f", "arguments": [1]}}, None),
        (["assert f(1) == 2"], {"asserts": "assert f(1) == 2"}, True),
        (
            {"test": "def check(c): assert c(1)", "entry_point": "f"},
            {"asserts": "def check(c): assert c(1)\n\ncheck(f)\n"},
            True,
        ),
    ],
)
def test_forms(answer, asked, expected):
    for form in (answer, json.dumps(answer)):
        (test,) = listed_tests(form)
        assert test.asked == asked and test.expected == expected
        assert problem_of_answer(form, ["code"]) is None


@pytest.mark.parametrize("label", ["python3.11", "Python3", "solution.py", "py3"])
@pytest.mark.parametrize("after", ["print(f(1))", "result = f(1)\nprint(result)", "assert f(1) == 2", ">>> f(1)\n2"])
def test_an_example_of_the_use_is_no_program(label, after):
    program = "def f(x):\n    return x + 1\n"
    assert program_of(f"```{label}\n{program}```\nFor example:\n```python\n{after}\n```\n") == program


@pytest.mark.parametrize("later", ["x = 1\nprint(x)\n", "def g(x):\n    return f(x)\n", "f = abs\nprint(f(1))\n"])
def test_a_later_program_is_the_program(later):
    assert program_of(f"```python\ndef f(x):\n    return x\n```\nBetter:\n```python\n{later}```\n") == later


@pytest.mark.parametrize("end", ["</think>", "</THINK>", "[/THINK]", "\u25c1/think\u25b7"])
def test_the_program_follows_the_thinking(end):
    assert program_of(f"```python\nprint(0)\n```\n{end}\n```\nprint(1)\n```\n") == "print(1)\n"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("x", "'x' is no JSON of tests; valid: [{input, output}, ...]"),
        (None, "NoneType, no list of tests"),
        ([], "holds no test"),
        ({}, "dict, no list of tests"),
        ([{"input": "1"}], "is none; valid"),
        ([3], "the test '3' is none"),
        ({"inputs": ["1"], "outputs": []}, "not two lists of one length"),
        ([{"input": "1", "output": "1", "testtype": "functional"}], "names no `function`"),
        ({"function": "f", "tests": [{"input": "{", "output": "1"}]}, "arguments that are no JSON"),
        ({"function": "f", "tests": [{"input": 3, "output": 1}]}, "arguments that are no list"),
        ({"function": 3, "tests": [{"input": [], "output": 1}]}, "is 3, no name"),
        ([""] * 10_001, "10001 tests; at most 10000"),
    ],
)
def test_answers_without_tests_are_refused(answer, said):
    problem = problem_of_answer(answer, ["code"])
    assert problem is not None and said in problem and problem.endswith("(reward code)")


@pytest.mark.parametrize(
    ("given", "expected", "same"),
    [
        ("3\n", "3", True),
        (" 3 \n4 \n\n", "3\n4", True),
        ("3 4", "3\n4", False),
        ("3", "4", False),
        ("0.3333333333", "0.33333333", True),
        ("0.34", "0.33", False),
        ("1e0", "1.0", True),
        ("10000000", "10000001", False),
        ("a 1.0", "a 1", True),
        ("0.0000012", "0.0000013", False),
        ("1.2e-9", "1.2000001e-9", True),
        ("0.0", "0.0000005", False),
        ("0.0000005", "0.0", True),
        ("nan", "nan", True),
        ("1.0e", "1.0", False),
        ("", "", True),
        ("1e999", "1" + "0" * 400, False),
        ("1e400", "1" + "0" * 400, True),
        ("1" + "0" * 400, "9e999", False),
        ("-1e999", "-9e999999", False),
    ],
)
def test_outputs(given, expected, same):
    assert same_output(given, expected, 1e-6) is same


@pytest.mark.parametrize(
    ("given", "expected", "same"),
    [
        (1, 1, True),
        (1, 1.0, True),
        (1, True, False),
        (True, 1, False),
        (1.0000000001, 1, True),
        (10**20, 10**20 + 1, False),
        ([1, [2]], [1, [2]], True),
        ([1], [1, 2], False),
        ({"a": 0.1 + 0.2}, {"a": 0.3}, True),
        ({"a": 1}, {"b": 1}, False),
        (1.6e-19, 9.1e-31, False),
        (1e-9, 0, True),
        (0, 1e-9, False),
        ("1", 1, False),
        (None, None, True),
        (None, False, False),
    ],
)
def test_values(given, expected, same):
    assert same_value(given, expected, 1e-6) is same


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\nx = 1\n```", "x = 1\n"),
        ("```\nx\n```", "x\n"),
        ("so\n```Python3\nx\n```\nor\n```py\ny\n```\nend", "y\n"),
        ("```python\nx\n```\n```text\nout\n```", "x\n"),
        ("```python\nx\n```\n```python\nunfinished", "x\n"),
        ("```python\nx", "x\n"),  # an open block runs to the end
        ("x = 1", None),
        ("```cpp\nx\n```", None),
        ('```python\ns = "```"\n```', 's = "```"\n'),
    ],
)
def test_the_program_of_a_response(response, program):
    assert program_of(response) == program


END = "```python\nprint(1)\n```"
DRAFT = "```python\nx = 0\n```"


@pytest.mark.parametrize(
    "response",
    [
        f"<think>\n```python\nx = 0\n\nno, better:\n</think>\nHere:\n{END}",
        f"<think>\n{DRAFT}\n</think>\n{END}",
        f"<think>so ```python\nx = 0\n```</think>\n{END}",
        f"<think>\n```\nx = 0\n```</think>\n\n{END}\n",
        f"n -> 2n\n```\n\nFinal:\n{END}",
        f"```\n```\n{END}",
        f"~~~\nstray\n~~~\n{END}",
        f"{DRAFT}\n\n```\n\n{END}",
        f"{END}\n```",
        f"{END}\n\n```\n1\n```\n",
        f"{END}\nOutput:\n```text\n1\n```",
        f"{END}\nRun it:\n```bash\npython a.py\n```",
        f"{END}\n```python\ndef (\n```",
        f"{DRAFT}\nbetter:\n{END}",
        "````python\nprint(1)\n````",
        "`````\nprint(1)\n`````",
        "````markdown\n```python\nprint(1)\n```\n````",
        "```markdown\n# Title\n```python\nprint(1)\n```\n```",
        "~~~python\nprint(1)\n~~~",
        "~~~~\nprint(1)\n~~~~",
        "~~~py\nprint(1)\n~~~\n",
        "1. Program:\n\n   ```python\n   print(1)\n   ```\n2. Done",
        "- Program:\n\n\t```python\n\tprint(1)\n\t```\n",
        "- ```python\n  print(1)\n  ```",
        "10. ```python\n    print(1)\n    ```",
        "   ```python\n   print(1)\n```",
        "      ```python\nprint(1)\n      ```",
        "> ```python\n> print(1)\n> ```\n",
        "> ```python\n> print(1)\n\nAfter the quotation.",
        "```python title=a.py\nprint(1)\n```",
        '```python title="a file.py" linenums="1"\nprint(1)\n```',
        "```python:a.py\nprint(1)\n```",
        "```python3 {highlight: [1]}\nprint(1)\n```",
        "```{.python .numberLines}\nprint(1)\n```",
        "```{python}\nprint(1)\n```",
        "``` python\nprint(1)\n```",
        "```Python\nprint(1)\n```",
        "```PY\r\nprint(1)\r\n```\r\n",
        "```python\nprint(1)```",
        "```python\nprint(1) ```\nThat is it.",
        "Here it is: ```python\nprint(1)\n```",
        "**Answer:** ```python\nprint(1)\n```\n",
        "```python\nprint(1)\n```  \nThat is it.",
        "```python\nprint(1)\n``` That is it.",
        "```python\nprint(1)\n```<|im_end|>",
        "```python\nprint(1)\n`````",
        "```python\nprint(1)\n",
        "<think>no code here</think>\n```python\nprint(1)\n",
        "Use `x` and ```y``` here.\n\n" + END,
        "```python print(1)```",
        f"{END}\nThis takes O(n) and `print` writes it. ```",
    ],
)
def test_no_fence_costs_another_blocks_program(response):
    assert (program_of(response) or "").strip() == "print(1)"


@pytest.mark.parametrize(
    "program",
    [
        's = "```"\nprint(s)\n',
        'def f():\n    """Example:\n\n    ```python\n    f()\n    ```\n    """\n    return 1\n',
        "s = '''\n~~~\n'''\nprint(s)\n",
        "if True:\n    if True:\n\n        print(1)\n",
        "\n\nprint(1)\n",
        "print(1)  # `x`\n",
    ],
)
def test_a_program_keeps_every_character(program):
    assert program_of(f"so\n```python\n{program}```\nend") == program
    assert program_of(f"so\n\n````py\n{program}````") == program
    indented = "".join(f"   {line}" if line.strip() else line for line in program.splitlines(keepends=True))
    assert program_of(f"1. so\n\n   ```python\n{indented}   ```\n") == program


@pytest.mark.parametrize(
    "response", ["", "print(1)", "```cpp\nx\n```", "```json\n{}\n```", "```bash\nls\n```\n", "`print(1)`", "~~~js\nx"]
)
def test_what_holds_no_program(response):
    assert program_of(response) is None


@pytest.mark.parametrize("text", ["```\n" * 20_000, "`" * 65_000, "```python\n" * 6000, "> " * 30_000, "~~~`" * 16_000])
def test_finding_a_program_is_quick_in_any_text(text):
    began = time.process_time()
    program_of(text)
    assert time.process_time() - began < 10  # what grows with the square takes minutes


def lcb(tests, starter="", function=None):
    """A row of LiveCodeBench."""
    return {
        "public_test_cases": json.dumps(tests),
        "private_test_cases": "[]",
        "starter_code": starter,
        "metadata": json.dumps({"func_name": function} if function else {}),
    }


def stdin(given, output):
    return lcb([{"input": given, "output": output, "testtype": "stdin"}])


STARTER = "class Solution:\n    def countM(self, details: List[str]) -> int:\n        "
HUMANEVAL = {
    "prompt": "from typing import List\n\n\ndef twice(x):\n    return 2 * x\n\n\ndef f(xs: List[int]) -> int:\n"
    '    """Doubled."""\n',
    "test": "def check(candidate):\n    assert candidate([1, 2]) == 6\n",
    "entry_point": "f",
}
MBPP = {
    "test_list": ["assert f(R(3)) == 3"],
    "test_setup_code": "class R:\n    def __init__(self, v):\n        self.v = v\n",
}


@pytest.mark.parametrize(
    ("program", "answer", "reward"),
    [
        (
            STARTER + "return sum('M' in one for one in details)",
            lcb([{"input": '["78M1", "5F"]', "output": "1", "testtype": "functional"}], STARTER, "countM"),
            1,
        ),
        ("print(len(Counter(input())), gcd(12, 18), inf)", stdin("aab\n", "2 6 inf"), 1),
        ("print(math.floor(1.5), heapq.nsmallest(1, [3, 2]))", stdin("", "1 [2]"), 1),
        ("def f(n):\n    return n and 1 + f(n - 1)\nprint(f(20000))", stdin("", "20000"), 1),
        ("from __future__ import annotations\nprint(1)", stdin("", "1"), 1),
        ("print(10**5000)", stdin("", "1" + "0" * 5000), 1),
        ("print('  1 2  ')", stdin("", "1 2"), 1),
        ("print('0.30 1e2')", stdin("", "0.3 100"), 1),
        ("print(0.1 + 0.2)", stdin("", "0.3"), 0),
        ("print(10**17)", stdin("", str(10**17 + 1)), 0),
        ("print(1)\nprint()\nprint(2)", stdin("", "1\n2"), 0),
        ("def f(x): return (x, x)", lcb([{"input": "1", "output": "[1, 1]", "testtype": "functional"}], "", "f"), 1),
        ("print(10**5000)", [{"input": "", "output": "1" + "0" * 5000}], 1),
        ("print(Counter('a'))", [{"input": "", "output": "Counter({'a': 1})"}], 0),
        ("def f(xs: List[int]) -> int:\n    return twice(sum(xs))", HUMANEVAL, 1),
        ("    return twice(sum(xs))", HUMANEVAL, 1),
        ("return 2 * sum(xs)", HUMANEVAL, 1),
        ("def f(xs): return 5", HUMANEVAL, 0),
        ("def other(xs): return 6", HUMANEVAL, 0),
        ("def f(r): return r.v", MBPP, 1),
        ("def f(r): return math.floor(r.v)", MBPP | {"test_imports": ["import math"]}, 1),
        ("def f(r): return 0", MBPP, 0),
    ],
)
def test_the_published_conditions(program, answer, reward):
    given = code(
        prompt="", response=f"```python\n{program}\n```", answer=answer, metadata={}, seconds=20, total_seconds=60
    )
    assert given["reward"] == reward


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (HUMANEVAL | {"prompt": "def f("}, "`prompt` is no Python: 'def f('"),
        (MBPP | {"test_setup_code": "def"}, "`test_setup_code` is no Python"),
    ],
)
def test_a_prelude_that_is_no_python_is_refused(answer, said):
    assert said in str(problem_of_answer(answer, ["code"]))

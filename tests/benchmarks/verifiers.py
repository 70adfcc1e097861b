"""What built-in verifiers cost per response in one process, and the sandbox per test, in one run.

python tests/benchmarks/verifiers.py
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "rewards"))

from math_pairs import pairs

from gspo_mega.rewards import code
from gspo_mega.rewards.functions import load_function

TESTS = [{"input": f"{n}\n", "output": f"{n + 1}\n"} for n in range(20)]
PROGRAM = "```python\nprint(int(input()) + 1)\n```"


def milliseconds(act: Callable[[], object], times: int) -> float:
    """The median over `times` calls."""
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        act()
        taken.append(time.perf_counter() - began)
    return 1000 * statistics.median(taken)


def scored(name: str, response: str, answer: object, **options: object) -> Callable[[], object]:
    function = load_function(name, options)
    return lambda: function(prompt="", response=response, answer=answer, metadata={}, **options)


def main() -> None:
    rows = {
        "gsm8k, a number": scored("gsm8k", "so 42\n#### 42", "42"),
        "math, the same number": scored("math", "so \\boxed{42}", "42"),
        "math, another number": scored("math", "so \\boxed{41}", "42"),
        "math, a fraction": scored("math", "so \\boxed{\\frac{6}{8}}", "\\frac{3}{4}"),
        "math, an expression": scored("math", "so \\boxed{(x+1)^2}", "x^2+2x+1"),
        "regex, 64 Ki characters": scored("regex", "a" * 65_536, "", pattern="(a|b)*c"),
        "json_schema": scored("json_schema", '{"x": 1}', "", schema={"required": ["x"]}),
    }
    for name, act in rows.items():
        act()
        print(f"{name}: {milliseconds(act, 100):.3f} ms")
    math = load_function("math", {})
    began = time.perf_counter()
    table = [math(prompt="", response=response, answer=gold, metadata={}) for gold, response, _ in pairs()]
    print(
        f"math, the table of the tests: {1000 * (time.perf_counter() - began) / len(table):.2f} ms on the mean of {len(table)}"
    )
    for isolation in ("namespaces", "landlock"):
        act = scored("code", PROGRAM, TESTS, isolation=isolation, total_seconds=60.0)
        print(f"code, {isolation}: {milliseconds(act, 10) / len(TESTS):.2f} ms per test")
    for server in code._SERVERS.values():
        server.end()


if __name__ == "__main__":
    main()

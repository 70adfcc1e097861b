"""The built-in reward `code`: which of a row's tests does the program in a response pass?

Owns finding the program, the process that runs it (`sandbox/sandbox_server.py`), and its time. What the tests expect
never reaches that process: outputs and results are compared here.
"""

from __future__ import annotations

import collections
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from gspo_mega.base.errors import RewardError
from gspo_mega.base.line_process import LineProcess
from gspo_mega.config.reward_rules import DEFAULT_TOTAL_SECONDS
from gspo_mega.rewards.blame import HeldUp
from gspo_mega.rewards.code_tests import listed_tests
from gspo_mega.rewards.fenced_code import program_of

WALLS = ("auto", "namespaces", "landlock")
# A test may sleep as long again as it may compute, and a moment more.
_WAIT = 1.0
# A test may take so many times its own time where the machine is busy; then the scoring is tried again.
_BUSY = 4
# What a test costs the sandbox in addition to the program's own time, on a machine that is free.
_EACH_SECONDS = 0.005
# How a test ended that took what it may not have, by the name of its share among the parts of the reward.
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

    Raises RewardError: an option is not what `code` reads, or this machine gives no isolation and `unsafe` is not set.
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
    """The share of the row's tests that the program in the response passes; with `partial: false` 1
    where it passes all. Its parts: `passed`, the share, and the shares of tests that the program made end otherwise:
    `timed_out`, `out_of_memory`, `over_output`, and `killed`, by a signal of its own or a system call that is refused.

    A test may compute for `seconds`; all of them together take `total_seconds`, and what is left then has timed out.
    Time that a program waited for the machine does not count.

    Raises ValueError: the answer is no list of tests; HeldUp: the machine did not let a program run to its end;
    RuntimeError: the sandbox failed.
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
    """The running sandbox of these settings, started where there is none."""
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
    """How one test ended: `ended`, `said` and, where it gave one that is JSON, `result`. Raises RuntimeError."""
    return _run(message, settings, python)[0]


def _run(message: dict[str, Any], settings: str, python: str) -> tuple[dict[str, Any], float]:
    """As `_ask`, with the seconds that the program took of its own."""
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

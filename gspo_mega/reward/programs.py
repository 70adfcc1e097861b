"""The built-in reward `code`: which of a row's tests does the program in a response pass?

Owns finding the program, the process that runs it (`sandbox/sandbox_server.py`), and its time. What the tests expect
never reaches that process: outputs and results are compared here.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gspo_mega.config.reward_rules import DEFAULT_TOTAL_SECONDS
from gspo_mega.errors import RewardError
from gspo_mega.line_process import LineProcess
from gspo_mega.reward.code_tests import listed_tests
from gspo_mega.reward.fenced_code import program_of

WALLS = ("auto", "namespaces", "landlock")
# A test may wait as long again as it may compute, and a moment more: machines are busy.
_WAIT = 1.0
_SERVER = Path(__file__).parent / "sandbox" / "sandbox_server.py"
_SERVERS: dict[str, LineProcess] = {}


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
    """The share of the row's tests that the response's last block of code passes; with `partial: false` 1 where it
    passes all. Its parts: `passed`, the share, and `timed_out`, the share of tests that took too long.

    A test may compute for `seconds`; all of them together take `total_seconds`, and what is left then has timed out.

    Raises ValueError: the answer is no list of tests; RuntimeError: the sandbox failed.
    """
    tests = listed_tests(answer)
    program = program_of(response)
    if program is None:
        return {"reward": 0.0, "correct": False, "passed": 0.0, "timed_out": 0.0}
    settings = _settings(memory_bytes, folder_bytes, output_bytes, isolation, unsafe)
    deadline = time.monotonic() + total_seconds
    passed = late = 0
    for index, test in enumerate(tests):
        left = deadline - time.monotonic()
        if left <= 0:
            late += len(tests) - index
            break
        limits = {"seconds": seconds, "wall_seconds": min(2 * seconds + _WAIT, left)}
        outcome = _ask({"program": test.whole(program)} | test.asked | limits, settings, python or sys.executable)
        won = test.passes(outcome, tolerance)
        passed += won
        late += outcome["ended"] == "time"
        if not won and not partial:
            break
    right = passed == len(tests)
    share = passed / len(tests)
    return {
        "reward": share if partial else float(right),
        "correct": right,
        "passed": share,
        "timed_out": late / len(tests),
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
    server = _server(settings, python)
    outcome = server.ask(message)
    if "ended" not in outcome:
        _SERVERS.pop(f"{python} {settings}", None)
        raise RuntimeError(f"the sandbox failed: {outcome['error']}")
    return outcome

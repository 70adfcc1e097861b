"""A scoring process: `python -m gspo_mega.reward.scoring_worker PARENT_PID`, started by `process.py`.

Owns calling reward functions, one request at a time, and judging what they return. It speaks JSON lines over the pipes
that it was started with as stdin and stdout:

    in   once: {"functions": {label: {"function": name, "options": {...}}}, "memory_bytes": n, "file_bytes": n,
         "network": bool}
    out  {"ready": true}  or  {"load_error": text}
    in   {"id": n, "label": label, "prompt": ..., "response": ..., "answer": ..., "metadata": ...}
    out  {"id": n, "value": x, "parts": {name: x}, "correct": true, false or null}  or
         {"id": n, "failure": kind, "why": text}

What functions print goes to stderr and cannot disturb this. The process ends with its stdin, or with its guard
(`guard.py`), which ends on SIGTERM or with its parent. Deadlines are enforced from outside.
"""

from __future__ import annotations

import io
import json
import math
import numbers
import os
import resource
import sys
from typing import Any, NoReturn

from gspo_mega.errors import RewardError
from gspo_mega.reward.functions import RewardFunction, describe, load_function
from gspo_mega.reward.guard import go_on_guarded, leave_network


class BadResult(Exception):
    """A function returned a value that is no reward. `kind`: `wrong_type` or `not_finite`."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind = kind


def main() -> None:
    go_on_guarded(int(sys.argv[1]))
    requests, replies = take_over_pipes()
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    setup = json.loads(requests.readline())

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message).encode() + b"\n")
        replies.flush()

    try:
        if not setup["network"]:
            leave_network()
        functions: dict[str, tuple[RewardFunction, dict[str, Any]]] = {
            label: (load_function(entry["function"], entry["options"]), entry["options"])
            for label, entry in setup["functions"].items()
        }
    except RewardError as error:
        reply({"load_error": str(error)})
        leave()
    limit(setup["memory_bytes"], setup["file_bytes"])
    reply({"ready": True})
    for line in requests:
        request = json.loads(line)
        reply({"id": request["id"]} | answer(request, *functions[request["label"]]))
    leave()


def answer(request: dict[str, Any], function: RewardFunction, options: dict[str, Any]) -> dict[str, Any]:
    """Call a function for one request: the reply without its id."""
    arguments = {key: request[key] for key in ("prompt", "response", "answer", "metadata")}
    try:
        value, parts, correct = result_of(function(**arguments, **options))
    except BadResult as error:
        return {"failure": error.kind, "why": str(error)}
    except MemoryError as error:
        return {"failure": "memory", "why": describe(error)}
    except BaseException as error:  # any exception of a function, SystemExit too, fails only this trajectory
        return {"failure": "exception", "why": describe(error)}
    return {"value": value, "parts": parts, "correct": correct}


def result_of(returned: Any) -> tuple[float, dict[str, float], bool | None]:
    """The reward, the further parts and the verdict in what a function returned. Raises BadResult."""
    if not isinstance(returned, dict):
        return number_of(returned, "the result"), {}, None
    if "reward" not in returned:
        raise BadResult(
            "wrong_type",
            f"returned a dictionary without 'reward'; it has {', '.join(map(repr, returned)) or 'nothing'}",
        )
    parts = {str(key): number_of(value, repr(key)) for key, value in returned.items()}
    correct = parts.pop("correct", None)
    if correct not in (None, 0.0, 1.0):
        raise BadResult("wrong_type", f"'correct' is {correct:g}; True or False (1 or 0) was expected")
    return parts.pop("reward"), parts, None if correct is None else bool(correct)


def number_of(value: Any, what: str) -> float:
    """A finite float of a real number (Python's, NumPy's). Raises BadResult."""
    if not isinstance(value, numbers.Real):
        shown = repr(value)[:60]
        raise BadResult("wrong_type", f"{what} is {shown} ({type(value).__name__}); a number was expected")
    try:
        number = float(value)
    except OverflowError:
        raise BadResult("not_finite", f"{what} is too large for a float") from None
    if not math.isfinite(number):
        raise BadResult("not_finite", f"{what} is {number}")
    return number


def take_over_pipes() -> tuple[Any, Any]:
    """Keep stdin and stdout as private channels; give functions an empty stdin, and stderr for what they print."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    # Line by line, as in a terminal: the output of a process that is killed later is not lost.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    return requests, replies


def limit(memory_bytes: int, file_bytes: int) -> None:
    """Limit the address space to the bytes in use now plus `memory_bytes`, and every written file to `file_bytes`.
    Allocations and writes beyond that fail.
    """
    with open("/proc/self/statm", encoding="ascii") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + memory_bytes, used + memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def leave() -> NoReturn:
    """End at once: a thread that a function left behind must not keep the process alive."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

"""A scoring process: `python -m gspo_mega.rewards.scoring_worker PARENT_PID`, started by `guarded_process.py`.

It calls reward functions, one request at a time, and judges what they return. It speaks JSON lines over the pipes that
it was started with as stdin and stdout:

    in   once: {"functions": {label: {"function": name, "options": {...}}}, "memory_bytes": n, "file_bytes": n,
         "network": bool}
    out  {"ready": true}  or  {"load_error": text}
    in   {"id": n, "label": label, "prompt": ..., "response": ..., "answer": ..., "metadata": ...,
         "num_response_tokens": n}
    out  {"id": n, "value": x, "parts": {name: x}, "correct": true, false or null}; if a built-in function could not
         score because of the response, with "value": 0 and "cause": one of `blame.CAUSES`; or
         {"id": n, "failure": kind, "why": text}, with "again": true if the machine is the cause

What functions print goes to stderr and cannot disturb this. The process ends with its stdin, or with its guard
(`guard.py`), which ends on SIGTERM or with its parent. Deadlines are enforced from outside.
"""

from __future__ import annotations

import json
from typing import Any

from gspo_mega.base.errors import RewardError
from gspo_mega.base.user_functions import describe, file_of
from gspo_mega.rewards.blame import HeldUp, cause_of
from gspo_mega.rewards.functions import BUILTINS, RewardFunction, load_function, measured_by, zero_for
from gspo_mega.rewards.guard import begin, leave, leave_network, limit
from gspo_mega.rewards.user_code import BadResult, result_of


def main() -> None:
    requests, replies, setup = begin()

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message).encode() + b"\n")
        replies.flush()

    try:
        if not setup["network"]:
            leave_network("reward", RewardError)
        functions: dict[str, tuple[RewardFunction, dict[str, Any], tuple[str, ...]]] = {}
        for label, entry in setup["functions"].items():
            function = load_function(entry["function"], entry["options"])
            functions[label] = function, entry["options"], measured_by(function)
    except RewardError as error:
        reply({"load_error": str(error)})
        leave()
    limit(setup["memory_bytes"], setup["file_bytes"])
    reply({"ready": True})
    for line in requests:
        request = json.loads(line)
        name = setup["functions"][request["label"]]["function"]
        reply({"id": request["id"]} | answer(request, *functions[request["label"]], name=name))
    leave()


def answer(
    request: dict[str, Any],
    function: RewardFunction,
    options: dict[str, Any],
    measured: tuple[str, ...],
    name: str = "",
) -> dict[str, Any]:
    """Call a function for one request, and return the reply without its id. `measured`: further arguments that it gets.
    `name`: the function's name; if it is a built-in, a failure that the response causes is scored 0.
    """
    arguments = {key: request[key] for key in ("prompt", "response", "answer", "metadata", *measured)}
    try:
        value, parts, correct = result_of(function(**arguments, **options))
    except BaseException as error:  # any exception of a function, SystemExit too, fails only this trajectory
        if name not in BUILTINS:
            return _failure(error, file_of(function))
        cause = cause_of(error, lambda: function(**arguments | {"response": ""}, **options))
        if cause is not None:
            return zero_for(cause, name, options)
        return _failure(error) | {"again": isinstance(error, (HeldUp, KeyboardInterrupt, OSError, RuntimeError))}
    return {"value": value, "parts": parts, "correct": correct}


def _failure(error: BaseException, own_file: str | None = None) -> dict[str, Any]:
    if isinstance(error, BadResult):
        return {"failure": error.kind, "why": str(error)}
    if isinstance(error, HeldUp):
        return {"failure": "deadline", "why": str(error)}
    return {"failure": "memory" if isinstance(error, MemoryError) else "exception", "why": describe(error, own_file)}


if __name__ == "__main__":
    main()

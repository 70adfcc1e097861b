"""The reward protocol, and finding the function that a name stands for.

A reward is a function

    def score(*, prompt: str, response: str, answer, metadata: dict, **options) -> float | dict[str, float]

`prompt` is the rendered prompt, `response` the response as text (its last 64 Ki characters), `answer` and `metadata`
come from the prompt's row of the data file, `options` from the configuration. The result is a finite number, or a
dictionary of finite numbers: its entry `reward` is the reward, and the others are recorded beside it. The entry
`correct` (True or False) says whether the response is right; held-out accuracy counts it. A built-in verifier's
response is right where its reward is 1. A function with an argument of the name `num_response_tokens` is told how many
tokens the policy sampled, too.

The function runs in a process of its own: it may be slow, raise, print or crash, and only that response is lost, that
is, not trained on. It may be called again for a response whose scoring was interrupted, so it should have no side
effects.

Owns the names and the checks before a run; `scoring_worker.py` runs the functions.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from gspo_mega.base.errors import RewardError
from gspo_mega.rewards import (
    builtin,
    choices,
    code_tests,
    json_responses,
    mathematics,
    patterns,
    procedural,
    programs,
    shapes,
)
from gspo_mega.rewards.user_functions import import_function

RewardFunction = Callable[..., Any]

BUILTINS: dict[str, RewardFunction] = {
    "arithmetic": builtin.arithmetic,
    "choice": choices.choice,
    "code": programs.code,
    "exact_match": builtin.exact_match,
    "format": shapes.format,
    "gsm8k": builtin.gsm8k,
    "json_schema": json_responses.json_schema,
    "length": shapes.length,
    "math": mathematics.math,
    "reasoning_gym": procedural.reasoning_gym,
    "regex": patterns.regex,
}
# Those that compare with the row's answer: 1 says that the response is right. The others look at its shape.
VERIFIERS = frozenset({"arithmetic", "choice", "code", "exact_match", "gsm8k", "math", "reasoning_gym"})
# What a built-in does when it is loaded, with its options: it checks them, or starts what it needs.
_PREPARATIONS: dict[str, Callable[..., None]] = {
    "code": programs.check_code,
    "format": shapes.check_format,
    "json_schema": json_responses.check_json_schema,
    "length": shapes.check_length,
    "math": mathematics.check_math,
    "reasoning_gym": procedural.start,
    "regex": patterns.check_regex,
}
# What a function is given besides if it has an argument of that name.
MEASURED = ("num_response_tokens",)
# The answers of a data file that a built-in cannot use; a built-in that is not named here takes all answers.
_ANSWER_PROBLEMS: dict[str, Callable[[Any], str | None]] = {
    "choice": choices.problem_of_choice_answer,
    "code": code_tests.problem_of_code_answer,
    "gsm8k": builtin.problem_of_gsm8k_answer,
    "math": mathematics.problem_of_math_answer,
}


def problem_of_answer(answer: Any, names: Iterable[str]) -> str | None:
    """Why one of the functions in `names` cannot score with an answer, or None. Users' functions are not checked."""
    for name in names:
        problem_of = _ANSWER_PROBLEMS.get(name)
        if problem_of is not None and (problem := problem_of(answer)) is not None:
            return f"{problem} (reward {name})"
    return None


def zero_for(cause: str, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """The reply of a built-in to a response that made it fail, as `scoring_worker` sends it. `cause`: of
    `blame.CAUSES`.
    """
    declares = name in VERIFIERS or (
        (name == "json_schema" and bool(options.get("compare")))
        or (name == "regex" and f"(?P<{patterns.ANSWER_GROUP}>" in str(options.get("pattern")))
    )
    return {"value": 0.0, "parts": {}, "correct": False if declares else None, "cause": cause}


def load_function(name: str, options: dict[str, Any]) -> RewardFunction:
    """The function that a configuration's `function` names: a built-in, or `package.module:function`.

    Raises RewardError: no such built-in, module or function; an import that fails; or a function that cannot be
    called with the protocol's arguments and these options.
    """
    if ":" in name:
        function = import_function(name, "reward", RewardError)
    elif name in BUILTINS:
        function = BUILTINS[name]
    else:
        near = difflib.get_close_matches(name, BUILTINS, n=1)
        guess = f"did you mean {near[0]!r}? " if near else ""
        raise RewardError(f"reward {name!r}: {guess}valid: {', '.join(BUILTINS)}, or package.module:function")
    _check_call(name, function, options)
    if name in _PREPARATIONS:
        _PREPARATIONS[name](**options)
    return function


def measured_by(function: RewardFunction) -> tuple[str, ...]:
    """The names in `MEASURED` that a function has as arguments of its own."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters
    return tuple(name for name in MEASURED if name in parameters and parameters[name].kind in kinds)


def _check_call(name: str, function: RewardFunction, options: dict[str, Any]) -> None:
    if inspect.iscoroutinefunction(function):
        raise RewardError(f"reward {name!r}: it is an async function; a plain one is expected")
    own: dict[str, Any] = {"prompt": "", "response": "", "answer": None, "metadata": {}}
    try:
        own |= dict.fromkeys(measured_by(function), 0)
    except (TypeError, ValueError) as error:  # a callable that does not say what it takes
        raise RewardError(f"reward {name!r}: {error}") from error
    taken = own.keys() & options.keys()
    if taken:
        raise RewardError(
            f"reward {name!r}: option {sorted(taken)[0]!r} is an argument that every reward gets; give it another name"
        )
    try:
        inspect.signature(function).bind(**own, **options)
    except TypeError as error:
        raise RewardError(
            f"reward {name!r}: cannot be called with prompt, response, answer,"
            f" metadata{''.join(f', {key}' for key in options)} as keywords: {error}"
        ) from error

"""The reward protocol, and finding the function that a name stands for.

A reward is a function

    def score(*, prompt: str, response: str, answer, metadata: dict, **options) -> float | dict[str, float]

`prompt` is the rendered prompt, `response` the response as text (its last 64 Ki characters); `answer` and `metadata`
come from the prompt's row of the data file, `options` from the configuration. The result is a finite number, or a
dictionary of finite numbers: its entry `reward` is the reward, and the others are recorded with it. The entry `correct`
(True or False) says whether the response is right; held-out accuracy counts it. A built-in verifier's response is right
if its reward is 1. A function with an argument named `num_response_tokens` also gets the number of tokens that the
policy sampled.

The function runs in a separate process: it may be slow, raise, print or crash, and only that response is lost, that is,
not trained on. It may be called again for a response whose scoring was interrupted, so it should have no side effects.

`load_function` finds and checks a function before a run; `scoring_worker.py` calls it. `base/user_functions.py` imports
users' functions, also those of episodes and tools, and `user_code.py` reads what they return.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from gspo_mega.base.errors import RewardError
from gspo_mega.base.user_functions import import_function
from gspo_mega.rewards import builtin, code, json_responses, mathematics

RewardFunction = Callable[..., Any]
BUILTINS: dict[str, RewardFunction] = {
    "arithmetic": builtin.arithmetic,
    "choice": builtin.choice,
    "code": code.code,
    "exact_match": builtin.exact_match,
    "format": builtin.format,
    "gsm8k": builtin.gsm8k,
    "json_schema": json_responses.json_schema,
    "length": builtin.length,
    "math": mathematics.math,
    "reasoning_gym": builtin.reasoning_gym,
    "regex": builtin.regex,
}
# The built-ins that compare with the row's answer: 1 says that the response is right. The others judge its form.
VERIFIERS = frozenset({"arithmetic", "choice", "code", "exact_match", "gsm8k", "math", "reasoning_gym"})
# Called with a built-in's options when it is loaded: checks them, or starts what the built-in needs.
_PREPARATIONS: dict[str, Callable[..., None]] = {
    "code": code.check_code,
    "format": builtin.check_format,
    "json_schema": json_responses.check_json_schema,
    "length": builtin.check_length,
    "math": mathematics.check_math,
    "reasoning_gym": builtin.start,
    "regex": builtin.check_regex,
}
# A function also gets these values if it has arguments of these names.
MEASURED = ("num_response_tokens",)
# Finds answers of a data file that a built-in cannot use. A built-in that is not named here takes all answers.
_ANSWER_PROBLEMS: dict[str, Callable[[Any], str | None]] = {
    "choice": builtin.problem_of_choice_answer,
    "code": code.problem_of_code_answer,
    "gsm8k": builtin.problem_of_gsm8k_answer,
    "math": mathematics.problem_of_math_answer,
}


def load_function(name: str, options: dict[str, Any]) -> RewardFunction:
    """Return the function that a configuration's `function` names: a built-in, or `package.module:function`.

    Raises RewardError if there is no such built-in, module or function, if the import fails, or if the function cannot
    be called with the protocol's arguments and these options.
    """
    if ":" in name:
        function = import_function(name, "reward", RewardError)
    elif name in BUILTINS:
        function = BUILTINS[name]
    else:
        near = difflib.get_close_matches(name, BUILTINS, n=1)
        module, _, last = name.rpartition(".")
        if not near and module:  # a file, or a function written with a dot
            near = [f"{module.removeprefix('./').replace('/', '.')}:{'FUNCTION' if last == 'py' else last}"]
        guess = f"did you mean {near[0]!r}? " if near else ""
        raise RewardError(f"reward {name!r}: {guess}valid: {', '.join(BUILTINS)}, or package.module:function")
    _check_call(name, function, options)
    if name in _PREPARATIONS:
        _PREPARATIONS[name](**options)
    return function


def _check_call(name: str, function: RewardFunction, options: dict[str, Any]) -> None:
    if inspect.iscoroutinefunction(function):
        raise RewardError(f"reward {name!r}: it is an async function; a plain one is expected")
    if inspect.isclass(function):
        raise RewardError(f"reward {name!r}: it is a class; name a function, or an object of the class with __call__")
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
            f" metadata{''.join(f', {key}' for key in options)} as keywords: {error}{_adapter_hint(function)}"
        ) from error


# What reward functions of other libraries take -> the library, and how to call such a function from one of this form.
_FOREIGN_ARGUMENTS = {
    "solution_str": ("verl's", "(..., solution_str=response, ground_truth=answer)"),
    "completions": ("TRL's", "(prompts=[prompt], completions=[response], ...)[0]"),
    "sample": ("slime's", "(args, sample), which is async"),
}


def _adapter_hint(function: RewardFunction) -> str:
    """How to use a function whose arguments are those of another library, or an empty text."""
    taken = inspect.signature(function).parameters
    for argument, (whose, call) in _FOREIGN_ARGUMENTS.items():
        if argument in taken:
            return (
                f". Its arguments are {whose}: name a function score(*, prompt, response, answer, metadata) that calls"
                f" {getattr(function, '__name__', 'it')}{call} (docs/rewards.md)"
            )
    return ""


def measured_by(function: RewardFunction) -> tuple[str, ...]:
    """Return the names in `MEASURED` that a function has as arguments of its own."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters
    return tuple(name for name in MEASURED if name in parameters and parameters[name].kind in kinds)


def problem_of_answer(answer: Any, names: Iterable[str]) -> str | None:
    """Return why one of the functions in `names` cannot score with an answer, or None. Users' functions are not
    checked.
    """
    for name in names:
        problem_of = _ANSWER_PROBLEMS.get(name)
        if problem_of is not None and (problem := problem_of(answer)) is not None:
            return f"{problem} (reward {name})"
    return None


def zero_for(cause: str, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the reply of a built-in to a response that made it fail, as `scoring_worker` sends it: a reward of 0.
    `cause`: one of `blame.CAUSES`.
    """
    declares = name in VERIFIERS or (
        (name == "json_schema" and bool(options.get("compare")))
        or (name == "regex" and f"(?P<{builtin.ANSWER_GROUP}>" in str(options.get("pattern")))
    )
    return {"value": 0.0, "parts": {}, "correct": False if declares else None, "cause": cause}

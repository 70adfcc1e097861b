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

`load_function` finds and checks a function before a run; `scoring_worker.py` calls it. `result_of` reads what a
function returned. `import_function` and `describe` serve episodes and tools, too.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import math
import numbers
import os
import traceback
from collections.abc import Callable, Iterable
from types import CodeType, ModuleType
from typing import Any

from gspo_mega.base.errors import GspoMegaError, RewardError
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
# The kinds of NumPy's types that are numbers: truth values, integers with and without sign, floats.
_NUMBER_KINDS = "biuf"


def load_function(name: str, options: dict[str, Any]) -> RewardFunction:
    """The function that a configuration's `function` names: a built-in, or `package.module:function`.

    Raises RewardError if there is no such built-in, module or function, if the import fails, or if the function cannot
    be called with the protocol's arguments and these options.
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


def measured_by(function: RewardFunction) -> tuple[str, ...]:
    """The names in `MEASURED` that a function has as arguments of its own."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters
    return tuple(name for name in MEASURED if name in parameters and parameters[name].kind in kinds)


def problem_of_answer(answer: Any, names: Iterable[str]) -> str | None:
    """Why one of the functions in `names` cannot score with an answer, or None. Users' functions are not checked."""
    for name in names:
        problem_of = _ANSWER_PROBLEMS.get(name)
        if problem_of is not None and (problem := problem_of(answer)) is not None:
            return f"{problem} (reward {name})"
    return None


def zero_for(cause: str, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """The reply of a built-in to a response that made it fail, as `scoring_worker` sends it: a reward of 0. `cause`:
    one of `blame.CAUSES`.
    """
    declares = name in VERIFIERS or (
        (name == "json_schema" and bool(options.get("compare")))
        or (name == "regex" and f"(?P<{builtin.ANSWER_GROUP}>" in str(options.get("pattern")))
    )
    return {"value": 0.0, "parts": {}, "correct": False if declares else None, "cause": cause}


class BadResult(Exception):
    """A function returned a value that is no reward. `kind`: `wrong_type` or `not_finite`."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind = kind


def result_of(returned: Any) -> tuple[float, dict[str, float], bool | None]:
    """(reward, further parts, `correct` or None) of what a function returned. Raises BadResult."""
    if not isinstance(returned, dict):
        return number_of(returned, "the result"), {}, None
    if "reward" not in returned:
        raise BadResult(
            "wrong_type",
            f"returned a dictionary without 'reward'; it has {', '.join(map(repr, returned)) or 'nothing'}",
        )
    parts = {str(key): number_of(value, repr(key)) for key, value in returned.items() if key != "correct"}
    correct = verdict_of(returned["correct"], "'correct'") if "correct" in returned else None
    return parts.pop("reward"), parts, correct


def verdict_of(value: Any, what: str) -> bool:
    """The truth value of True, False, 1 or 0 of Python's, NumPy's or a tensor's types. Raises BadResult."""
    number = number_of(value, what)
    if number not in (0.0, 1.0):
        raise BadResult("wrong_type", f"{what} is {number:g}; True or False (1 or 0) was expected")
    return bool(number)


def number_of(value: Any, what: str) -> float:
    """The finite float of a truth value or real number: Python's, a scalar of NumPy's, or an array or tensor without
    dimensions. Raises BadResult.
    """
    plain = _plain(value)
    if not isinstance(plain, numbers.Real):
        raise BadResult("wrong_type", f"{what} is {_shown(value)}; a number was expected")
    try:
        number = float(plain)
    except OverflowError:
        raise BadResult("not_finite", f"{what} is too large for a float") from None
    except RuntimeError as error:  # a tensor without data, as on the device `meta`
        raise BadResult("wrong_type", f"{what} is {_shown(value)}: {error}") from None
    if not math.isfinite(number):
        raise BadResult("not_finite", f"{what} is {number}")
    return number


def _plain(value: Any) -> Any:
    """A scalar, array or tensor of one number as a Python number; None if it is another kind of value."""
    if not hasattr(value, "dtype"):
        return value
    if getattr(value.dtype, "kind", "f") not in (*_NUMBER_KINDS, "V") or getattr(value, "shape", None) != ():
        return None  # a complex number, a time, a text, an object; or several numbers
    try:
        if getattr(value, "mask", False):  # of NumPy's masked arrays: there is no number
            return None
        return value if isinstance(value, numbers.Real) else value.item()
    except Exception:  # a library may raise anything
        return None


def _shown(value: Any) -> str:
    try:
        text = " ".join(repr(value).split())[:60]
    except Exception:  # a class of the user's own may raise anything
        text = "a value"
    shape = getattr(value, "shape", None)
    dimensions = f" of shape {tuple(shape)}" if isinstance(shape, tuple) and shape else ""
    return f"{text} ({type(value).__name__}{dimensions})"


def import_function(name: str, what: str, error: type[GspoMegaError]) -> Callable[..., Any]:
    """The callable that `name`, `package.module:function`, stands for. `what`: its word in errors (`reward`, `episode`,
    `tool`).

    Raises `error` if the name has another form, there is no such module or function, or the import fails.
    """
    module_name, _, path = name.partition(":")
    if not all(part.isidentifier() for part in [*module_name.split("."), *path.split(".")]):
        raise error(f"{what} {name!r}: not of the form package.module:function")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as problem:
        if problem.name is not None and (module_name == problem.name or module_name.startswith(problem.name + ".")):
            raise error(
                f"{what} {name!r}: there is no module {problem.name!r} in {os.getcwd()} or among the installed packages"
            ) from problem
        raise error(f"{what} {name!r}: importing {module_name} fails: {describe(problem)}") from problem
    except BaseException as problem:  # importing a module may raise anything, SystemExit too
        raise error(f"{what} {name!r}: importing {module_name} fails: {describe(problem)}") from problem
    found: Any = module
    for part in path.split("."):
        if not hasattr(found, part):
            raise error(f"{what} {name!r}: {module_name} has no function {path!r}; {_offer(module, path)}")
        found = getattr(found, part)
    if not callable(found):
        raise error(f"{what} {name!r}: {path} is a {type(found).__name__}, not a function")
    return found


def _offer(module: ModuleType, wanted: str) -> str:
    functions = [
        key for key, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    if not functions:
        return f"{module.__file__} defines none"
    near = difflib.get_close_matches(wanted, functions, n=1)
    return (f"did you mean {near[0]!r}? " if near else "") + f"it defines {', '.join(functions)}"


def describe(error: BaseException, own_file: str | None = None) -> str:
    """An exception in one line of at most 500 characters: type, message, and the file and line that raised it.

    `own_file`: the user's file, whose line is named, too, if something that it called raised.
    """
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")]
    where = f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
    own = [frame for frame in frames if frame.filename == own_file]
    if own and own[-1] is not frames[-1]:
        where += f", called at {os.path.basename(own[-1].filename)}:{own[-1].lineno}"
    try:
        message = " ".join(str(error).split())
    except Exception:  # a class of the user's whose __str__ fails
        message = "its message cannot be read"
    return f"{type(error).__name__}{': ' if message else ''}{message}"[:500] + (f" ({where})" if where else "")


def file_of(function: Callable[..., Any]) -> str | None:
    """The file in which a function is defined; None if Python does not know it."""
    code = _code_of(function)
    return None if code is None else code.co_filename


def place_of(function: Callable[..., Any]) -> str:
    """The place where a function is defined, as ` (file.py:12)`; empty if Python does not know it."""
    code = _code_of(function)
    return "" if code is None else f" ({code.co_filename}:{code.co_firstlineno})"


def _code_of(function: Callable[..., Any]) -> CodeType | None:
    inner = inspect.unwrap(getattr(function, "func", function))  # of a functools.partial, its function
    return getattr(inner, "__code__", None) or getattr(type(inner).__call__, "__code__", None)

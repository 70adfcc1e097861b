"""Find a function that a user names as `package.module:function`, and check what it returns.

It needs only the standard library, because the workers of episodes import it.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import math
import numbers
import os
import traceback
from collections.abc import Callable
from types import CodeType, ModuleType
from typing import Any

from gspo_mega.base.errors import GspoMegaError

# The kinds of NumPy's types that are numbers: truth values, integers with and without sign, floats.
_NUMBER_KINDS = "biuf"


class BadResult(Exception):
    """A function returned a value that is no reward. `kind`: `wrong_type` or `not_finite`."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind = kind


def result_of(returned: Any) -> tuple[float, dict[str, float], bool | None]:
    """Return (reward, further parts, `correct` or None) of what a function returned. Raises BadResult."""
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
    """Return True or False for True, False, 1 or 0 in a type of Python, NumPy or a tensor library. Raises BadResult."""
    number = number_of(value, what)
    if number not in (0.0, 1.0):
        raise BadResult("wrong_type", f"{what} is {number:g}; True or False (1 or 0) was expected")
    return bool(number)


def number_of(value: Any, what: str) -> float:
    """Return a truth value or real number as a finite float. It may be Python's, a NumPy scalar, or an array or tensor
    without dimensions. Raises BadResult.
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
    """Return a scalar, array or tensor of one number as a Python number; None if it is another kind of value."""
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
    """Return the callable that `name`, `package.module:function`, stands for. `what`: what errors call it (`reward`,
    `episode`, `tool`).

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
    """Return an exception in one line of at most 500 characters: type, message, and the file and line that raised it.

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
    """Return the file in which a function is defined; None if Python does not know it."""
    code = _code_of(function)
    return None if code is None else code.co_filename


def place_of(function: Callable[..., Any]) -> str:
    """Return the place where a function is defined, as ` (file.py:12)`; empty if Python does not know it."""
    code = _code_of(function)
    return "" if code is None else f" ({code.co_filename}:{code.co_firstlineno})"


def _code_of(function: Callable[..., Any]) -> CodeType | None:
    inner = inspect.unwrap(getattr(function, "func", function))  # of a functools.partial, its function
    return getattr(inner, "__code__", None) or getattr(type(inner).__call__, "__code__", None)

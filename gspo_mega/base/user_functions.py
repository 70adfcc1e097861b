"""Find a function that a user names as `package.module:function`, and say where it is and how it failed.

It needs only the standard library, because the workers of episodes import it.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import traceback
from collections.abc import Callable
from types import CodeType, ModuleType
from typing import Any

from gspo_mega.base.errors import GspoMegaError


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

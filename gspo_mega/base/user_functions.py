"""Find a function that a user names as `package.module:function`, and say where it is and how it failed.

Modules are looked for in the working directory, then where Python looks, and last in `run.modules_dir`, which is the
folder of the configuration. A process that imports users' functions is told that folder (`look_last_in`): the ranks and
the trial of inputs by their configuration, a guarded process by the one that starts it. The folder joins the end of
`sys.path` only when a user's module is in no other place, so it hides nothing, not even a package that is missing.

At the end are hooks: functions in place of a built-in part of a run (docs/hooks.md). A hook runs in the process of the
trainer that needs its answer, so an error of it ends the run; the error names the key, the function and its line. A
hook has to be deterministic: it is called again where a step is repeated, and a run continues to the bit only if it
then gives the same.

This file needs only the standard library, because the workers of episodes import it.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from types import CodeType, ModuleType
from typing import Any

from gspo_mega.base.errors import GspoMegaError, HookError
from gspo_mega.base.near_paths import near_path

_last_place: list[str] = []  # what `look_last_in` was told


def look_last_in(folder: str | None) -> None:
    """Have this process look for users' modules in `folder`, too, where no other place has them."""
    _last_place[:] = [] if folder is None else [os.path.abspath(folder)]


def last_place() -> str | None:
    """Return the folder that this process was told; None if it was told none."""
    return _last_place[0] if _last_place else None


def places() -> list[str]:
    """Return the folders in which users' modules are looked for, in this order."""
    return list(dict.fromkeys([os.getcwd(), *sys.path, *_last_place]))


def file_only_in(folder: str, name: str) -> str | None:
    """Return the file of the module of `name`, `package.module:function`, if `folder` has it and no place before does.
    Imports nothing.
    """
    module, folder = name.partition(":")[0], os.path.abspath(folder)
    file = _file_in(folder, module)
    before = [os.getcwd(), *(place for place in sys.path if os.path.abspath(place) != folder)]
    return None if file is None or any(_file_in(place, module) for place in before) else file


def _file_in(folder: str, module: str) -> str | None:
    """Return the file of a module below `folder`; None if there is none, or only a folder of that name without code."""
    search, file = [folder], None
    for part in module.split("."):
        spec = PathFinder.find_spec(part, search)
        if spec is None:
            return None
        search, file = list(spec.submodule_search_locations or ()), spec.origin
    return file


def _import_module(name: str) -> ModuleType:
    """Import a module from the first place that has it."""
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as problem:
        if not _is_part(problem.name, name) or not _add_place_of(name):
            raise
    else:
        # To Python any folder is a package, so one of the module's name in the working directory is imported.
        is_only_folder = module.__spec__ is not None and module.__spec__.origin is None
        if not is_only_folder or not _add_place_of(name):
            return module
        del sys.modules[name]
    return _import_module(name)


def _add_place_of(module: str) -> bool:
    """Append to `sys.path` the first place that has a module and is not there; return whether there is one. A console
    script does not look in the working directory.
    """
    for place in (os.getcwd(), *_last_place):
        if place not in sys.path and _file_in(place, module) is not None:
            sys.path.append(place)
            importlib.invalidate_caches()
            return True
    return False


def _is_part(module: str | None, name: str) -> bool:
    """Whether `module` is the module `name` or a package around it."""
    return module is not None and f"{name}.".startswith(f"{module}.")


def import_function(name: str, what: str, error: type[GspoMegaError]) -> Callable[..., Any]:
    """Return the callable that `name`, `package.module:function`, stands for. `what`: what errors call it (`reward`,
    `episode`, `tool`).

    Raises `error` if the name has another form, there is no such module or function, or the import fails.
    """
    module_name, _, path = name.partition(":")
    if not all(part.isidentifier() for part in [*module_name.split("."), *path.split(".")]):
        raise error(f"{what} {name!r}: not of the form package.module:function{_module_hint(name)}")
    try:
        module = _import_module(module_name)
    except ModuleNotFoundError as problem:
        if _is_part(problem.name, module_name):
            here, last = os.getcwd(), last_place()
            also = "" if last in (None, here) else f" or in {last} (run.modules_dir)"
            raise error(
                f"{what} {name!r}: there is no module {problem.name!r} in {here} (the working directory), in"
                f" the folders of PYTHONPATH{',' if also else ' or'} among the installed packages{also}"
                f"{_module_hint(name)}"
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


def _module_hint(name: str) -> str:
    """Return the end of a message about a module that cannot be found: the file's name written as a module, or the
    module in the working directory, or else in the last place, that is nearest.
    """
    module, colon, function = name.partition(":")
    written = module.removeprefix("./").removesuffix(".py").replace("/", ".")
    if not all(part.isidentifier() for part in written.split(".")):
        return ""
    for folder in ("", *_last_place):
        file = os.path.join(folder, written.replace(".", "/") + ".py")
        if (near := near_path(file)) is not None:
            written = os.path.relpath(near, folder or None).removesuffix(".py").replace("/", ".")
        if near is not None or os.path.exists(file):
            break
    return f"; did you mean {written}{colon}{function or ''}?" if written != module else ""


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


@dataclass(frozen=True)
class LoadedHook:
    """A hook that was imported. `key`: its key in the configuration. Calling it passes `options` as keywords."""

    key: str
    name: str
    function: Callable[..., Any]
    options: Mapping[str, Any]

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Return what the function returns. Raises HookError instead of what the function raises, except for
        errors of gspo_mega itself.
        """
        try:
            return self.function(*arguments, **keywords, **self.options)
        except GspoMegaError:
            raise
        except Exception as error:
            raise HookError(f"{self.key}: {self.name} failed: {describe(error, file_of(self.function))}") from error

    def bad_result(self, why: str) -> HookError:
        """Return the error for a result that cannot be used."""
        return HookError(f"{self.key}: {self.name}{place_of(self.function)} returned {why}")


def load_hook(key: str, name: str, options: Mapping[str, Any], num_arguments: int, **keywords: Any) -> LoadedHook:
    """Import a hook and check that it can be called with `num_arguments` values, the names of `keywords` and its
    options. Raises HookError if it cannot, or if there is no such function.
    """
    function = import_function(name, f"{key}:", HookError)
    if inspect.iscoroutinefunction(function):
        raise HookError(f"{key}: {name!r}: it is an async function; a plain one is expected")
    if taken := sorted(keywords.keys() & options.keys()):
        raise HookError(
            f"{key}: {name!r}: option {taken[0]!r} is an argument that it gets anyway; give it another name"
        )
    try:
        inspect.signature(function).bind(*[None] * num_arguments, **keywords, **options)
    except TypeError as error:
        shown = ", ".join([*["a value"] * num_arguments, *keywords, *options])
        raise HookError(f"{key}: {name!r}: cannot be called with ({shown}): {error}{place_of(function)}") from error
    except ValueError:  # a function of C that does not say what it takes
        pass
    return LoadedHook(key, name, function, dict(options))

"""Check what a user's function returns: a reward with its parts, a number, a verdict.

`base/user_functions.py` finds the function. Both need only the standard library, because the workers of episodes import
them.
"""

from __future__ import annotations

import math
import numbers
from typing import Any

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

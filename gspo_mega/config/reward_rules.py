"""Rules between the reward functions of a sum: their names, and the conditions under which they count.

Owns the form of a condition (`only_if`), which the scoring pool reads with the same `condition_of`.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gspo_mega.base.errors import Violation
from gspo_mega.config.schema import Config, OwnReward

# Of the reward `code`: all tests of one program.
DEFAULT_TOTAL_SECONDS = 8.0
# A scoring that the machine holds up may take so many times its deadline, and is tried so often.
MOST_DEADLINES = 3
MOST_ATTEMPTS = 3

_SIGNS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}
_CONDITION = re.compile(
    r"\s*([^\s<>=]+)\s*(?:(>=|<=|==|>|<)\s*([-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)\s*)?"
)


@dataclass(frozen=True)
class Condition:
    """`NAME SIGN BOUND`, about the value that an earlier function gave to the same response."""

    name: str
    sign: str
    bound: float

    def holds(self, value: float) -> bool:
        return _SIGNS[self.sign](value, self.bound)


def condition_of(text: str) -> Condition | None:
    """The condition that an entry of `only_if` is; `NAME` alone is short for `NAME >= 1`. None: it is none."""
    found = _CONDITION.fullmatch(text)
    return None if found is None else Condition(found[1], found[2] or ">=", float(found[3] or 1))


def names_of(functions: OwnReward) -> list[str]:
    """What each function of a sum is called: in metrics, in a response's parts, and in `only_if`."""
    return [entry.name or entry.function for entry in functions]


def reward_violations(config: Config) -> Iterator[Violation]:
    """Names that occur twice in a sum, and conditions that name nothing that is known by then."""
    yield from _of_a_sum(config, "reward.functions", config.reward.functions)
    for index, source in enumerate(config.data.sources):
        yield from _of_a_sum(config, f"data.sources.{index}.reward", source.reward or ())
    if config.eval is not None:
        yield from _of_a_sum(config, "eval.reward", config.eval.reward or ())
        for index, entry in enumerate(config.eval.sets):
            yield from _of_a_sum(config, f"eval.sets.{index}.reward", entry.reward or ())


def _of_a_sum(config: Config, place: str, functions: OwnReward) -> Iterator[Violation]:
    names = names_of(functions)
    for name, count in Counter(names).items():
        if count > 1:
            yield Violation(
                place,
                f"{name!r} is listed {count} times; list it once, with the summed weight, or give each a `name`",
            )
    for index, entry in enumerate(functions):
        total = entry.options.get("total_seconds", DEFAULT_TOTAL_SECONDS)
        if entry.function == "code" and isinstance(total, int | float) and total >= config.reward.deadline_seconds:
            yield Violation(
                f"{place}.{index}.options",
                f"total_seconds is {total:g}, and after reward.deadline_seconds ({config.reward.deadline_seconds:g}) a"
                " scoring has failed; a program that takes too long would have no reward in place of 0. Valid: less",
            )
        for text in entry.only_if:
            condition = condition_of(text)
            if condition is None:
                yield Violation(
                    f"{place}.{index}.only_if",
                    f"{text!r} is no condition; valid: the name of a function above it, which then has to give 1, or"
                    " such a comparison as `code >= 0.5` (with >=, >, <=, < or ==)",
                )
            elif condition.name not in names[:index]:
                above = ", ".join(names[:index])
                yield Violation(
                    f"{place}.{index}.only_if",
                    f"{condition.name!r} is no function above this one; "
                    + (f"valid: {above}" if above else "this one is the first, so that nothing is known before it"),
                )

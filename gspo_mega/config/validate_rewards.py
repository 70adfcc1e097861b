"""Rules between the reward functions of a sum: their names, and the conditions under which they count.

Owns the form of a condition (`only_if`), which the scoring pool reads with the same `condition_of`.

Rules of the services that are asked for rewards over HTTP: their names, addresses and keys.

Owns which services there are. How one is asked is `rewards/remote.py`'s.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from gspo_mega.base.errors import Violation
from gspo_mega.config.prompt_sources import eval_sets
from gspo_mega.config.schema import Config, JudgeReward, ModelReward, OwnReward, RemoteReward, Reward

# What a judge's prompt may hold in braces, with the name as group 1.
PLACEHOLDER = re.compile(r"\{(prompt|response|answer|num_response_tokens|(?:metadata|options)\.[^{}\s]+)\}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def services_of(reward: Reward) -> dict[str, RemoteReward]:
    """The services by the name that functions call them; as they are listed."""
    return {service.name: service for _, service in _places(reward)}


def longest_seconds(reward: Reward) -> float:
    """What the services of a response may take together, one after the other; 0 without any."""
    return sum((service.deadline_seconds for _, service in _places(reward)), 0.0)


def remote_violations(config: Config) -> Iterator[Violation]:
    """Services that cannot be asked, or that nothing asks."""
    places = list(_places(config.reward))
    own = [source.reward or () for source in config.data.sources] + [one.reward or () for one in eval_sets(config)]
    asked = {entry.function for reward in (config.reward.functions, *own) for entry in reward}
    counts = Counter(service.name for _, service in places)
    for place, service in places:
        if counts[service.name] > 1:
            yield Violation(f"{place}.name", f"{service.name!r} is listed {counts[service.name]} times; list it once")
        elif service.name not in asked:
            yield Violation(
                f"{place}.name",
                f"no function is {service.name!r}, so that nothing would ask it; name it in reward.functions"
                f" (`function: {service.name}`), in a source's `reward` or in that of a held-out set",
            )
        if isinstance(service, ModelReward):
            yield from _model(place, service)
        is_own = isinstance(service, ModelReward) and service.path is not None
        if not is_own and (problem := url_problem(service.url)) is not None:
            yield Violation(f"{place}.url", problem)
        if isinstance(service, JudgeReward):
            yield from _judge(place, service)
        yield from _stuck(config, place, service)
        if service.api_key_variable is not None and not _VARIABLE.fullmatch(service.api_key_variable):
            yield Violation(  # without its value, which may be the key
                f"{place}.api_key_variable",
                "is no name of an environment variable; valid: letters, digits and `_`. The file names the variable and"
                " never holds the key",
            )


def _judge(place: str, judge: JudgeReward) -> Iterator[Violation]:
    if "response" not in PLACEHOLDER.findall(judge.prompt):
        yield Violation(f"{place}.prompt", "has no {response}, so that the judge would see no response")
    if (judge.regex is None) == (judge.json_key is None):
        yield Violation(
            place,
            f"needs one of `regex` and `json_key`, by which the reward is read from the judge's answer; it has"
            f" {'none' if judge.regex is None else 'both'}",
        )
    if judge.lowest is not None and judge.highest is not None and judge.lowest >= judge.highest:
        yield Violation(f"{place}.lowest", f"is {judge.lowest:g}; must be < highest ({judge.highest:g})")
    if judge.values and (judge.lowest is not None or judge.highest is not None):
        yield Violation(
            f"{place}.values", "contradicts `lowest` and `highest`, which are for numbers; keep one of them"
        )


def _model(place: str, model: ModelReward) -> Iterator[Violation]:
    if "response" not in PLACEHOLDER.findall(model.text):
        yield Violation(f"{place}.text", "has no {response}, so that the model would see no response")
    if model.path is None:
        return
    if model.url:
        yield Violation(f"{place}.url", "contradicts `path`, for which the run starts servers; keep one of them")
    if model.api_key_variable is not None:
        yield Violation(
            f"{place}.api_key_variable", "contradicts `path`: the run gives its own servers a key; valid with `url`"
        )


def _stuck(config: Config, place: str, service: RemoteReward) -> Iterator[Violation]:
    for phase in ("rollout", "eval"):
        bound = getattr(config.watchdog, f"{phase}_seconds")
        if config.watchdog.enabled and bound is not None and bound <= service.deadline_seconds:
            yield Violation(
                f"{place}.deadline_seconds",
                f"is {service.deadline_seconds:g}; must be < watchdog.{phase}_seconds ({bound:g}), or the run would end"
                " as stuck before that deadline can resolve the delay",
            )


def _places(reward: Reward) -> Iterator[tuple[str, RemoteReward]]:
    """(dotted key, service) of each service."""
    for index, service in enumerate(reward.http):
        yield f"reward.http.{index}", service
    for index, judge in enumerate(reward.judge):
        yield f"reward.judge.{index}", judge
    for index, model in enumerate(reward.model):
        yield f"reward.model.{index}", model


def url_problem(url: str) -> str | None:
    """Why a service's `url` cannot be one, without the URL itself; or None."""
    if url.startswith("$"):
        return None if _VARIABLE.fullmatch(url[1:]) else "must be $NAME of an environment variable, or a URL"
    try:
        parts = urlsplit(url)
        has_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # no port number, or an open bracket
        has_address = False
        parts = None
    if not has_address or parts is None:
        return "must begin with http:// or https:// and a host, or be $NAME of an environment variable that holds it"
    if parts.username is not None or parts.password is not None:
        return "holds a user or a password; put the whole URL into an environment variable and write $NAME"
    return None


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

"""The rules of rewards: the functions of a sum with their names and conditions, and the services asked over HTTP.

The first part checks every sum of functions (`reward.functions` and the own rewards of sources and held-out sets) and
reads the conditions of `only_if`; `rewards/weighted_sum.py` reads them with the same `parse_condition`. The second part
checks the services of `reward.http`, `reward.judge` and `reward.model`: their names, addresses, keys and deadlines.
`rewards/remote.py` asks them.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from gspo_mega.base.errors import Violation
from gspo_mega.base.processes import DEFAULT_TOTAL_SECONDS
from gspo_mega.config.prompt_sources import eval_sets
from gspo_mega.config.schema import Config, JudgeReward, ModelReward, OwnReward, RemoteReward, Reward, Watchdog

# A scoring on a machine that is held up may take this many times its deadline, and is tried this often.
MOST_DEADLINES = 3
MOST_ATTEMPTS = 3
# What the prompt of a judge or the text of a reward model may hold in braces; group 1 is the name.
PLACEHOLDER = re.compile(r"\{(prompt|response|answer|num_response_tokens|(?:metadata|options)\.[^{}\s]+)\}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
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


def validate_reward_functions(config: Config) -> Iterator[Violation]:
    """Yield names that occur twice in a sum, and conditions on values that are not known by then."""
    yield from _validate_sum(config.reward, "reward.functions", config.reward.functions)
    for index, source in enumerate(config.data.sources):
        yield from _validate_sum(config.reward, f"data.sources.{index}.reward", source.reward or ())
    if config.eval is not None:
        yield from _validate_sum(config.reward, "eval.reward", config.eval.reward or ())
        for index, entry in enumerate(config.eval.sets):
            yield from _validate_sum(config.reward, f"eval.sets.{index}.reward", entry.reward or ())


def _validate_sum(reward: Reward, place: str, functions: OwnReward) -> Iterator[Violation]:
    names = function_names(functions)
    for name, count in Counter(names).items():
        if count > 1:
            yield Violation(
                place,
                f"{name!r} is listed {count} times; list it once, with the summed weight, or give each a `name`",
            )
    for index, entry in enumerate(functions):
        total = entry.options.get("total_seconds", DEFAULT_TOTAL_SECONDS)
        if entry.function == "code" and isinstance(total, int | float) and total >= reward.deadline_seconds:
            yield Violation(
                f"{place}.{index}.options",
                f"total_seconds is {total:g}, and after reward.deadline_seconds ({reward.deadline_seconds:g}) a"
                " scoring has failed; a program that takes too long would have no reward instead of 0. Valid: less",
            )
        for text in entry.only_if:
            condition = parse_condition(text)
            if condition is None:
                yield Violation(
                    f"{place}.{index}.only_if",
                    f"{text!r} is no condition; valid: the name of a function above it, which then has to give 1, or"
                    " a comparison such as `code >= 0.5` (with >=, >, <=, < or ==)",
                )
            elif condition.name not in names[:index]:
                above = ", ".join(names[:index])
                yield Violation(
                    f"{place}.{index}.only_if",
                    f"{condition.name!r} is no function above this one; "
                    + (f"valid: {above}" if above else "this one is the first, so nothing is known before it"),
                )


def function_names(functions: OwnReward) -> list[str]:
    """Return the name of each function of a sum, as metrics, the parts of a response's reward and `only_if` use it."""
    return [entry.name or entry.function for entry in functions]


@dataclass(frozen=True)
class Condition:
    """`NAME SIGN BOUND`: a condition on the value that an earlier function gave to the same response."""

    name: str
    sign: str
    bound: float

    def holds(self, value: float) -> bool:
        return _SIGNS[self.sign](value, self.bound)


def parse_condition(text: str) -> Condition | None:
    """Read an entry of `only_if`; a bare `NAME` is short for `NAME >= 1`. Returns None if the text is no condition."""
    found = _CONDITION.fullmatch(text)
    return None if found is None else Condition(found[1], found[2] or ">=", float(found[3] or 1))


def validate_reward_services(config: Config) -> Iterator[Violation]:
    """Yield what is wrong with the services: those that cannot be asked, and those that nothing asks."""
    places = list(_services_by_key(config.reward))
    own = [source.reward or () for source in config.data.sources] + [
        one.reward or () for one in eval_sets(config.eval, config.data)
    ]
    asked = {entry.function for reward in (config.reward.functions, *own) for entry in reward}
    counts = Counter(service.name for _, service in places)
    for place, service in places:
        if counts[service.name] > 1:
            yield Violation(f"{place}.name", f"{service.name!r} is listed {counts[service.name]} times; list it once")
        elif service.name not in asked:
            yield Violation(
                f"{place}.name",
                f"no function is {service.name!r}, so nothing would ask it; name it in reward.functions"
                f" (`function: {service.name}`), in a source's `reward` or in that of a held-out set",
            )
        if isinstance(service, ModelReward):
            yield from _validate_reward_model(place, service)
        is_own = isinstance(service, ModelReward) and service.path is not None
        if not is_own and (problem := url_problem(service.url)) is not None:
            yield Violation(f"{place}.url", problem)
        if isinstance(service, JudgeReward):
            yield from _validate_judge(place, service)
        yield from _validate_service_deadline(config.watchdog, place, service)
        if service.api_key_variable is not None and not _VARIABLE.fullmatch(service.api_key_variable):
            yield Violation(  # without its value, which may be the key
                f"{place}.api_key_variable",
                "is no name of an environment variable; valid: letters, digits and `_`. The file names the variable and"
                " never holds the key",
            )


def _validate_judge(place: str, judge: JudgeReward) -> Iterator[Violation]:
    if "response" not in PLACEHOLDER.findall(judge.prompt):
        yield Violation(f"{place}.prompt", "has no {response}, so the judge would see no response")
    if (judge.regex is None) == (judge.json_key is None):
        yield Violation(
            place,
            f"needs one of `regex` and `json_key`, which say how the reward is read from the judge's answer; it has"
            f" {'none' if judge.regex is None else 'both'}",
        )
    if judge.lowest is not None and judge.highest is not None and judge.lowest >= judge.highest:
        yield Violation(f"{place}.lowest", f"is {judge.lowest:g}; must be < highest ({judge.highest:g})")
    if judge.values and (judge.lowest is not None or judge.highest is not None):
        yield Violation(
            f"{place}.values", "contradicts `lowest` and `highest`, which are for numbers; keep one of them"
        )


def _validate_reward_model(place: str, model: ModelReward) -> Iterator[Violation]:
    if "response" not in PLACEHOLDER.findall(model.text):
        yield Violation(f"{place}.text", "has no {response}, so the model would see no response")
    if model.path is None:
        return
    if model.url:
        yield Violation(f"{place}.url", "contradicts `path`, for which the run starts servers; keep one of them")
    if model.api_key_variable is not None:
        yield Violation(
            f"{place}.api_key_variable", "contradicts `path`: the run gives its own servers a key; valid with `url`"
        )


def _validate_service_deadline(watchdog: Watchdog, place: str, service: RemoteReward) -> Iterator[Violation]:
    for phase in ("rollout", "eval"):
        bound = getattr(watchdog, f"{phase}_seconds")
        if watchdog.enabled and bound is not None and bound <= service.deadline_seconds:
            yield Violation(
                f"{place}.deadline_seconds",
                f"is {service.deadline_seconds:g}; must be < watchdog.{phase}_seconds ({bound:g}), or the run would end"
                " as stuck before that deadline can resolve the delay",
            )


def is_variable_name(text: str) -> bool:
    """Return whether a text can be the name of an environment variable."""
    return _VARIABLE.fullmatch(text) is not None


def url_problem(url: str) -> str | None:
    """Return why a service's `url` is not valid, or None. The text never holds the URL, which may contain a secret."""
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


def services_by_name(reward: Reward) -> dict[str, RemoteReward]:
    """Return the services by name, in the order of the file. Functions name them."""
    return {service.name: service for _, service in _services_by_key(reward)}


def total_service_seconds(reward: Reward) -> float:
    """Return how many seconds all services together may take for one response, asked in turn; 0 without services."""
    return sum((service.deadline_seconds for _, service in _services_by_key(reward)), 0.0)


def _services_by_key(reward: Reward) -> Iterator[tuple[str, RemoteReward]]:
    """Yield (dotted key, service) of each service."""
    for index, service in enumerate(reward.http):
        yield f"reward.http.{index}", service
    for index, judge in enumerate(reward.judge):
        yield f"reward.judge.{index}", judge
    for index, model in enumerate(reward.model):
        yield f"reward.model.{index}", model

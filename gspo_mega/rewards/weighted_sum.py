"""A reward as a weighted sum: its functions with weights and conditions, and the total of their replies.

`table_of` makes the functions of a configuration's sums, `tally` adds up the replies to one response. The scoring pool
asks the functions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gspo_mega.base.errors import RewardError
from gspo_mega.base.records import REWARD_TOLERANCE
from gspo_mega.config.schema import OwnReward, Reward, RewardFunction
from gspo_mega.config.validate_rewards import Condition, function_names, parse_condition, services_by_name
from gspo_mega.rewards.functions import BUILTINS, VERIFIERS

# What one function answers; None if a condition of its `only_if` did not hold, so that it was not asked.
Reply = dict[str, Any] | None


@dataclass(frozen=True)
class WeightedFunction:
    """One function of a sum. `label` is its name in an episode's `reward_parts`; a verifier's 1 says that the
    response is right.
    """

    label: str
    weight: float
    is_verifier: bool
    only_if: tuple[Condition, ...] = ()

    def is_known(self, replies: Mapping[str, Reply]) -> bool:
        """Return whether the functions that it depends on have been asked."""
        return all(condition.name in replies for condition in self.only_if)

    def is_open(self, replies: Mapping[str, Reply]) -> bool:
        """Return whether all its conditions hold; none holds on a function that failed or was not asked."""
        return all(
            reply is not None and "value" in reply and condition.holds(reply["value"])
            for condition in self.only_if
            for reply in [replies[condition.name]]
        )


def table_of(
    settings: Reward, source_rewards: Mapping[str, OwnReward]
) -> tuple[
    dict[str, Any], dict[str, dict[str, Any]], tuple[WeightedFunction, ...], dict[str, tuple[WeightedFunction, ...]]
]:
    """Return (the set-up message of the processes, the calls of services as `{label: {"function": service, "options":
    ...}}`, the functions of the sum, the functions of each source with a sum of its own).

    A name that occurs twice gets a number appended. Raises RewardError if a service has the name of a built-in.
    """
    services = services_by_name(settings)
    for name in services:
        if name in BUILTINS:
            raise RewardError(f"reward {name!r} is a built-in; give the service of that name another one")
    functions: dict[str, dict[str, Any]] = {}

    def label_of(name: str, function: str, options: dict[str, Any]) -> str:
        label, uses = name, 1
        while label in functions:
            uses += 1
            label = f"{name}#{uses}"
        functions[label] = {"function": function, "options": options}
        return label

    def entries_of(reward: OwnReward, shares: bool) -> tuple[WeightedFunction, ...]:
        """Make the entries of one sum. `shares`: a function that another sum already has with the same options keeps
        its label.
        """
        labels: list[str] = []
        names = function_names(reward)
        for name, one in zip(names, reward, strict=True):
            asked = {"function": one.function, "options": one.options}
            there = (label for label, entry in functions.items() if entry == asked and label not in labels)
            found = next(there, None) if shares and name == one.function else None
            labels.append(found or label_of(name, one.function, one.options))
        called = dict(zip(names, labels, strict=True))
        return tuple(_entry(one, label, called) for one, label in zip(reward, labels, strict=True))

    entries = entries_of(settings.functions, shares=False)
    known: list[tuple[OwnReward, tuple[WeightedFunction, ...]]] = []
    of_source: dict[str, tuple[WeightedFunction, ...]] = {}
    for source, reward in source_rewards.items():
        own = next((found for one, found in known if one == reward), None)
        if own is None:
            own = entries_of(reward, shares=True)
            known.append((reward, own))
        of_source[source] = own
    remote = {label: entry for label, entry in functions.items() if entry["function"] in services}
    setup = {
        "functions": {label: entry for label, entry in functions.items() if label not in remote},
        "memory_bytes": settings.memory_bytes,
        "file_bytes": settings.file_bytes,
        "network": settings.network,
    }
    return setup, remote, entries, of_source


def _entry(function: RewardFunction, label: str, labels: Mapping[str, str]) -> WeightedFunction:
    """Make the entry of one function. `labels`: the labels of the sum's functions, by the names that conditions use for
    them.
    """
    conditions = [_condition(text) for text in function.only_if]
    named = tuple(replace(one, name=labels.get(one.name, one.name)) for one in conditions)
    return WeightedFunction(label, function.weight, function.function in VERIFIERS, named)


def _condition(text: str) -> Condition:
    condition = parse_condition(text)
    if condition is None:  # configurations that come from a file are refused earlier
        raise RewardError(f"reward: only_if: {text!r} is no condition")
    return condition


@dataclass
class Tally:
    """What the functions of a sum gave one response.

    Attributes:
        parts: each function's value and the further numbers that it returned; `LABEL/counted` says whether the
            conditions of a function that has some held (1 or 0).
        terms: the terms of the sum; 0 for a function whose conditions did not hold.
        failures: `(kind, text)` of each function that failed.
        causes: for each function that gave 0 because of a failure that the response caused, the cause (`blame.CAUSES`).
        correct: whether all functions that declare it call the response right. If none declares: False if a function
            was not asked, else None.
    """

    parts: dict[str, float]
    terms: list[float]
    failures: list[tuple[str, str]]
    correct: bool | None
    causes: list[str] = field(default_factory=list)


def tally(entries: tuple[WeightedFunction, ...], replies: Mapping[str, Reply]) -> Tally:
    """Add up the replies to one response. `replies`: by label."""
    parts: dict[str, float] = {}
    terms: list[float] = []
    failures: list[tuple[str, str]] = []
    verdicts: list[bool] = []
    for entry in entries:
        reply = replies[entry.label]
        if entry.only_if:
            parts[f"{entry.label}/counted"] = float(reply is not None)
        if reply is None:
            terms.append(0.0)
            continue
        if "failure" in reply:
            failures.append((reply["failure"], f"{entry.label}: {reply['why']}"))
            continue
        parts[entry.label] = reply["value"]
        parts |= {f"{entry.label}/{name}": value for name, value in reply["parts"].items()}
        terms.append(entry.weight * reply["value"])
        if entry.is_verifier:
            verdicts.append(reply["value"] == 1.0)
        elif reply["correct"] is not None:
            verdicts.append(reply["correct"])
    if not verdicts and any(reply is None for reply in replies.values()):
        verdicts = [False]
    causes = [reply["cause"] for entry in entries if (reply := replies[entry.label]) and "cause" in reply]
    return Tally(parts, terms, failures, all(verdicts) if verdicts and not failures else None, causes)


def no_verdict(labels: Iterable[str], place: str) -> str:
    """Return the text of an error: none of the functions says what is correct in the held-out set `place`."""
    return (
        f"held-out evaluation: no reward function says which responses are correct ({', '.join(labels)}). Return"
        f" {{'reward': x, 'correct': True or False}} from one, or set {place}.correct_threshold, the reward from which"
        " a response is correct"
    )


def sum_of(terms: list[float]) -> float:
    """Return the sum of the terms, the same in any order; exactly 0 if within the rounding of terms that cancel."""
    try:
        total = math.fsum(terms)
    except (OverflowError, ValueError):  # finite terms with an infinite sum, or infinite terms of both signs
        return sum(terms)
    if not math.isfinite(total):
        return total
    return 0.0 if abs(total) <= REWARD_TOLERANCE * max(map(abs, terms), default=0.0) else total

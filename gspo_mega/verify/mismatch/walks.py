"""Plan the evaluations that lead from the sampled log-probs to the trainer's, one cause at a time, in both orders.

A point is one evaluation of the fixed tokens. Along a walk the differences add up to d = trainer - rollout exactly,
token by token, in either order.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from gspo_mega.verify.mismatch.causes import (
    ALTERNATIVES,
    CAUSES,
    ENGINES,
    HOW,
    SAMPLED,
    Cause,
    Facts,
    Nothing,
    Settings,
)

Side = Literal["server", "trainer"]


@dataclass(frozen=True)
class Point:
    """One evaluation of the tokens. `settings`: sorted (key, JSON value) pairs that differ from the run's own; keys
    that begin with `@` are not configuration keys.
    """

    side: Side
    settings: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, side: Side, settings: Settings) -> Point:
        return cls(side, tuple(sorted((key, json.dumps(value, sort_keys=True)) for key, value in settings.items())))

    @property
    def values(self) -> dict[str, Any]:
        """The settings, decoded."""
        return {key: json.loads(value) for key, value in self.settings}

    @property
    def keys(self) -> dict[str, Any]:
        """The settings that are configuration keys. Points with different keys need different servers."""
        return {key: value for key, value in self.values.items() if not key.startswith("@")}

    @property
    def name(self) -> str:
        """Name of the point's file of log-probs."""
        return f"{self.side}-{hashlib.sha256(json.dumps(self.settings).encode()).hexdigest()[:12]}"


@dataclass(frozen=True)
class WalkStep:
    """One step of a walk: `cause` adds the log-prob at `end` less that at `start`."""

    cause: str
    start: Point
    end: Point


@dataclass(frozen=True)
class WalkPlan:
    """`walks`: by the name of the order, each from the sampled log-probs to the trainer's. `nothing`: the causes that
    are not measured, and why. `alternatives`: trainer points that replace the last point of a walk.
    """

    walks: Mapping[str, tuple[WalkStep, ...]]
    nothing: Mapping[str, Nothing]
    alternatives: Mapping[str, Point]

    @property
    def points(self) -> list[Point]:
        """Every evaluation that is needed, without repeats."""
        linked = [point for links in self.walks.values() for link in links for point in (link.start, link.end)]
        return list(dict.fromkeys([*linked, *self.alternatives.values()]))

    def origin(self, points: Sequence[Point]) -> str | None:
        """Return the cause or the alternative that needs one of these points; None if every walk needs one of them."""
        if any(point in points for point in (self.sampled, self.trained)):
            return None
        for links in self.walks.values():
            for link in links:
                # The server's causes are made neutral at a link's end, the trainer's at its start.
                changed = link.end if link.end.side == "server" else link.start
                if link.cause != ENGINES and changed in points:
                    return link.cause
        return next((name for name, point in self.alternatives.items() if point in points), None)

    @property
    def sampled(self) -> Point:
        """The point of the log-probs that the server returned as it sampled."""
        return Point.of("server", {HOW: SAMPLED})

    @property
    def trained(self) -> Point:
        """The point of the trainer's log-probs, as the run computes them."""
        return Point.of("trainer", {})


def make_plan(
    facts: Facts,
    both_orders: bool = True,
    refused: Mapping[str, str] | None = None,
    causes: Sequence[Cause] = CAUSES,
) -> WalkPlan:
    """Return the walks of a configuration over the causes in `budget.causes` (all by default). `refused`: causes and
    alternatives that cannot be changed here, and why; what they contribute stays in another step of the walk.
    """
    only, refused = facts.config.budget.causes, refused or {}
    found: dict[tuple[str, Side], Settings] = {}
    nothing: dict[str, Nothing] = {}
    for cause in causes:
        settings = cause.neutral(facts)
        if isinstance(settings, Nothing):
            nothing.setdefault(cause.name, settings)
            continue
        if cause.name in refused:
            settings = Nothing(refused[cause.name], False)
        elif only and cause.name not in only and not cause.pinned:
            settings = Nothing("left out by budget.causes", False)
        if isinstance(settings, Nothing):
            nothing.setdefault(cause.name, settings)
        else:
            found[cause.name, cause.side] = settings
    nothing = {name: why for name, why in nothing.items() if not any(name == measured for measured, _ in found)}
    active = {side: [c for c in causes if c.side == side and (c.name, side) in found] for side in ("server", "trainer")}
    orders = {"forward": {side: list(chosen) for side, chosen in active.items()}}
    if both_orders:
        orders["backward"] = {side: _reversed(chosen) for side, chosen in active.items()}
    walks = {name: tuple(_walk(order["server"], order["trainer"], found)) for name, order in orders.items()}
    alternatives = {}
    for alternative in ALTERNATIVES:
        settings = alternative.settings(facts)
        if not isinstance(settings, Nothing) and alternative.name not in refused:
            alternatives[alternative.name] = Point.of("trainer", settings)
    return WalkPlan(walks, nothing, alternatives)


def _reversed(causes: list[Cause]) -> list[Cause]:
    """Return the reverse order, in which pinned causes keep their places and each cause comes after its `after`."""
    free = [cause for cause in reversed(causes) if not cause.pinned]
    for cause in [cause for cause in causes if cause.after and not cause.pinned]:
        last = max((index for index, other in enumerate(free) if other.name in cause.after), default=-1)
        if free.index(cause) < last:
            free.remove(cause)
            free.insert(last, cause)
    order = iter(free)
    return [cause if cause.pinned else next(order) for cause in causes]


def _walk(server: list[Cause], trainer: list[Cause], found: Mapping[tuple[str, Side], Settings]):
    """Yield the steps: the server's causes made neutral one by one, the engines, the trainer's causes put back."""
    settings: dict[str, Any] = {HOW: SAMPLED}
    here = Point.of("server", settings)
    for cause in server:
        settings = {**settings, **found[cause.name, "server"]}
        there = Point.of("server", settings)
        yield WalkStep(cause.name, here, there)
        here = there
    for index in range(len(trainer) + 1):
        there = Point.of("trainer", _neutral(trainer[index:], found))
        yield WalkStep(trainer[index - 1].name if index else ENGINES, here, there)
        here = there


def _neutral(causes: Sequence[Cause], found: Mapping[tuple[str, Side], Settings]) -> Settings:
    """Return the settings of a trainer with these causes neutral; of two that set a key, the first put back decides."""
    settings: dict[str, Any] = {}
    for cause in reversed(causes):
        settings |= found[cause.name, "trainer"]
    return settings


def contributions(links: Sequence[WalkStep], log_probs: Mapping[Point, np.ndarray]) -> dict[str, np.ndarray]:
    """Return what each cause adds to d, by name, [T] float64 nats: the differences along `links`.

    `log_probs`: of the same tokens at every point, [T] float64 nats. A cause with two steps has their sum. The values
    of all causes add up to the last point less the first, token by token, up to float64 rounding.
    """
    added: dict[str, np.ndarray] = {}
    for link in links:
        difference = log_probs[link.end] - log_probs[link.start]
        added[link.cause] = added[link.cause] + difference if link.cause in added else difference
    return added

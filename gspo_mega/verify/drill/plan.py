"""Which faults a drill tries, in which order and at which moments: all from its seed and what the reference reached.

Kinds are dealt like cards, so that each comes up equally often: the deck of all kinds is shuffled, dealt to the end,
and shuffled again. One deck is for runs that sample, one for runs that train on recorded rollouts; those start sooner,
and have no servers to strike.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gspo_mega.base import failpoints
from gspo_mega.verify.drill.kinds import KINDS, Fault, Kind

MOST_FAULTS = 3  # of one run, unless the user says otherwise
_WHEN = ("start", "steps", "point")
_WHEN_WEIGHTS = (0.15, 0.4, 0.45)


@dataclass(frozen=True)
class Trial:
    """One run with its faults. `is_live`: it samples from servers; else it trains on the reference's rollouts."""

    number: int
    is_live: bool
    faults: tuple[Fault, ...]


def trials(
    seed: int,
    kinds: Sequence[str],
    reached: Mapping[bool, Mapping[str, int]],
    live_share: float,
    most: int = MOST_FAULTS,
) -> Iterator[Trial]:
    """The trials of a seed, without end. `reached`: for runs that sample (True) and for the others, how often an
    undisturbed one reaches each declared point. `live_share`: the share of runs that sample. `most`: faults of a run.
    """
    decks: dict[bool, list[str]] = {True: [], False: []}
    number = 0
    while True:
        draw = random.Random(f"{seed} {number}")
        can_replay = any(not KINDS[name].is_live for name in kinds)
        is_live = draw.random() < live_share or not can_replay
        names = []
        for _ in range(draw.randint(1, most)):
            if not decks[is_live]:
                decks[is_live] = [name for name in kinds if is_live or not KINDS[name].is_live]
                draw.shuffle(decks[is_live])
            names.append(decks[is_live].pop())
        faults = [draw_fault(KINDS[name], reached[is_live], draw) for name in names]
        # A command can begin with one fault only. Those of the start come before those of the steps: what a run does
        # not live to see is not tried.
        faults.sort(key=lambda one: (not KINDS[one.kind].begins_with_command, one.when != "start"))
        yield Trial(number, is_live, tuple(faults))
        number += 1


def draw_fault(kind: Kind, reached: Mapping[str, int], draw: random.Random) -> Fault:
    """A fault of this kind at a random moment."""
    points = {
        name: count
        for name, count in sorted(reached.items())
        if name.startswith(kind.points) and (kind.do in ("", "kill") or name not in failpoints.MOMENTS)
    }
    when = draw.choices(_WHEN, _WHEN_WEIGHTS)[0]
    if kind.do or kind.points:
        when = "point"
    elif kind.calls:
        when = "start"
    if when == "point" and not points:
        when = "steps"
    point = draw.choice(list(points)) if when == "point" else ""
    return Fault(
        kind.name,
        when,
        place=draw.random(),
        point=point,
        hit=draw.randint(1, max(1, points.get(point, 1) // 2)),
        victim=draw.random(),
        amount=draw.random(),
        seconds=draw.uniform(*kind.seconds),
    )


@dataclass(frozen=True)
class Row:
    """What came of one fault. `tried`: whether it was struck; a run that ended before is no trial. `ended`: what the
    run did. `equal`: whether the run's end is an undisturbed one's, to the bit.
    """

    trial: int
    is_live: bool
    kind: str
    moment: str
    done: str
    tried: bool
    ended: str
    equal: bool
    problems: list[str]
    seconds: float


def table(rows: Sequence[Row], skipped: Mapping[str, str]) -> list[tuple[str, ...]]:
    """One line per kind: kind, times tried, of these in runs that sampled, runs that went on, that ended and were
    continued, ends that were equal to the bit, and rows with problems. `skipped`: why a kind could not be tried.
    """
    lines: list[tuple[str, ...]] = []
    for name in KINDS:
        own = [row for row in rows if row.kind == name and row.tried]
        if not own and name in skipped:
            lines.append((name, "0", "", "", "", "", f"not tried: {skipped[name]}"))
            continue
        went_on = sum(row.ended == "went on" for row in own)
        wrong = [problem for row in own for problem in row.problems]
        counts = (len(own), sum(row.is_live for row in own), went_on, len(own) - went_on, sum(row.equal for row in own))
        lines.append((name, *map(str, counts), "; ".join(dict.fromkeys(wrong))[:120]))
    return lines


HEADERS = ("fault", "tried", "live", "went on", "continued", "equal", "")

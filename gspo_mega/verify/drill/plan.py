"""Which faults a drill tries and at which moments, by its seed, by what was struck so far and by what a run reaches.

A trial takes the kinds that were struck least, in random order among equals. A kind that was drawn and not struck
counts as half of one, so that one which a configuration does not have (no episode worker, say) does not come up
forever. Runs that train on recorded rollouts start sooner, and have no servers to strike.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gspo_mega.base import failpoints
from gspo_mega.verify.drill.kinds import KINDS, Fault, Kind

MOST_FAULTS = 6  # of one run, unless the user says otherwise
_EACH_STEP = "rollout.batch"  # the point that every step reaches once
_WHEN = ("start", "steps", "point")
_WHEN_WEIGHTS = (0.15, 0.4, 0.45)


@dataclass(frozen=True)
class Trial:
    """One run with its faults. `is_live`: it samples from servers; else it trains on the reference's rollouts."""

    number: int
    is_live: bool
    faults: tuple[Fault, ...]


def draw_trial(
    seed: int,
    number: int,
    kinds: Sequence[str],
    rows: Sequence[Row],
    reached: Mapping[bool, Mapping[str, int]],
    live_share: float,
    most: int = MOST_FAULTS,
) -> Trial:
    """The trial `number` of a seed, after those of `rows`. `reached`: for runs that sample (True) and for the others,
    how often an undisturbed one reaches each declared point. `live_share`: the share of runs that sample. `most`:
    faults of a run.
    """
    draw = random.Random(f"{seed} {number}")
    can_replay = any(not KINDS[name].is_live for name in kinds)
    is_live = draw.random() < live_share or not can_replay
    names = [name for name in kinds if is_live or not KINDS[name].is_live]
    counts = dict.fromkeys(names, 0.0)
    for row in rows:
        if row.kind in counts:
            counts[row.kind] += 1.0 if row.tried else 0.5
    draw.shuffle(names)
    names.sort(key=counts.__getitem__)
    names = names[: draw.randint((most + 1) // 2, most)]
    return Trial(number, is_live, tuple(draw_fault(KINDS[name], reached[is_live], draw, len(names)) for name in names))


def draw_fault(kind: Kind, reached: Mapping[str, int], draw: random.Random, num_faults: int = 1) -> Fault:
    """A fault of this kind at a random moment. `num_faults`: of the run; each has about that part of its length."""
    points = {
        name: count
        for name, count in sorted(reached.items())
        if name.startswith(kind.points) and (kind.do in ("", "kill") or name not in failpoints.MOMENTS)
    }
    late = {name for name, count in points.items() if 2 * count < reached.get(_EACH_STEP, 0)}
    if kind.do and num_faults > 1:  # its command would come to its end before another fault is struck
        points = {name: count for name, count in points.items() if name not in late} or points
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
        place=draw.random() / max(1, num_faults if when == "steps" else 1),
        point=point,
        hit=draw.randint(1, max(1, points.get(point, 1) // (num_faults + 1))),
        is_late=point in late,
        victim=draw.random(),
        amount=draw.random(),
        seconds=draw.uniform(*kind.seconds),
    )


def next_fault(left: Sequence[Fault], is_new: bool) -> Fault:
    """Which of the faults that are left comes next. `is_new`: a command is about to start. It can begin with one fault
    only, and what a run does not live to see is not tried: points that come once, at a run's end, are the last.
    """
    if is_new:
        return min(left, key=lambda one: (not KINDS[one.kind].begins_with_command, one.when != "start", one.is_late))
    return min(left, key=lambda one: (KINDS[one.kind].begins_with_command, one.is_late))


@dataclass(frozen=True)
class Row:
    """What came of one fault. `tried`: whether it was struck; a run that ended before is no trial. `ended`: what the
    run did. `equal`: whether the run's end is an undisturbed one's, to the bit. `code`: the version that ran. `drill`:
    of which drill the trial is, where several keep their rows in one file. `seconds`, `processor_seconds`: the share
    of one fault in those of the trial.
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
    code: str = ""
    drill: str = ""
    processor_seconds: float = 0.0


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

"""Does a run learn, and if not, since when; what moved first; and what to try. docs/report.md says how a run is judged.

`learning_verdicts` gives the sentences about the reward and the held-out accuracy, and `marks_of` the steps that the
curves mark. `Verdict` and the helpers `total`, `recent` and `said_of` are also used by `verdicts.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal, NamedTuple

from gspo_mega.metrics.trends import FEWEST_STEPS, Setback, Trend, setbacks_of, trend_of
from gspo_mega.report.run_record import RunRecord, Series

Level = Literal["good", "note", "warning"]

REWARD = "reward/mean"
REWARD_ERROR = "reward/standard_error"
# The metrics that may move before the reward does, and their names in sentences.
EARLY_SIGNS = {
    "policy/entropy": "entropy",
    "optimizer/grad_norm": "gradient norm",
    "policy/clip_fraction": "clip fraction",
    "policy/k3": "KL of the update (k3)",
    "policy/log_ratio/update/sd": "spread of the update's log-ratio",
    "mismatch/k3": "mismatch of trainer and servers (k3)",
    "mismatch/budget_share": "mismatch as a share of the clip range",
    "response/length_mean": "response length",
    "response/truncated_fraction": "truncated responses",
    "groups/constant_fraction": "groups with one reward",
    "routing/changed_since_rollout": "experts changed since the rollout",
}
# Those of them that say how large one step's update was.
OF_AN_UPDATE = ("policy/k3", "policy/log_ratio/update/sd", "optimizer/grad_norm", "policy/clip_fraction")


class Verdict(NamedTuple):
    """A sentence about a run, with the figures that it rests on. `metric`: the curve that shows it."""

    level: Level
    topic: str
    text: str
    metric: str | None = None


class Recent(NamedTuple):
    """The mean of a metric over its last values, which are those of the steps from `first` to `last`."""

    mean: float
    first: int
    last: int


def present(series: Series) -> list[float]:
    """The values of a series without the steps that have none."""
    return [value for value in series if value is not None]


def total(record: RunRecord, metric: str) -> float:
    """The sum of a metric over the steps of a run; 0 if the run does not have it."""
    return math.fsum(present(record.series.get(metric, [])))


def recent(record: RunRecord, metric: str) -> Recent | None:
    """The mean of a metric over the last tenth of its values, at least 3 of them. None if the run does not have it."""
    series = record.series.get(metric, [])
    having = [(step, value) for step, value in zip(record.steps, series) if value is not None]
    last = having[-max(3, len(having) // 10) :]
    if not last:
        return None
    return Recent(math.fsum(value for _, value in last) / len(last), last[0][0], last[-1][0])


def said_of(first: int, last: int) -> str:
    """The steps that a mean is over, as text."""
    return f"step {last}" if first == last else f"mean of steps {first} to {last}"


def learning_verdicts(record: RunRecord) -> Iterable[Verdict]:
    """What the reward, or the loss of a supervised run, and the held-out accuracy say about learning."""
    if not any(step > 0 for step in record.steps):  # step 0 has what was measured before the first step
        yield Verdict("note", "Learning", "no step is complete yet")
    elif REWARD in record.series:
        yield from _reward_verdicts(record)
    elif losses := present(record.series.get("sft/loss", [])):
        first = next(step for step, loss in zip(record.steps, record.series["sft/loss"]) if loss is not None)
        text = f"supervised: loss {losses[0]:.3g} at step {first}, {losses[-1]:.3g} now"
        yield Verdict("note", "Learning", text, "sft/loss")
    yield from _held_out_verdicts(record)


def marks_of(record: RunRecord) -> list[dict[str, str | int]]:
    """The steps that the curves mark: a collapse, the beginning of each setback, and the first step of every attempt
    after the first. Each has `step`, `level` and `text`.
    """
    found: list[dict[str, str | int]] = []
    collapse = collapse_of(record)
    if collapse is not None and collapse.since is not None:
        found.append({"step": collapse.since, "level": "warning", "text": "collapse"})
    for setback in setbacks_of(*_rewards(record)):
        found.append({"step": setback.began, "level": "warning", "text": "setback"})
    for attempt in record.attempts[1:]:
        later = [step for step, at in zip(record.steps, record.times) if attempt.started and at >= attempt.started]
        if later and later[0] != record.steps[0]:
            found.append({"step": later[0], "level": "note", "text": f"attempt {attempt.number}"})
    return found


def _reward_verdicts(record: RunRecord) -> Iterable[Verdict]:
    trend = trend_of(*_rewards(record))
    start, end = said_of(*trend.start_steps), said_of(*trend.end_steps)
    moves = f"reward {trend.start:.3f} at the start ({start}), {trend.end:.3f} now ({end})"
    level = f"; no clear rise since step {trend.level_since}" if trend.level_since is not None else ""
    if trend.kind == "short":
        few = f"{len(present(record.series[REWARD]))} steps are too few to judge"
        yield Verdict("note", "Learning", few if math.isnan(trend.start) else f"{few}: {moves}", REWARD)
    elif trend.kind == "learns":
        yield Verdict("good", "Learning", f"learns: {moves}; above its start since step {trend.since}{level}", REWARD)
    elif trend.kind == "flat" and _held_out_rose(record):
        text = f"{moves}; this difference is within noise, but held-out accuracy rose"
        yield Verdict("note", "Learning", text, REWARD)
    elif trend.kind == "flat":
        yield Verdict("warning", "Learning", f"flat: {moves}; the difference is within noise", REWARD)
    elif trend.kind == "falls":
        highest = f"highest {trend.peak:.3f} at step {trend.peak_step}"
        yield Verdict("warning", "Learning", f"falls: {moves}, {highest}", REWARD)
    else:
        yield from _collapse_verdicts(record, trend, moves)
    setbacks = setbacks_of(*_rewards(record))
    if setbacks:
        yield from _setback_verdicts(record, setbacks)
    if setbacks and trend.kind != "collapsed":
        yield Verdict("note", "What to try", _smaller_updates(record))


def _collapse_verdicts(record: RunRecord, trend: Trend, moves: str) -> Iterable[Verdict]:
    assert trend.since is not None
    highest = f"highest {trend.peak:.3f} at step {trend.peak_step}"
    yield Verdict("warning", "Learning", f"collapsed at step {trend.since}: {moves}, {highest}", REWARD)
    moved = moved_first(record, trend.since)
    if moved:
        listed = "; then ".join(
            f"{EARLY_SIGNS[one.metric]} at step {one.step} ({one.before:.3g} before, {one.after:.3g} then)"
            for one in moved[:4]
        )
        yield Verdict("warning", "What moved first", listed, moved[0].metric)
    elif few := _before_an_early_collapse(record, trend.since):
        yield few
    else:
        yield Verdict("note", "What moved first", "none of the watched metrics left its range before the reward fell")
    yield Verdict("warning", "What to try", _after_a_collapse(record, trend.since, moved))


def _before_an_early_collapse(record: RunRecord, since: int) -> Verdict | None:
    """For a collapse with fewer steps before it than a range needs: how large the last update before it was."""
    before = [place for place, step in enumerate(record.steps) if step < since]
    if not before or len(before) + 1 >= FEWEST_STEPS:
        return None
    said = _update_sentence(record, before[-1])
    if said is None:
        return None
    count = "one step before it is" if len(before) == 1 else f"{len(before)} steps before it are"
    metric = next(name for name in OF_AN_UPDATE if name in record.series)
    return Verdict("warning", "What moved first", f"{count} too few to compare; {said}", metric)


def _update_sentence(record: RunRecord, place: int) -> str | None:
    """How large the update of one step was. If ratios are per sequence, also the range within which a sequence's
    log-ratio is not clipped.
    """
    values = {name: record.series[name][place] for name in OF_AN_UPDATE if name in record.series}
    said = [f"{EARLY_SIGNS[name]} {value:.3g}" for name, value in values.items() if value is not None]
    if not said:
        return None
    low, high = record.settings.get("objective.clip_low"), record.settings.get("objective.clip_high")
    ratio = record.settings.get("objective.ratio") or record.settings.get("algorithm")
    known = (
        ratio in ("sequence", "gspo")
        and isinstance(low, float)
        and isinstance(high, float)
        and values.get("policy/k3") is not None
    )
    clip = f"; k3 is in nats per token, as is the clip range, -{low:g} to +{high:g}" if known else ""
    return f"the update of step {record.steps[place]}: " + ", ".join(said) + clip


def _setback_verdicts(record: RunRecord, setbacks: list[Setback]) -> Iterable[Verdict]:
    deepest = sorted(sorted(setbacks, key=lambda one: one.lowest - one.before)[:3])
    listed = "; ".join(
        f"from {one.before:.3f} ({said_of(*one.before_steps)}), falling from step {one.began}, to {one.lowest:.3f} at"
        f" step {one.step}, and above {0.9 * one.before:.3f} again at step {one.back}"
        for one in deepest
    )
    yield Verdict("warning", "Setbacks", f"{len(setbacks)}: reward fell {listed}", REWARD)
    for one in deepest:
        place = record.steps.index(one.began)
        if place and (said := _update_sentence(record, place - 1)):
            yield Verdict("note", f"Before the setback of step {one.began}", said, "policy/k3")


def _after_a_collapse(record: RunRecord, since: int, moved: list[Moved]) -> str:
    first = moved[0].metric if moved else ""
    if first.startswith(("mismatch/", "routing/")):
        return (
            "trainer and servers parted first: gspo-mega mismatch on this configuration says why;"
            f" start again from before step {since} with its recommendation"
        )
    if first.startswith("response/"):
        return f"responses changed first: read those of step {moved[0].step} and after under Trajectories"
    return (
        f"{_smaller_updates(record)}; start again from before step {since}: what followed the collapse teaches nothing"
    )


def _smaller_updates(record: RunRecord) -> str:
    lr, warmup = record.settings.get("optimizer.lr"), record.settings.get("optimizer.warmup_steps")
    now = f" (now {lr:g})" if isinstance(lr, (int, float)) else ""
    steps = f" (now {warmup})" if warmup is not None else ""
    return f"smaller updates: lower optimizer.lr{now} or raise optimizer.warmup_steps{steps}"


def _held_out(record: RunRecord) -> list[tuple[int, float, float]]:
    """The measurements of the held-out accuracy: step, accuracy, its standard error."""
    series = record.series.get("eval/accuracy", [])
    errors = record.series.get("eval/accuracy_standard_error", [None] * len(series))
    values = zip(record.steps, series, errors)
    return [(step, value, error or 0.0) for step, value, error in values if value is not None]


def _held_out_rose(record: RunRecord) -> bool:
    """Whether the last measurement is above the first by more than two standard errors of their difference."""
    found = _held_out(record)
    return bool(found) and found[-1][1] - found[0][1] > 2 * math.hypot(found[0][2], found[-1][2])


def _held_out_verdicts(record: RunRecord) -> Iterable[Verdict]:
    """Compares the first and the last measurement, by two standard errors of their difference."""
    found = _held_out(record)
    if not found:
        return
    (first, before, wide), (last, after, width) = found[0], found[-1]
    if len(found) == 1:
        text = f"{after:.3f} ± {width:.3f} at step {last}, measured once"
        yield Verdict("note", "Held-out accuracy", text, "eval/accuracy")
        return
    change, error = after - before, math.hypot(wide, width)
    level = "note" if abs(change) <= 2 * error else "good" if change > 0 else "warning"
    when = f"at step {first}" if first > 0 else "before the first step"
    text = f"{before:.3f} ± {wide:.3f} {when}, {after:.3f} ± {width:.3f} at step {last}"
    within = "; the difference is within two standard errors" if level == "note" else ""
    if before == after == 0:
        within = "; no response was right in either"
    yield Verdict(level, "Held-out accuracy", f"{text}{within}", "eval/accuracy")
    best, highest, around = max(found, key=lambda one: one[1])
    # The best of many measurements is too high by chance, so the difference must be more than two standard errors.
    if level != "warning" and around > 0 and width > 0 and highest - after > 4 * math.hypot(around, width):
        text = f"{after:.3f} ± {width:.3f} at step {last}, {highest:.3f} ± {around:.3f} at step {best}"
        yield Verdict(
            "warning", "Held-out accuracy since its best", f"{text}: that checkpoint is better", "eval/accuracy"
        )


class Moved(NamedTuple):
    """An early sign that left its range at `step`, from its mean `before` to the value `after`."""

    metric: str
    step: int
    before: float
    after: float


def collapse_of(record: RunRecord) -> Trend | None:
    """The trend of the reward if it collapsed, else None."""
    trend = trend_of(*_rewards(record))
    return trend if trend.kind == "collapsed" else None


def _rewards(record: RunRecord) -> tuple[list[int], Series, Series]:
    """The steps, the rewards and the standard errors of the rewards."""
    absent: Series = [None] * len(record.steps)
    return record.steps, record.series.get(REWARD, absent), record.series.get(REWARD_ERROR, absent)


def moved_first(record: RunRecord, until: int) -> list[Moved]:
    """The early signs that left their range up to the step `until` and stayed out for two steps, in the order of steps.

    The range of a sign is 6 standard deviations around its mean in the first third of the steps up to `until`. It is
    wider if that third has few steps, because a standard deviation is then not known well.
    """
    found = []
    for metric in EARLY_SIGNS:
        pairs = [
            (step, value)
            for step, value in zip(record.steps, record.series.get(metric, [None] * len(record.steps)), strict=True)
            if value is not None and step <= until
        ]
        base = [value for _, value in pairs[: max(5, len(pairs) // 3)]]
        if len(pairs) < FEWEST_STEPS:
            continue
        mean = math.fsum(base) / len(base)
        spread = math.sqrt(math.fsum((value - mean) ** 2 for value in base) / len(base))
        bound = max(6.0 * spread * (1.0 + 5.0 / len(base)), 0.1 * abs(mean), 1e-9)
        for (step, value), (_, following) in zip(pairs[len(base) :], pairs[len(base) + 1 :]):
            if abs(value - mean) > bound and abs(following - mean) > bound:
                found.append(Moved(metric, step, mean, value))
                break
    return sorted(found, key=lambda moved: moved.step)

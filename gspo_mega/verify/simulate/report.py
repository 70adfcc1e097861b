"""Show what a simulation found: as text for a person, as one JSON object, and as an SVG with three panels (how long
steps take, which division is fastest, how often to save).
"""

from __future__ import annotations

import itertools
import json
import math
from html import escape
from typing import Any

import numpy as np

from gspo_mega.verify.simulate.outcome import SimulationResult

_PANEL, _GAP, _TOP, _HEIGHT, _LEFT = 260, 60, 64, 180, 56
_WIDTH, _ALL = _LEFT + 3 * _PANEL + 2 * _GAP + 16, _TOP + _HEIGHT + 56
_BAR, _MARK, _TEXT, _GRID = "#7aa6d8", "#b3402a", "#444444", "#dddddd"
_BARS = 24


def draw_outcome(outcome: SimulationResult, title: str) -> str:
    """Return the SVG."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_ALL}" role="img"'
        f' font-family="sans-serif" font-size="11" fill="{_TEXT}">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{_WIDTH}" height="{_ALL}" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="14">{escape(title)}</text>',
    ]
    count, edges = np.histogram(outcome.record.steps, bins=_BARS)
    middles = [f"{(low + high) / 2:.0f}" for low, high in itertools.pairwise(edges)]
    parts += _bars(0, "steps by their seconds", count.tolist(), middles, None)
    rows = sorted(outcome.rows, key=lambda row: row.trainer_nodes)
    own = next((place for place, row in enumerate(rows) if row.trainer_nodes == outcome.job.trainer_nodes), None)
    parts += _bars(
        1, "step seconds by trainer nodes", [row.step for row in rows], [str(row.trainer_nodes) for row in rows], own
    )
    if outcome.intervals is not None:
        shares = outcome.intervals.shares
        best = list(shares).index(outcome.intervals.best)
        parts += _bars(
            2,
            "effective % by steps between saves",
            [100 * share for share in shares.values()],
            [str(every) for every in shares],
            best,
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _bars(panel: int, title: str, values: list[float], names: list[str], marked: int | None) -> list[str]:
    left, bottom = _LEFT + panel * (_PANEL + _GAP), _TOP + _HEIGHT
    parts = [f'<text x="{left}" y="{_TOP - 14}">{escape(title)}</text>']
    if not values:
        return [*parts, f'<text x="{left}" y="{_TOP + 20}">not asked for</text>']
    most, width = max(max(values), 1e-9), _PANEL / len(values)
    for fraction in (0.0, 0.5, 1.0):
        at = bottom - _HEIGHT * fraction
        parts.append(
            f'<path d="M{left} {at:.1f}h{_PANEL}" stroke="{_GRID}"/>'
            f'<text x="{left - 6}" y="{at + 4:.1f}" text-anchor="end">{most * fraction:.3g}</text>'
        )
    shown = max(1, -(-len(values) // 6))
    for place, (value, name) in enumerate(zip(values, names)):
        height, at = _HEIGHT * value / most, left + place * width
        colour = _MARK if place == marked else _BAR
        parts.append(
            f'<rect x="{at + 0.1 * width:.1f}" y="{bottom - height:.1f}" width="{0.8 * width:.1f}"'
            f' height="{height:.1f}" fill="{colour}"/>'
        )
        if place % shown == 0 or place == marked:
            parts.append(f'<text x="{at + width / 2:.1f}" y="{bottom + 16}" text-anchor="middle">{escape(name)}</text>')
    return parts


# Stated wherever figures are shown.
APPROXIMATIONS = (
    "the seconds of decoding, training, publishing and saving are the plan's estimates, with its assumptions, unless"
    " --fit scales them",
    "decoding goes on at one rate between two events of a server; as many requests run at once as the cache holds at"
    " their mean length; none is put back when it fills; requests stay on the server that they came to",
    "lengths are independent of each other; scoring, tools, evaluation and dropped groups are left out, and in sampling"
    " the prefixes that a group shares; in training they count if batch.share_prefixes computes them once",
    "failures are independent and exponential; a failed node of the trainer starts everything again from the last"
    " checkpoint and trains the steps since then on recorded rollouts; a lost server comes back with a spare node",
)
_PERCENTILES = (5, 50, 95, 99)


def outcome_json(outcome: SimulationResult) -> str:
    return json.dumps(_values(outcome), indent=2)


def _values(outcome: SimulationResult) -> dict[str, Any]:
    job, record, intervals = outcome.job, outcome.record, outcome.intervals
    steps = np.array(record.steps)
    return {
        "asked": {
            "days": outcome.asked.days,
            "node_mtbf_hours": outcome.asked.mtbf_hours if math.isfinite(outcome.asked.mtbf_hours) else None,
            "seed": outcome.asked.seed,
            "lengths": job.lengths.described,
        },
        "job": {
            "gpus": job.num_gpus,
            "trainer_nodes": job.trainer_nodes,
            "server_nodes": job.server_nodes,
            "num_servers": job.num_servers,
            "requests_at_once_per_server": job.slots,
            "max_staleness": job.max_staleness,
            "train_seconds": job.mean_train,
            "publish_seconds": job.publish,
            "save_seconds": job.save,
            "restart_seconds": job.restart,
            "server_restart_seconds": job.server_restart,
        },
        "fit": None if outcome.fitted is None else {"decode": outcome.fitted.decode, "train": outcome.fitted.train},
        "steps": len(steps),
        "step_seconds": {"mean": float(steps.mean()), **_percentiles(steps)},
        "trainer_wait_seconds": {"mean": float(np.mean(record.waits)), **_percentiles(np.array(record.waits))},
        "trainer_idle_share": record.waiting / record.elapsed,
        "servers_idle_share": outcome.servers_idle,
        "tokens_per_second_per_gpu": outcome.rate,
        "staleness_share": outcome.staleness,
        "elapsed_seconds": record.elapsed,
        "effective_share": outcome.effective,
        "seconds": {
            name: getattr(record, name)
            for name in ("waiting", "training", "publishing", "saving", "repeated", "restarting")
        },
        "failures": {"trainer": record.trainer_failures, "servers": record.server_failures},
        "checkpoint_interval": None
        if intervals is None
        else {
            "best_steps": intervals.best,
            "best_seconds": intervals.best * outcome.mean_step,
            "young_seconds": intervals.young,
            "daly_seconds": intervals.daly,
            "configured_steps": job.save_every,
            "effective_share_by_steps": {str(every): share for every, share in intervals.shares.items()},
        },
        "splits": [vars(row) for row in outcome.rows],
        "approximations": list(APPROXIMATIONS),
    }


def _percentiles(values: np.ndarray) -> dict[str, float]:
    return {f"p{percent}": float(np.percentile(values, percent)) for percent in _PERCENTILES}


def render_outcome(outcome: SimulationResult) -> str:
    """Return the report that `gspo-mega simulate` prints, without a newline at its end."""
    sections = {
        "job": _job(outcome),
        "step": _step(outcome),
        "idle": [_idle(outcome)],
        "stale": [
            "trained tokens by versions that they lagged behind: "
            + ", ".join(f"{lag}: {share:.1%}" for lag, share in enumerate(outcome.staleness))
        ],
        "failures": _failures(outcome),
        "save": _save(outcome),
        "split": _splits(outcome),
        "assumed": list(APPROXIMATIONS),
    }
    return "\n".join(
        f"{title if index == 0 else '':<9} {line}".rstrip()
        for title, lines in sections.items()
        for index, line in enumerate(lines)
    )


def _job(outcome: SimulationResult) -> list[str]:
    job = outcome.job
    if job.server_nodes:
        apart = f" on {job.trainer_nodes} nodes and {job.num_servers} servers on {job.server_nodes}"
    elif outcome.plan.config.cluster.colocated:
        apart = f" and {job.num_servers} {'server' if job.num_servers == 1 else 'servers'}, in turns"
    else:
        apart = ""
    lines = [
        f"{job.num_gpus} {_gpus(outcome, job.num_gpus)}: the trainer{apart}; max_staleness {job.max_staleness},"
        f" on_publish {job.on_publish}",
        f"{job.sequences} responses per step, {job.lengths.described}; at most {job.slots} run at once on a server",
        f"seconds: training {job.mean_train:.1f}, publish {job.publish:.1f}, save {job.save:.0f}, restart"
        f" {job.restart:.0f}, a server's restart {job.server_restart:.0f}",
    ]
    if outcome.fitted is not None:
        lines.append(
            f"fitted: servers take {outcome.fitted.decode:.3g} times the cost model's seconds, the trainer"
            f" {outcome.fitted.train:.3g} times; publish as measured"
        )
    return lines


def _step(outcome: SimulationResult) -> list[str]:
    steps, waits = np.array(outcome.record.steps), np.array(outcome.record.waits)
    lines = [
        f"{len(steps)} steps in {_span(outcome.record.elapsed)}",
        f"{'seconds':<14}{'mean':>9}" + "".join(f"{f'p{percent}':>9}" for percent in _PERCENTILES),
    ]
    for name, values in (("step", steps), ("trainer waits", waits)):
        found = [float(values.mean()), *_percentiles(values).values()]
        lines.append(f"{name:<14}" + "".join(f"{value:>9.1f}" for value in found))
    config = outcome.plan.config
    if config.train is not None:
        whole = config.train.num_steps * outcome.record.elapsed / len(steps)
        lines.append(f"train.num_steps {config.train.num_steps}: about {_span(whole)}")
    return lines


def _gpus(outcome: SimulationResult, number: int = 2) -> str:
    one, many = ("process", "processes") if outcome.plan.config.cluster.gpu is None else ("GPU", "GPUs")
    return one if number == 1 else many


def _idle(outcome: SimulationResult) -> str:
    waiting, rate = outcome.record.waiting / outcome.record.elapsed, f"{outcome.rate:.0f} tokens per second and"
    trainer = f"trainer {waiting:.1%}, waiting for rollouts; servers {outcome.servers_idle:.1%}"
    if outcome.plan.config.cluster.colocated:
        trainer += ", while the other has the GPUs"
    return f"{trainer}; {rate} {_gpus(outcome, 1)}"


def _span(seconds: float) -> str:
    for unit, size in (("days", 86_400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} seconds"


def _failures(outcome: SimulationResult) -> list[str]:
    record = outcome.record
    if not math.isfinite(outcome.asked.mtbf_hours):
        return [
            f"none asked for; {outcome.effective:.1%} of the time in steps,"
            f" {record.saving / record.elapsed:.1%} in saves"
        ]
    return [
        f"a node fails every {outcome.asked.mtbf_hours:g} h: the trainer's {record.trainer_failures} times, servers'"
        f" {record.server_failures} times",
        f"effective time {outcome.effective:.1%}; saves {record.saving / record.elapsed:.1%}, trained again"
        f" {record.repeated / record.elapsed:.1%}, restarts {record.restarting / record.elapsed:.1%}",
    ]


def _save(outcome: SimulationResult) -> list[str]:
    intervals, job = outcome.intervals, outcome.job
    if intervals is None:
        return ["no best interval: " + ("saving pauses nothing" if job.save <= 0 else "nothing fails")]
    step = outcome.mean_step
    return [
        f"best interval {intervals.best} steps ({intervals.best * step / 3600:.1f} h):"
        f" {intervals.shares[intervals.best]:.1%} effective in the long run; configured: {job.save_every or 'none'}",
        f"Young {intervals.young / step:.1f} steps ({intervals.young / 3600:.1f} h), Daly"
        f" {intervals.daly / step:.1f} steps ({intervals.daly / 3600:.1f} h): these count lost steps at their first"
        " price",
    ]


def _splits(outcome: SimulationResult) -> list[str]:
    if not outcome.rows:
        return ["servers have no nodes of their own (cluster.num_rollout_nodes); --nodes N divides N nodes"]
    lines = [
        f"{'trainer':>7} {'servers':>8} {'step s':>9} {'tokens/s/GPU':>13} {'trainer idle':>13} {'servers idle':>13}"
    ]
    for row in outcome.rows:
        here = "  <- simulated above" if row.trainer_nodes == outcome.job.trainer_nodes else ""
        lines.append(
            f"{row.trainer_nodes:>7} {row.server_nodes:>8} {row.step:>9.1f} {row.rate:>13.0f} {row.trainer_idle:>13.1%}"
            f" {row.servers_idle:>13.1%}{here}"
        )
    return lines

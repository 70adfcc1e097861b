"""Table and figures of the tolerance study, from its committed rows alone: `python tests/soak/tolerance_figures.py`.

Writes into docs/studies, for each protocol P whose rows stand for something, tolerance_arms_P.svg (final accuracy of every
run by arm), where it has a dose tolerance_dose_P.svg (final accuracy over the KL between server and trainer before the
first update, GSPO and GRPO). Writes the tables between their marks in tests/benchmarks/RESULTS.md, and prints them.
Standard library only.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Protocol

from tolerance import ROWS
from tolerance_rows import NO_GAP, Row, by_arm, read_rows, smallest_detectable, spread_of, without_starts

# Rows of one protocol are compared among themselves; protocol 1 was given up after three rows.
PROTOCOLS = {2: "all arms", 3: "from other cold starts, the arms that protocol 2 lacks seeds of"}
RESULTS = ROWS.parents[2] / "tests" / "benchmarks" / "RESULTS.md"  # where the tables of studies are
ANCHORS = {"gspo": "gspo-fp32-same-old_trainer", "grpo": "grpo-fp32-same-old_trainer"}
WIDTH = 760
_GSPO, _GRPO, _PPO, _TEXT, _GRID, _COLD = "#b3402a", "#2f6fb0", "#3b8a4a", "#444444", "#dddddd", "#999999"


class Run(Protocol):
    """What a figure of arms shows of a run."""

    @property
    def arm(self) -> str: ...
    @property
    def before(self) -> float: ...
    @property
    def accuracy(self) -> float: ...
    @property
    def accuracy_se(self) -> float: ...
    @property
    def outcome(self) -> str: ...


def colour(run: Run) -> str:
    return {"grpo": _GRPO, "ppo": _PPO}.get(run.arm.partition("-")[0], _GSPO)


def anchor_of(name: str) -> str:
    """The arm without a gap that an arm is compared with: its own algorithm's."""
    return ANCHORS[name.partition("-")[0]]


def verdict(arm: Sequence[Row], anchor: Sequence[Row], spread: float) -> str:
    """The difference of an arm's mean accuracy to the anchor's, against two standard errors of it."""
    difference = fmean(row.accuracy for row in arm) - fmean(row.accuracy for row in anchor)
    bound = 2 * spread * math.sqrt(1 / len(arm) + 1 / len(anchor))
    return f"{difference:+.3f}, {'within' if abs(difference) <= bound else 'beyond'} ± {bound:.3f}"


def table(rows: Sequence[Row]) -> str:
    """The rows by arm as Markdown. Without two runs of one arm there is no spread, and no verdict."""
    arms = by_arm(rows)

    def mean(name: str, arm: Sequence[Row], form: str) -> str:
        """Over the runs that had a first step, and by sign of A over those that ever had that sign."""
        values = [getattr(row, name) for row in arm if row.outcome != "ended"]
        if name.startswith("clip_"):
            values = [value for value in values if not math.isnan(value)]
        return format(fmean(values), form) if values else "-"

    try:
        spread, freedom = spread_of(rows)
        compared = by_arm(without_starts(rows))
    except ValueError:
        spread, freedom, compared = math.nan, 0, arms
    lines = [
        "| arm | accuracy | to the anchor | k3, first step | k3, run | A>0 clipped first | A<0 clipped first | collapsed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, arm in arms.items():
        anchor = anchor_of(name)
        cells = [
            f"`{name}`",
            " ".join(f"{row.accuracy:.3f}" for row in arm),
            verdict(compared[name], compared[anchor], spread) if freedom and anchor in arms and anchor != name else "",
            mean("k3_first", arm, ".1e"),
            mean("k3", arm, ".1e"),
            mean("clip_positive_0", arm, ".3f"),
            mean("clip_negative_0", arm, ".3f"),
            f"{sum(row.outcome != 'trained' for row in arm)} of {len(arm)}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    if freedom:
        detectable = smallest_detectable(spread, freedom, (3, 3))
        lines += [
            "",
            f"Spread between seeds {spread:.3f} ({freedom} degrees of freedom); two arms of three runs differ detectably"
            f" from {detectable:.3f} on. The standard error of one run's accuracy is"
            f" {max(row.accuracy_se for row in rows):.3f} or less. {cold_starts(rows)}.",
            *losses(compared, spread, freedom),
        ]
    if ended := sum(row.outcome == "ended" for row in rows):
        lines += [
            "",
            f"{ended} run{'s' if ended > 1 else ''} ended in the first step, with numbers that were no longer finite:"
            " accuracy 0, nothing else is known, so the second figure does not show it.",
        ]
    return "\n".join(lines) + "\n"


def cold_starts(rows: Sequence[Row]) -> str:
    """The accuracy of the cold start; of several, which seeds each has, and that arms are compared within them."""
    seeds: dict[str, set[int]] = {}
    for row in rows:
        seeds.setdefault(f"{row.before:.3f} ± {row.before_se:.3f}", set()).add(row.seed)
    if len(seeds) == 1:
        return f"Cold start {next(iter(seeds))}"
    by_seed = sorted(seeds.items(), key=lambda found: min(found[1]))
    each = ", ".join(f"{start} (seed {', '.join(map(str, sorted(of)))})" for start, of in by_seed)
    return f"Cold starts {each}: arms are compared seed by seed, without what a cold start adds to all of them"


def losses(arms: Mapping[str, Sequence[Row]], spread: float, freedom: int) -> list[str]:
    """For every pairing that both algorithms were trained in, which of them loses less to its own anchor, against what
    is detectable between two losses; nothing without both anchors.
    """
    if not set(ANCHORS.values()) <= arms.keys():
        return []
    lines = []
    for name, arm in arms.items():
        algorithm, _, pairing = name.partition("-")
        other = f"grpo-{pairing}"
        if algorithm != "gspo" or other not in arms or name in ANCHORS.values():
            continue
        taking_part = [arm, arms[ANCHORS["gspo"]], arms[other], arms[ANCHORS["grpo"]]]
        with_gap, without, grpo_with_gap, grpo_without = (fmean(row.accuracy for row in one) for one in taking_part)
        loss, grpo_loss = without - with_gap, grpo_without - grpo_with_gap
        detectable = smallest_detectable(spread, freedom, [len(one) for one in taking_part])
        less = "GSPO" if loss < grpo_loss else "GRPO"
        seen = f"{less} loses less" if abs(loss - grpo_loss) >= detectable else "no difference seen"
        difference = f"{loss - grpo_loss:+.3f}, {seen}"
        lines.append(f"| `{pairing}` | {loss:.3f} | {grpo_loss:.3f} | {difference} | {detectable:.3f} |")
    if not lines:
        return []
    head = "| pairing | GSPO loses | GRPO loses | difference | detectable from |"
    return ["", "What each algorithm loses of its own anchor's accuracy:", "", head, "|---|---|---|---|---|", *lines]


def draw_arms(
    rows: Sequence[Run],
    title: str = "Accuracy after 40 steps, ± 2 standard errors of sampling; one mark per seed",
    algorithms: Sequence[str] = ("GSPO", "GRPO"),
) -> str:
    """Every run's final accuracy with two standard errors, one line per arm; cold starts as dashed lines."""
    arms: dict[str, list[Run]] = {}
    for row in rows:
        arms.setdefault(row.arm, []).append(row)
    left, top, line = 330, 46, 26
    height = top + line * len(arms) + 44
    bottom = height - 40

    def x(value: float) -> float:
        return left + (WIDTH - left - 20) * value

    parts = _start(height, title)
    for tenth in range(0, 11, 2):
        at = x(tenth / 10)
        parts.append(f'<path d="M{at:.1f} {top - 10}V{bottom}" stroke="{_GRID}"/>')
        parts.append(f'<text x="{at:.1f}" y="{height - 22}" text-anchor="middle">{tenth / 10:.1f}</text>')
    befores = sorted({row.before for row in rows})
    for at in map(x, befores):
        parts.append(f'<path d="M{at:.1f} {top - 10}V{bottom}" stroke="{_COLD}" stroke-dasharray="4 3"/>')
    if befores:
        words = "cold start" if len(befores) == 1 else "cold starts"
        parts.append(f'<text x="{x(befores[0]):.1f}" y="{top - 14}" text-anchor="middle" fill="{_COLD}">{words}</text>')
    for number, (name, arm) in enumerate(arms.items()):
        middle = top + line * number + 8
        parts.append(f'<text x="{left - 10}" y="{middle + 4}" text-anchor="end">{escape(name)}</text>')
        for place, row in enumerate(arm):
            at, y = x(row.accuracy), middle + 6 * (place - (len(arm) - 1) / 2)
            reach = (x(2 * row.accuracy_se) - x(0)) or 0.0
            fill = colour(row) if row.outcome == "trained" else "white"
            parts.append(
                f'<path d="M{at - reach:.1f} {y:.1f}H{at + reach:.1f}" stroke="{colour(row)}"/>'
                f'<circle cx="{at:.1f}" cy="{y:.1f}" r="3" fill="{fill}" stroke="{colour(row)}"/>'
            )
    parts += _legend(height - 4, algorithms)
    return "\n".join([*parts, "</svg>"]) + "\n"


def draw_dose(rows: Sequence[Row]) -> str:
    """Final accuracy of the runs whose ratio carries the gap (`old_log_probs: rollout`) over k3 at their first step, log
    axis, and on its left end the anchors, which have none. A run that ended in its first step has no k3, and no mark.
    """
    shown = [row for row in rows if row.outcome != "ended"]
    direct = [row for row in shown if row.arm.endswith("-old_rollout") or row.arm in ANCHORS.values()]
    left, top, height = 56, 46, 340
    bottom = height - 62
    exponents = [math.log10(row.k3_first) for row in direct if row.k3_first > NO_GAP] or [-3.0]
    low, high = math.floor(min(exponents)), math.ceil(max(exponents) + 1e-9)
    high += high == low
    start = left + 60

    def x(k3: float) -> float:
        if k3 <= NO_GAP:
            return left + 16
        return start + (WIDTH - start - 20) * (math.log10(k3) - low) / (high - low)

    def y(value: float) -> float:
        return bottom - (bottom - top) * value

    parts = _start(height, "Accuracy after 40 steps, the server's log-probs used as old ones")
    for tenth in range(0, 11, 2):
        at = y(tenth / 10)
        parts.append(f'<path d="M{left} {at:.1f}H{WIDTH - 20}" stroke="{_GRID}"/>')
        parts.append(f'<text x="{left - 8}" y="{at + 4:.1f}" text-anchor="end">{tenth / 10:.1f}</text>')
    parts.append(f'<text x="{x(0.0):.1f}" y="{bottom + 18}" text-anchor="middle">none</text>')
    for exponent in range(low, high + 1):
        at = x(10.0**exponent)
        parts.append(f'<path d="M{at:.1f} {top}V{bottom}" stroke="{_GRID}"/>')
        parts.append(f'<text x="{at:.1f}" y="{bottom + 18}" text-anchor="middle">1e{exponent}</text>')
    if direct:
        at = y(direct[0].before)
        parts.append(f'<path d="M{left} {at:.1f}H{WIDTH - 20}" stroke="{_COLD}" stroke-dasharray="4 3"/>')
        parts.append(f'<text x="{WIDTH - 20}" y="{at - 4:.1f}" text-anchor="end" fill="{_COLD}">cold start</text>')
    for row in direct:
        at, middle = x(row.k3_first), y(row.accuracy)
        fill = colour(row) if row.outcome == "trained" else "white"
        parts.append(
            f'<path d="M{at:.1f} {y(row.accuracy - 2 * row.accuracy_se):.1f}V{y(row.accuracy + 2 * row.accuracy_se):.1f}"'
            f' stroke="{colour(row)}"/>'
            f'<circle cx="{at:.1f}" cy="{middle:.1f}" r="3.5" fill="{fill}" stroke="{colour(row)}"/>'
        )
    parts.append(
        f'<text x="{(left + WIDTH) / 2}" y="{bottom + 36}" text-anchor="middle">k3 at the first step, nats</text>'
    )
    parts += _legend(height - 6, ("GSPO", "GRPO"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def with_table(page: str, study: str, text: str) -> str:
    """The page with this text between the study's two marks. Raises ValueError if it does not have both, in order."""
    begin, end = f"<!-- rows of {study} begin -->", f"<!-- rows of {study} end -->"
    before, begun, rest = page.partition(begin)
    _, ended, after = rest.partition(end)
    if not begun or not ended:
        raise ValueError(f"the page has no {begin} ... {end}")
    return f"{before}{begin}\n\n{text}\n{end}{after}"


def _start(height: int, title: str) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" font-family="sans-serif"'
        f' font-size="12" fill="{_TEXT}">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="16" y="20" font-size="14">{escape(title)}</text>',
    ]


def _legend(y: float, algorithms: Sequence[str]) -> list[str]:
    colours = {"GSPO": _GSPO, "GRPO": _GRPO, "PPO": _PPO}
    entries = [(colours[name], colours[name], name) for name in algorithms] + [("white", _TEXT, "collapsed")]
    return [
        f'<circle cx="{24 + 80 * place}" cy="{y - 4}" r="3.5" fill="{fill}" stroke="{edge}"/>'
        f'<text x="{32 + 80 * place}" y="{y}">{text}</text>'
        for place, (fill, edge, text) in enumerate(entries)
    ]


def documents(rows: Sequence[Row]) -> tuple[str, dict[str, str]]:
    """The text of the rows' protocols, one after another, and their figures by file name."""
    parts, figures = [], {}
    for protocol, what in PROTOCOLS.items():
        mine = [row for row in rows if row.protocol == protocol]
        if not mine:
            continue
        parts.append(f"### Protocol {protocol}: {what}\n\n{table(mine)}")
        figures[f"tolerance_arms_{protocol}.svg"] = draw_arms(mine)
        if any(row.arm.endswith("-old_rollout") for row in mine):
            figures[f"tolerance_dose_{protocol}.svg"] = draw_dose(mine)
    return "\n".join(parts), figures


def main(arguments: list[str] | None = None) -> int:
    docs = ROWS.parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=ROWS, help="CSV file of the rows")
    parser.add_argument("--out", type=Path, default=docs, help="folder of the figures")
    parser.add_argument("--page", type=Path, default=RESULTS, help="page that gets the tables")
    options = parser.parse_args(arguments)
    text, figures = documents(read_rows(options.rows))
    if not figures:
        print(f"{options.rows}: no rows of protocols {', '.join(map(str, PROTOCOLS))}")
        return 1
    for name, figure in figures.items():
        (options.out / name).write_text(figure, encoding="utf-8")
    page = options.page.read_text(encoding="utf-8")
    options.page.write_text(with_table(page, "precision", text), encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Draw a run's learning curve as an SVG: `python tools/draw_curve.py CURVE OUT.svg [--title TEXT]`.

CURVE is a run's metrics.jsonl, or the small CSV that `--csv` writes from one. The figure shows the mean reward of each
rollout batch and, where there is one, held-out accuracy with two standard errors. The committed figures are drawn with

    python tools/draw_curve.py docs/quickstart_curve.csv docs/quickstart_curve.svg
    python tools/draw_curve.py docs/smollm2_curve.csv docs/smollm2_curve.svg --title "SmolLM2-135M writes JSON: ..."

Standard library only.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Callable, Iterable
from html import escape
from pathlib import Path

COLUMNS = {
    "step": "step",
    "reward": "reward/mean",
    "accuracy": "eval/accuracy",
    "accuracy_standard_error": "eval/accuracy_standard_error",
}
WIDTH, HEIGHT = 720, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 40, 44
_REWARD, _ACCURACY, _TEXT, _GRID = "#7aa6d8", "#b3402a", "#444444", "#dddddd"

Row = dict[str, float | None]


def read_curve(path: Path) -> list[Row]:
    """Rows of `COLUMNS` by step; None where a step has no such value. Raises ValueError where there is no step."""
    with path.open(encoding="utf-8", newline="") as file:
        if path.suffix == ".csv":
            rows = [{key: float(line[key]) if line[key] else None for key in COLUMNS} for line in csv.DictReader(file)]
        else:
            lines = [json.loads(line) for line in file]
            rows = [{key: line.get(name) for key, name in COLUMNS.items()} for line in lines]
    rows = [row for row in rows if row["reward"] is not None or row["accuracy"] is not None]
    if not rows:
        raise ValueError(f"{path}: no step with a reward or an accuracy")
    return rows


def write_csv(rows: Iterable[Row], path: Path) -> None:
    """Write what `read_curve` reads, six digits per number."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for row in rows:
            writer.writerow(["" if row[key] is None else format(row[key], ".6g") for key in COLUMNS])


def draw(rows: list[Row], title: str) -> str:
    """The SVG; fraction 0 to 1 upwards, step to the right."""
    last = max(max(_number(row, "step") for row in rows), 1.0)
    width, height = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM

    def x(step: float) -> float:
        return _LEFT + width * step / last

    def y(value: float) -> float:
        return _TOP + height * (1 - min(max(value, 0.0), 1.0))

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
        f' font-family="sans-serif" font-size="12" fill="{_TEXT}">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="14">{escape(title)}</text>',
        *_axes(x, y, last),
    ]
    rewards = " ".join(
        f"{x(_number(row, 'step')):.1f},{y(_number(row, 'reward')):.1f}" for row in rows if row["reward"] is not None
    )
    parts.append(f'<polyline points="{rewards}" fill="none" stroke="{_REWARD}" stroke-width="1.5"/>')
    measured = [row for row in rows if row["accuracy"] is not None]
    line = " ".join(f"{x(_number(row, 'step')):.1f},{y(_number(row, 'accuracy')):.1f}" for row in measured)
    if measured:
        parts.append(f'<polyline points="{line}" fill="none" stroke="{_ACCURACY}" stroke-width="2"/>')
    for row in measured:
        at, value, error = x(_number(row, "step")), _number(row, "accuracy"), row["accuracy_standard_error"] or 0.0
        parts.append(
            f'<path d="M{at:.1f} {y(value - 2 * error):.1f}V{y(value + 2 * error):.1f}" stroke="{_ACCURACY}"/>'
            f'<circle cx="{at:.1f}" cy="{y(value):.1f}" r="3.5" fill="{_ACCURACY}"/>'
        )
    parts += _legend(bool(measured))
    return "\n".join([*parts, "</svg>"]) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="draw_curve", description="Draw a run's learning curve as an SVG.")
    parser.add_argument("curve", type=Path, metavar="CURVE", help="metrics.jsonl, or the CSV made of one")
    parser.add_argument("out", type=Path, metavar="OUT.svg")
    parser.add_argument("--title", default="Quickstart: four-digit addition, GSPO on two CPU ranks")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="also write the numbers of the curve here")
    parser.add_argument(
        "--before",
        nargs=2,
        type=float,
        metavar=("ACCURACY", "ERROR"),
        help="held-out accuracy before training and its standard error, which the run's last table shows",
    )
    options = parser.parse_args(arguments)
    rows = read_curve(options.curve)
    if options.before is not None:
        accuracy, error = options.before
        rows.insert(0, {"step": 0.0, "reward": None, "accuracy": accuracy, "accuracy_standard_error": error})
    if options.csv is not None:
        write_csv(rows, options.csv)
        rows = read_curve(options.csv)  # the figure is of the numbers that are kept beside it
    options.out.write_text(draw(rows, options.title), encoding="utf-8")
    print(f"{options.out}: {len(rows)} steps")
    return 0


def _axes(x: Callable[[float], float], y: Callable[[float], float], last: float) -> list[str]:
    parts = []
    for tenth in range(0, 11, 2):
        at = y(tenth / 10)
        parts.append(
            f'<path d="M{_LEFT} {at:.1f}H{WIDTH - _RIGHT}" stroke="{_GRID}"/>'
            f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{tenth / 10:.1f}</text>'
        )
    for quarter in range(5):
        step = last * quarter / 4
        parts.append(f'<text x="{x(step):.1f}" y="{HEIGHT - _BOTTOM + 18}" text-anchor="middle">{step:g}</text>')
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    return [*parts, f'<text x="{middle:.1f}" y="{HEIGHT - 8}" text-anchor="middle">step (rollout batches)</text>']


def _legend(with_accuracy: bool) -> list[str]:
    entries = [(_REWARD, "mean reward of the rollout batch")]
    if with_accuracy:
        entries.append((_ACCURACY, "held-out accuracy, ± 2 standard errors"))
    return [
        f'<path d="M{_LEFT + 360} {HEIGHT - _BOTTOM - 34 + 18 * number}h22" stroke="{colour}" stroke-width="2.5"/>'
        f'<text x="{_LEFT + 390}" y="{HEIGHT - _BOTTOM - 30 + 18 * number}">{text}</text>'
        for number, (colour, text) in enumerate(entries)
    ]


def _number(row: Row, key: str) -> float:
    value = row[key]
    if value is None:
        raise ValueError(f"a row has no {key}: {row}")
    return value


if __name__ == "__main__":
    raise SystemExit(main())

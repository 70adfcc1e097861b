"""A simulation as an SVG of three panels: how long steps take, which division is fastest, how often to save."""

from __future__ import annotations

import itertools
from html import escape

import numpy as np

from gspo_mega.verify.simulate.outcome import Outcome

_PANEL, _GAP, _TOP, _HEIGHT, _LEFT = 260, 60, 64, 180, 56
_WIDTH, _ALL = _LEFT + 3 * _PANEL + 2 * _GAP + 16, _TOP + _HEIGHT + 56
_BAR, _MARK, _TEXT, _GRID = "#7aa6d8", "#b3402a", "#444444", "#dddddd"
_BARS = 24


def draw_outcome(outcome: Outcome, title: str) -> str:
    """The SVG."""
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

"""Table and figures of the study of the paper's claims, from its committed rows: `python tests/soak/claims_figures.py`.

Writes into docs/studies claims_BLOCK.svg for every block that has rows (final accuracy of every run by arm), and the tables
between their marks in tests/benchmarks/RESULTS.md.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

from claims import PROTOCOL, ROWS
from claims_arms import BLOCKS
from claims_rows import Row, of_protocol
from study_rows import compared_spread, read_table, smallest_detectable, start_effects
from tolerance_figures import RESULTS, draw_arms, with_table

TITLE = "Accuracy after the last step, ± 2 standard errors of sampling; one mark per seed"
NEEDED = 3  # runs of an arm before it is compared
_ALGORITHMS = {
    "learning": ("GSPO", "GRPO", "PPO"),
    "routing": ("GSPO", "GRPO"),
    "turns": ("GSPO",),
    "critic": ("GSPO", "PPO"),
    "mini_batches": ("GSPO", "GRPO"),
}


def arms_of(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each arm, in order of the file."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.arm, []).append(row)
    return found


def said(values: Sequence[float], form: str = ".3f") -> str:
    """Mean ± its standard error over the runs that have a number, or `-`."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return "-"
    error = f" ± {format(stdev(known) / math.sqrt(len(known)), form)}" if len(known) > 1 else ""
    return f"{format(fmean(known), form)}{error}"


def by_layer(found: Sequence[str]) -> str:
    """The mean over runs of each layer's percentage, or `-`."""
    runs = [[float(share) for share in layers.split()] for layers in found if layers != "-"]
    return " ".join(f"{fmean(layer):.2f}" for layer in zip(*runs, strict=True)) or "-"


def table(rows: Sequence[Row]) -> str:
    """One block's rows by arm as Markdown, and what can be said between its arms."""
    return "\n".join(mini_batch_lines(rows) if rows[0].block == "mini_batches" else arm_lines(rows)) + "\n"


def arm_lines(rows: Sequence[Row]) -> list[str]:
    """The table of arms, and the differences between them."""
    arms = arms_of(rows)
    lines = [
        "| arm | runs | accuracy | area | tokens clipped | sequences clipped | tokens with other experts"
        " | choices replaced | by layer, % | critic explains | collapsed |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, arm in arms.items():
        cells = [
            f"`{name}`",
            str(len(arm)),
            f"{said([row.accuracy for row in arm])} ({' '.join(f'{row.accuracy:.3f}' for row in arm)})",
            said([row.area for row in arm]),
            said([row.token_clip for row in arm], ".2g"),
            said([row.sequence_clip for row in arm], ".2g"),
            said([row.changed for row in arm], ".2%"),
            said([row.replaced for row in arm], ".2%"),
            by_layer([row.replaced_layers for row in arm]),
            said([row.explained for row in arm]),
            f"{sum(row.outcome != 'trained' for row in arm)} of {len(arm)}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, *differences(rows)]


def mini_batch_lines(rows: Sequence[Row]) -> list[str]:
    """The table of the block `mini_batches`, the differences between its arms, and what 16 mini-batches in place of 4
    cost GRPO more than GSPO.
    """
    lines = [
        "| arm | runs | accuracy | share of sums | area | reward, all steps | largest setback | tokens clipped"
        " | sequences clipped | spread of token log-ratios | of sequences' | tokens | norm of gradients, mean, largest"
        " | collapsed |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, arm in arms_of(rows).items():
        cells = [
            f"`{name}`",
            str(len(arm)),
            f"{said([row.accuracy for row in arm])} ({' '.join(f'{row.accuracy:.3f}' for row in arm)})",
            *(said([getattr(row, column) for row in arm]) for column in ("share", "area", "reward", "setback")),
            *(said([getattr(row, column) for row in arm], ".2g") for column in ("token_clip", "sequence_clip")),
            *(said([getattr(row, column) for row in arm], ".2g") for column in ("token_spread", "sequence_spread")),
            format(fmean(row.response_tokens for row in arm), ".0f"),
            f"{fmean(row.grad_norm for row in arm):.2g}, {max(row.grad_norm_max for row in arm):.2g}",
            f"{sum(row.outcome != 'trained' for row in arm)} of {len(arm)}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, *differences(rows), *costs(rows)]


def costs(rows: Sequence[Row]) -> list[str]:
    """What 16 mini-batches change in an algorithm's results, GRPO's change less GSPO's, and from where on such a
    difference of differences can be told.
    """
    arms = arms_of(rows)
    four = ("grpo-16", "grpo-4", "gspo-16", "gspo-4")
    runs = [len(arms.get(name, ())) for name in four]
    if min(runs) == 0:
        return []
    lines = ["", "| 16 mini-batches less 4 | GRPO | GSPO | GRPO less GSPO | detectable from |", "|---|---|---|---|---|"]
    for column, what in (("accuracy", "final accuracy"), ("share", "share"), ("area", "area"), ("reward", "reward")):

        def value(row: Row, column: str = column) -> float:
            return getattr(row, column)

        grpo, grpo_4, gspo, gspo_4 = (fmean(map(value, arms[name])) for name in four)
        difference = (grpo - grpo_4) - (gspo - gspo_4)
        try:
            detectable = smallest_detectable(*compared_spread(rows, value), runs)
        except ValueError:
            detectable = math.inf
        mark = "**" if abs(difference) >= detectable > 0 else ""
        cells = [what, f"{grpo - grpo_4:+.3f}", f"{gspo - gspo_4:+.3f}", f"{mark}{difference:+.3f}{mark}"]
        lines.append(f"| {' | '.join([*cells, f'{detectable:.3f}'])} |")
    return lines


# What a claim compares an arm with, where that is not the block's first: replay with the same algorithm without, and
# advantages of turns with one advantage per episode.
_COMPARED_WITH = {
    **{f"{name}-routes_{replay}": f"{name}-routes_none" for name in ("gspo", "grpo") for replay in ("R2", "R3")},
    "gspo_token-return_to_go": "gspo_token-episode",
    "ppo-8_responses": "ppo",
    "ppo-frozen": "ppo",
    "grpo-16": "grpo-4",
}


def compared(arms: Sequence[str]) -> list[tuple[str, str]]:
    """(arm, what it is compared with) of a block, in order; an arm whose other has no row has none either."""
    pairs = [(arm, _COMPARED_WITH.get(arm, arms[0])) for arm in arms]
    return [(arm, other) for arm, other in pairs if other in arms and other != arm]


def differences(rows: Sequence[Row]) -> list[str]:
    """Every arm against another of its block, by final accuracy and by area, within cold starts, and what can be seen of
    so many runs. An arm with fewer than NEEDED runs has their number in place of a difference.
    """
    pairs: dict[tuple[str, str], list[str]] = {}
    spreads = []
    for column, what in (("accuracy", "final accuracy"), ("area", "area")):

        def value(row: Row, column: str = column) -> float:
            return getattr(row, column)

        try:
            spread, freedom = compared_spread(rows, value)
        except ValueError:
            return ["", "What can be seen between arms is not known yet: too few runs."]
        spreads.append(f"{spread:.3f} of {what} ({freedom} degrees of freedom)")
        effects = start_effects(rows, value)
        groups = {name: [value(row) - effects[row.cold_start] for row in arm] for name, arm in arms_of(rows).items()}
        for name, first in compared(list(groups)):
            runs = [len(groups[first]), len(groups[name])]
            detectable = smallest_detectable(spread, freedom, runs)
            difference = fmean(groups[name]) - fmean(groups[first])
            mark = "**" if abs(difference) >= detectable > 0 else ""
            cells = pairs.setdefault((name, first), [])
            if min(runs) < NEEDED:
                cells += [f"{min(runs)} of {NEEDED} runs", "-"]
            else:
                cells += [f"{mark}{difference:+.3f}{mark}", f"{detectable:.3f}"]
    lines = [
        "",
        f"Spread between seeds: {' and '.join(spreads)}. Differences in bold can be told, the others cannot at this size:",
        "",
        "| arms | final accuracy | detectable from | area | detectable from |",
        "|---|---|---|---|---|",
        *(f"| `{name}` less `{first}` | {' | '.join(cells)} |" for (name, first), cells in pairs.items()),
    ]
    starts = dict.fromkeys(f"{row.before:.3f} ± {row.before_se:.3f}" for row in rows)
    if len(starts) > 1:
        said = "without what a cold start adds to all arms"
        lines += ["", f"Cold starts {', '.join(starts)}: arms are compared within them, {said}."]
    return lines


def main(arguments: list[str] | None = None) -> int:
    docs = ROWS.parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=ROWS, help="CSV file of the rows")
    parser.add_argument("--out", type=Path, default=docs, help="folder of the figures")
    parser.add_argument("--page", type=Path, default=RESULTS, help="page that gets the tables")
    options = parser.parse_args(arguments)
    rows = of_protocol(read_table(options.rows, Row), PROTOCOL)
    if not rows:
        print(f"{options.rows}: no rows of the present protocol")
        return 1
    parts = []
    for block in BLOCKS:
        mine = [row for row in rows if row.block == block]
        if mine:
            (options.out / f"claims_{block}.svg").write_text(
                draw_arms(mine, TITLE, _ALGORITHMS[block]), encoding="utf-8"
            )
            parts += [f"### {block.replace('_', '-').capitalize()}\n", table(mine)]
    page = options.page.read_text(encoding="utf-8")
    options.page.write_text(with_table(page, "claims", "\n".join(parts)), encoding="utf-8")
    print("\n".join(parts))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Trace every shipped GPU configuration whole, and print the table of tests/benchmarks/RESULTS.md, "Traced configurations".

    python tests/soak/trace_shipped.py [NAME ...]        some minutes each; a NAME is a file of configs/, without .yaml

Exit code 1 if a figure differs from the plan by more than it may.
"""

from __future__ import annotations

import sys
from pathlib import Path

from gspo_mega.base.errors import GspoMegaError
from gspo_mega.config import load_config
from gspo_mega.verify.trace.compare import Difference
from gspo_mega.verify.trace.job import trace_run

CONFIGS = Path(__file__).parents[2] / "configs"
SHOWN = ("state", "memory, old pass", "memory, training", "FLOPs, a pack's forward pass")


def shipped() -> list[str]:
    """The configurations that train on GPUs."""
    names = []
    for path in sorted(CONFIGS.glob("*.yaml")):
        config = load_config(str(path)).config
        if config.train is not None and config.cluster.gpu is not None:
            names.append(path.stem)
    return names


def row(name: str, differences: list[Difference]) -> str:
    """A line of the table: of several ranks the figures that differ most."""
    cells = []
    for what in SHOWN:
        found = [one for one in differences if one.what.endswith(what)]
        worst = max(found, key=lambda one: abs(one.share), default=None)
        size = 2**30 if worst is not None and worst.unit == "bytes" else 1e12
        cells.append("" if worst is None else f"{worst.planned / size:.1f} / {worst.traced / size:.1f}")
    return f"| `{name}` | {' | '.join(cells)} |"


def main(names: list[str]) -> int:
    code = 0
    for name in names or shipped():
        try:
            differences = trace_run(str(CONFIGS / f"{name}.yaml"), []).differences
        except GspoMegaError as error:
            print(f"{name}: {error}", flush=True)
            code = 1
            continue
        print(row(name, differences), flush=True)
        for one in differences:
            if not one.agrees:
                print(f"    {one.what}: {one.share:+.1%} ({one.formula})", flush=True)
                code = 1
    return code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""List the runs below a folder, the latest sign of life first: state, step, reward, accuracy, last checkpoint.

    gspo-mega ls                     the runs in runs/
    gspo-mega ls /data/runs /tmp     the runs in these folders, and in the folders inside them
    gspo-mega ls --json              one JSON object per line: what `gspo-mega status RUN --json` prints of each

Reads files only, as `gspo-mega status` does. A run whose files are damaged is a line that says so.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gspo_mega.base.errors import ConfigError, GspoMegaError
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.base.untrusted import printable
from gspo_mega.cli.status import ago, command_of, facts_of, num_steps_of

# How far below a named folder runs are looked for: runs/<study>/<arm>/<run>.
_DEPTH = 4
_NUMBERS = (
    "reward_mean", "accuracy", "tokens_per_second", "step_seconds", "step", "step_time", "last_sign_of_life_time",
)  # fmt: skip
_MOST = 2**63
_COLUMNS = ("run", "command", "state", "step", "reward", "accuracy", "last sign", "checkpoint")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="where the runs are (default: runs)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per run")


def run(args: argparse.Namespace) -> int:
    folders = args.folders or [Path("runs")]
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"gspo-mega ls: {folder} is no folder; give the folder that holds the runs (run.dir)")
    found = list_runs(folders, time.time())
    if args.json:
        for facts in found:
            print(json.dumps(facts, allow_nan=False))
    elif not found:
        print(f"no runs in {', '.join(map(str, folders))}")
    else:
        print(render_runs(found, time.time()))
    return 0


def list_runs(folders: Sequence[Path], now: float) -> list[dict[str, Any]]:
    """What `status --json` says of each run below `folders`, and its `command` and `num_steps` (null if not known);
    `problem` where its files cannot be read. The latest sign of life
    comes first. `now`: unix seconds.
    """
    places = {path.resolve(): path for folder in folders for path in _run_folders(folder, _DEPTH)}
    found = [_facts(path, now) for path in places.values()]
    return sorted(found, key=lambda facts: facts.get("last_sign_of_life_time") or 0.0, reverse=True)


def _run_folders(folder: Path, depth: int) -> Iterator[Path]:
    """`folder` if it is a run's, else those of runs inside it. Links to folders are not followed."""
    try:
        is_run = (folder / "attempts").is_dir() or (folder / "config.resolved.yaml").is_file()
        inside = (
            []
            if is_run or depth == 0
            else sorted(e.path for e in os.scandir(folder) if e.is_dir(follow_symlinks=False))
        )
    except OSError:  # another user's
        return
    if is_run:
        yield folder
    for path in inside:
        yield from _run_folders(Path(path), depth - 1)


def _facts(path: Path, now: float) -> dict[str, Any]:
    folder = RunFolder(path)
    facts: dict[str, Any] = {"run": str(path)}
    try:
        facts |= facts_of(folder, now) | {"run": str(path)}
        facts["command"] = command_of(folder.latest_attempt())
        facts["num_steps"] = num_steps_of(folder, facts["command"])
        for key in _NUMBERS:
            value = facts[key]
            if value is not None and (type(value) not in (int, float) or not -_MOST < value < _MOST):
                raise ValueError(f"{key} is no number, or none that a run has")
    except (GspoMegaError, OSError, ValueError, RecursionError) as error:
        # What was read before the problem may be no JSON.
        facts = {"run": str(path), "problem": str(error)}
    return facts


def render_runs(found: Sequence[dict[str, Any]], now: float) -> str:
    """`list_runs` as a table for a person."""
    table = Table(box=None, pad_edge=False, header_style="", padding=(0, 2, 0, 0))
    for name in _COLUMNS:
        table.add_column(name, justify="right" if name in ("reward", "accuracy") else "left", no_wrap=True)
    for facts in found:
        # As text: what a file says is no markup.
        table.add_row(*(Text(printable(cell)) for cell in _cells(facts, now)))
    console = Console(width=120 + max(len(printable(facts["run"])) for facts in found), highlight=False)
    with console.capture() as captured:
        console.print(table)
    lines = [line.rstrip() for line in captured.get().splitlines()]
    return "\n".join([*lines, *(printable(f"{one['run']}: {one['problem']}") for one in found if "problem" in one)])


def _cells(facts: dict[str, Any], now: float) -> list[str]:
    if "problem" in facts:
        return [facts["run"], "-", "damaged", *["-"] * 5]
    sign = facts["last_sign_of_life_time"]
    return [
        facts["run"],
        facts["command"] or "-",
        str(facts["state"]),
        _step(facts),
        *("-" if facts[key] is None else f"{facts[key]:.3f}" for key in ("reward_mean", "accuracy")),
        "-" if sign is None else f"{ago(now - sign)} ago",
        facts["checkpoint"] or "-",
    ]


def _step(facts: dict[str, Any]) -> str:
    if facts["step"] is None:
        return "-"
    return str(facts["step"]) if facts["num_steps"] is None else f"{facts['step']}/{facts['num_steps']}"

"""Disturb real small runs of a configuration at random, and see whether each ends as an undisturbed run does.

    gspo-mega drill small_run.yaml --faults 100           kill, stop, fill, cut: 100 faults, drawn by --seed
    gspo-mega drill small_run.yaml --faults 300           go on to 300, from where the first command ended
    gspo-mega drill small_run.yaml --list                 the kinds of faults, and which this machine does not allow
    gspo-mega drill small_run.yaml --table                the table of the faults that were tried

Give it the configuration of a long run with a few steps (train.num_steps=6, checkpoint.every_steps=1) and a small
batch. An undisturbed run comes first. Each trial then starts the run, strikes several faults at random moments,
continues the run with the same command until it ends, and compares weights, optimizer, journal and metrics to the bit.
Rows are in <run.dir>/<run.name>.drill/rows.jsonl (--folder); the command goes on from there, also days later. As root,
or with user name spaces, a drill has mounts of its own, which end with it. A kind that this machine does not allow, or
whose process the run does not have, is left out by name.

Exit code 0: every run ended as an undisturbed one; 1: one did not, or left something behind; its folder is kept.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from gspo_mega.base.errors import ConfigError
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.cli.screen import Screen
from gspo_mega.config import load_config
from gspo_mega.launcher.lease import hold
from gspo_mega.metrics.writer import final_table
from gspo_mega.verify.drill.kinds import KINDS
from gspo_mega.verify.drill.machine import missing_needs
from gspo_mega.verify.drill.plan import HEADERS, MOST_FAULTS, table
from gspo_mega.verify.drill.program import Drill, Settings, missing_processes, read_rows, refuse
from gspo_mega.verify.drill.scene import TRAIN

_INSIDE = "--has-own-mounts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="the YAML file of a small run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a key of the configuration")
    parser.add_argument("--faults", type=int, default=100, metavar="N", help="faults to try in all (default: 100)")
    parser.add_argument("--hours", type=float, metavar="H", help="begin no trial after H hours")
    parser.add_argument("--seed", type=int, default=1, help="of the faults and their moments (default: 1)")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="where the drill keeps its rows and runs")
    parser.add_argument("--kinds", metavar="A,B", help="only these kinds of faults (default: all)")
    parser.add_argument(
        "--live", type=float, default=0.5, metavar="SHARE", help="share of runs that sample from servers (default: 0.5)"
    )
    parser.add_argument(
        "--per-run",
        type=int,
        default=MOST_FAULTS,
        metavar="N",
        help=f"half to all of N faults per run (default: {MOST_FAULTS})",
    )
    parser.add_argument(
        "--patience", type=float, default=900.0, metavar="SECONDS", help="a longer command hangs (default: 900)"
    )
    parser.add_argument(
        "--rows", type=Path, metavar="FILE", help="keep the rows there; drills of several configurations may share it"
    )
    parser.add_argument("--keep", action="store_true", help="keep the folders of sound trials too")
    parser.add_argument("--list", action="store_true", help="list the kinds of faults, and which cannot be tried here")
    parser.add_argument("--table", action="store_true", help="print the table of the faults that were tried")
    parser.add_argument(_INSIDE, action="store_true", help=argparse.SUPPRESS)


def run(args: argparse.Namespace, command: Sequence[str] = TRAIN) -> int:
    """`command`: what trains, before the configuration and its overrides."""
    loaded = load_config(args.config, args.overrides, "train")
    refuse(loaded)
    kinds = list(KINDS) if args.kinds is None else [name.strip() for name in args.kinds.split(",")]
    if unknown := [name for name in kinds if name not in KINDS]:
        raise ConfigError(f"gspo-mega drill: --kinds: {unknown[0]!r} is none; valid: {', '.join(KINDS)}")
    own = loaded.config.run
    folder = (args.folder or Path(own.dir) / f"{own.name}.drill").absolute()
    rows = (args.rows or folder / "rows.jsonl").absolute()
    if args.table:
        return _show(rows, {})
    if not args.has_own_mounts:
        _enter_own_mounts()
    missing = missing_needs(args.has_own_mounts) | missing_processes(loaded.config)
    skipped = {name: missing[need] for name in kinds for need in reversed(KINDS[name].needs) if need in missing}
    if args.list:
        rows = [(name, KINDS[name].what, f"not here: {skipped[name]}" if name in skipped else "") for name in kinds]
        print("\n".join(f"{name:<30}  {what}{f'  ({why})' if why else ''}" for name, what, why in rows))
        return 0
    words = [str(Path(args.config).absolute()), *args.overrides]
    settings = Settings(
        loaded, words, folder, args.seed, args.patience, args.live, args.per_run, args.keep, rows, command
    )
    deadline = None if args.hours is None else time.monotonic() + args.hours * 3600
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # so that the drill ends its runs before itself
        signal.signal(number, signal.default_int_handler)
    with Screen() as say, hold(RunFolder(folder), say):
        for name, why in skipped.items():
            say(f"notice   not tried: {name}: {why}")
        drill = Drill(settings, kinds, skipped, say)
        drill.prepare()
        drill.run(args.faults, deadline)
    return _show(rows, skipped)


def _show(file: Path, skipped: dict[str, str]) -> int:
    rows = read_rows(file)
    print(final_table(table(rows, skipped), HEADERS))
    wrong = [row for row in rows if row.tried and (not row.equal or row.problems)]
    tried = [row for row in rows if row.tried]
    runs, num_kinds = len({(row.drill, row.trial) for row in tried}), len({row.kind for row in tried})
    print(f"\n{len(tried)} faults of {num_kinds} kinds in {runs} runs; not as an undisturbed one: {len(wrong)}")
    return 1 if wrong else 0


def _enter_own_mounts() -> None:
    """Start this command again in a mount name space of its own, if that is possible."""
    for user in ([], ["--map-root-user"]) if os.geteuid() == 0 else (["--map-root-user"],):
        words = ["unshare", *user, "--mount", "--propagation", "private"]
        try:
            subprocess.run([*words, "true"], check=True, capture_output=True)
        except (OSError, subprocess.SubprocessError):
            continue
        os.execvp(words[0], [*words, sys.executable, "-m", "gspo_mega", *sys.argv[1:], _INSIDE])

"""Supervised cold start: train a model on demonstrations until its sampled accuracy is within the configured band.

    gspo-mega sft my_start.yaml             start it, or continue it if its folder has a checkpoint
    gspo-mega sft runs/my_start             continue the run of this folder
    gspo-mega sft my_start.yaml --dry-run   check what can be checked before a start, and start nothing

Uses the ranks, engine and servers of `gspo-mega train`. The result is a Hugging Face folder, `hf` in the run's folder
<run.dir>/<run.name>. Ctrl-C stops after a checkpoint; a second Ctrl-C ends at once.
"""

from __future__ import annotations

import argparse

from gspo_mega.cli.live import run_screen
from gspo_mega.config import load_config
from gspo_mega.launcher.local import dry_run, launch
from gspo_mega.launcher.prepare import configuration_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="the run's YAML file, with `sft` and `eval`; or a folder")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a key of the configuration")
    parser.add_argument("--dry-run", action="store_true", help="check what can be checked before, and start nothing")


def run(args: argparse.Namespace) -> int:
    config, place = configuration_of(args.config, "sft", args.overrides)
    loaded = load_config(config, [*place, *args.overrides], "sft")
    with run_screen() as say:
        return dry_run(loaded, "sft", say) if args.dry_run else launch(loaded, "sft", say)

"""Supervised cold start: train a model on demonstrations until its sampled accuracy is within the configured band.

Uses the ranks, engine and servers of `gspo-mega train`. The result is a Hugging Face folder, `hf` in the run's folder
<run.dir>/<run.name>. Ctrl-C stops after a checkpoint; a second Ctrl-C ends at once.
"""

from __future__ import annotations

import argparse

from gspo_mega.cli.screen import Screen
from gspo_mega.config import load_config
from gspo_mega.launcher.local import launch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="the run's YAML file; needs `sft` and `eval`")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a key of the configuration")


def run(args: argparse.Namespace) -> int:
    with Screen() as say:
        return launch(load_config(args.config, args.overrides, "sft"), "sft", say)

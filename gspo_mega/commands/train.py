"""Train a policy with the servers and ranks that a configuration asks for, on this machine.

Checks and plans first, then starts `gspo-mega serve` and the ranks, shows a line a step, and ends everything it
started however it ends. The run's folder is <run.dir>/<run.name>; the same command continues a run that was
stopped. Ctrl-C stops after a checkpoint, Ctrl-C again at once.

Exit code: 0 finished; 130 stopped by Ctrl-C, 143 by SIGTERM; 2 the configuration, model, data or reward is
wrong; other codes name what failed.
"""

from __future__ import annotations

import argparse

from gspo_mega.config import load_config
from gspo_mega.launcher.launch import launch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="the run's YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values to change in it")


def run(args: argparse.Namespace) -> int:
    return launch(load_config(args.config, args.overrides, "train"), "train", _say)


def _say(line: str) -> None:
    print(line, flush=True)

"""Train a policy with the servers and ranks that a configuration asks for, on this machine.

Checks and plans first, then starts `gspo-mega serve` and the ranks, shows a line a step, and ends everything it
started however it ends. The run's folder is <run.dir>/<run.name>; the same command continues a run that was
stopped. Ctrl-C stops after a checkpoint, Ctrl-C again at once. So does closing the terminal, once; under nohup the
run goes on. Output that nobody reads (`| head`), or that has no room (`> file`), changes nothing: the lines are in
the attempt's folder, too. A run that fails is started again from its last checkpoint (train.max_restarts).

Exit code: 0 finished; 130 stopped by Ctrl-C, 143 by SIGTERM, 129 by a closed terminal; 2 the configuration, model,
data or reward is wrong; other codes name what failed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gspo_mega.commands.screen import Screen
from gspo_mega.config import load_config
from gspo_mega.launcher.local.launch_local import launch
from gspo_mega.launcher.slurm.launch_job import launch_slurm


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="the run's YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values to change in it")
    parser.add_argument(
        "--from-rollouts", metavar="RUN", help="train on the rollouts recorded in this run folder, without servers"
    )
    parser.add_argument(
        "--rollouts-only", action="store_true", help="sample and record the rollouts of every step, train nothing"
    )
    parser.add_argument(
        "--slurm", action="store_true", help="run on the nodes of the Slurm job that this is the batch script of"
    )


def run(args: argparse.Namespace) -> int:
    loaded = load_config(args.config, _overrides(args), "train")
    with Screen() as say:
        return launch_slurm(loaded, "train", say) if args.slurm else launch(loaded, "train", say)


def _overrides(args: argparse.Namespace) -> list[str]:
    extra = [f"train.from_rollouts={Path(args.from_rollouts).absolute()}"] if args.from_rollouts else []
    return [*args.overrides, *extra, *(["train.rollouts_only=true"] if args.rollouts_only else [])]

"""Train a policy on this machine with the servers and ranks that the configuration names.

    gspo-mega train my_run.yaml                          start the run, or continue it if its folder has a checkpoint
    gspo-mega train my_run.yaml train.num_steps=200      the same with another value of a key
    gspo-mega train runs/my_run                          continue the run of this folder
    gspo-mega train my_run.yaml --dry-run                check what can be checked before a start, and start nothing

Checks and plans first, then starts `gspo-mega serve` and the ranks and shows one line per step. However the command
ends, it ends all its processes. The run's folder is <run.dir>/<run.name>; the same command continues a stopped run.
A run that is continued from its folder moves to the working directory in which it was started, because relative paths
of its configuration refer to that.
Ctrl-C stops the run after a checkpoint; a second Ctrl-C ends it at once. Closing the terminal also stops it after a
checkpoint; under nohup the run continues. A lost reader (`| head`) or a full disk (`> file`) does not affect the run:
the lines are also in the attempt's folder. A failed run restarts from its last checkpoint, up to train.max_restarts
times.

Exit code 0: the run finished; 130: stopped by Ctrl-C, 143: by SIGTERM, 129: by a closed terminal; 2: the configuration,
the model, the data or a reward is wrong; other codes say what failed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gspo_mega.cli.live import run_screen
from gspo_mega.config import load_config
from gspo_mega.launcher.local import dry_run, launch
from gspo_mega.launcher.prepare import configuration_of, yaml_string
from gspo_mega.launcher.slurm.job import launch_slurm


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="the run's YAML file, or the folder of a run to continue")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a key of the configuration")
    parser.add_argument(
        "--from-rollouts", metavar="RUN", help="train on the rollouts recorded in this run folder, without servers"
    )
    parser.add_argument(
        "--rollouts-only", action="store_true", help="sample and record the rollouts of every step, train nothing"
    )
    parser.add_argument(
        "--slurm", action="store_true", help="run on the nodes of the Slurm job whose batch script runs this command"
    )

    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="plan, read what the servers and ranks would read, check the run's folder, and start nothing",
    )


def run(args: argparse.Namespace) -> int:
    own = _overrides(args)  # before the working directory changes
    config, place = configuration_of(args.config, "train", args.overrides)
    loaded = load_config(config, [*place, *own], "train")
    with run_screen() as say:
        if args.dry_run:
            return dry_run(loaded, "train", say, in_job=args.slurm)
        return launch_slurm(loaded, "train", say) if args.slurm else launch(loaded, "train", say)


def _overrides(args: argparse.Namespace) -> list[str]:
    extra = (
        [f"train.from_rollouts={yaml_string(str(Path(args.from_rollouts).absolute()))}"] if args.from_rollouts else []
    )
    return [*args.overrides, *extra, *(["train.rollouts_only=true"] if args.rollouts_only else [])]

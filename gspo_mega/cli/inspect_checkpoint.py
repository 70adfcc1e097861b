"""Describe a checkpoint: its model, its tensors, and what it was written by.

    gspo-mega inspect-checkpoint path/to/hf
    gspo-mega inspect-checkpoint runs/x/train/checkpoints/step_00000100

DIR: a Hugging Face folder, a converted folder, or a run's checkpoints/step_N. Exit code 0; 2 or 6: it cannot be read.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gspo_mega.cli.checkpoint_tools import add_described_by


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR")
    add_described_by(parser)


def run(args: argparse.Namespace) -> int:
    from gspo_mega.checkpoint.compare import describe

    for line in describe(args.folder, args.described_by):
        print(line)
    return 0

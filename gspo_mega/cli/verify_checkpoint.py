"""Compare two checkpoints of any two formats, bit for bit.

    gspo-mega verify-checkpoint path/to/hf path/to/megatron
    gspo-mega verify-checkpoint runs/x/train/checkpoints/step_00000100 path/to/hf --described-by path/to/hf

Exit code 0: the same weights; 1: they differ, and the first differences are printed; 2 or 6: one cannot be read.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

from gspo_mega.cli.checkpoint_tools import ProgressBar, add_described_by


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("one", type=Path, metavar="A")
    parser.add_argument("other", type=Path, metavar="B")
    add_described_by(parser)
    parser.add_argument("--most", type=int, default=10, metavar="N", help="stop after N differences (default: 10)")


def run(args: argparse.Namespace) -> int:
    from gspo_mega.checkpoint.compare import differences
    from gspo_mega.checkpoint.tensor_sources import open_checkpoint

    one, other = (open_checkpoint(folder, args.described_by) for folder in (args.one, args.other))
    found = list(itertools.islice(differences(one, other, ProgressBar()), args.most))
    for line in found:
        print(line)
    print(f"{args.one} and {args.other}: {'different weights' if found else 'the same weights'}")
    return 1 if found else 0

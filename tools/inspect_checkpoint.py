"""Describe a checkpoint: `python tools/inspect_checkpoint.py DIR`.

DIR: a Hugging Face folder, a converted folder, or a run's checkpoints/step_N. Exit code 0; 2 or 6: it cannot be read.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from conversion_tool import add_described_by, guarded

from gspo_mega.base.untrusted import printable_output
from gspo_mega.checkpoint.compare import describe


@printable_output()
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="inspect_checkpoint", description="Describe a checkpoint.")
    parser.add_argument("folder", type=Path, metavar="DIR")
    add_described_by(parser)
    options = parser.parse_args(arguments)

    def run() -> int:
        for line in describe(options.folder, options.described_by):
            print(line)
        return 0

    return guarded(run)


if __name__ == "__main__":
    sys.exit(main())

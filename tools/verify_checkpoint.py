"""Compare two checkpoints of any two formats, bit for bit: `python tools/verify_checkpoint.py A B`.

Exit code 0: the same weights; 1: they differ, and the first differences are printed; 2 or 6: one cannot be read.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

from conversion_tool import ProgressBar, add_described_by, guarded

from gspo_mega.base.untrusted import printable_output
from gspo_mega.checkpoint.compare import differences
from gspo_mega.checkpoint.tensor_sources import open_checkpoint


@printable_output()
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="verify_checkpoint", description="Compare two checkpoints of any two formats, bit for bit."
    )
    parser.add_argument("one", type=Path, metavar="A")
    parser.add_argument("other", type=Path, metavar="B")
    add_described_by(parser)
    parser.add_argument("--most", type=int, default=10, metavar="N", help="stop after N differences (default: 10)")
    options = parser.parse_args(arguments)

    def run() -> int:
        one, other = (open_checkpoint(folder, options.described_by) for folder in (options.one, options.other))
        found = list(itertools.islice(differences(one, other, ProgressBar()), options.most))
        for line in found:
            print(line)
        print(f"{options.one} and {options.other}: {'different weights' if found else 'the same weights'}")
        return 1 if found else 0

    return guarded(run)


if __name__ == "__main__":
    sys.exit(main())

"""Replay reference vectors through the objective: `python tools/check_vectors.py FILE`.

Prints a line for each failed case, and `N passed, M failed`. Exit code 0: all passed; 1: some failed; 2: the file is
not a file of vectors.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if __package__ is None or __package__ == "":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gspo_mega.base.errors import DataError
from gspo_mega.base.untrusted import printable_output
from gspo_mega.verify.certify.vectors import replay_file


@printable_output()
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="check_vectors", description="Replay a file of reference vectors through the objective."
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="JSON file of vectors")
    file = parser.parse_args(arguments).file
    try:
        passed, failures = replay_file(file)
    except DataError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    for line in failures:
        print(line)
    print(f"{passed} passed, {len(failures)} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

"""Write a run's report: one HTML file that opens from disk, with a summary in words, curves and sampled trajectories.

    gspo-mega report runs/quickstart/train                    writes runs/quickstart/train/report.html
    gspo-mega report runs/a/train runs/b/train --out both.html

Reads only the files in the run's folder, while the run goes on or afterwards. The curves of several runs are drawn over
each other.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gspo_mega.base.atomic_io import atomic_write_text
from gspo_mega.base.errors import FolderError
from gspo_mega.report.page import make_report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="the folder of a run")
    parser.add_argument(
        "--out", metavar="FILE", type=Path, help="where to write; default: report.html in the first RUN"
    )


def run(args: argparse.Namespace) -> int:
    out = args.out or args.runs[0] / "report.html"
    text = make_report(args.runs)
    try:
        atomic_write_text(out, text)
    except OSError as error:
        raise FolderError(
            f"{out}: the report cannot be written: {error.strerror}; choose another place: --out FILE"
        ) from error
    print(f"{out} ({len(text.encode()) / 1e6:.1f} MB)")
    return 0

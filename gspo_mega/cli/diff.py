"""Say where two runs differ, since which step, and, as far as their records tell, why.

    gspo-mega diff runs/a/train runs/b/train

Compares configuration, versions, rollouts (prompts, tokens, log-probs, rewards), metrics and checkpoints, to the bit.
Exit code 0: everything that was compared is the same; 1: something differs.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from gspo_mega.report.differences import cause, compare, lines
from gspo_mega.report.run_record import read_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("one", metavar="RUN", type=Path, help="the folder of a run")
    parser.add_argument("other", metavar="RUN", type=Path, help="the folder of the other run")
    parser.add_argument("--no-tensors", action="store_true", help="do not compare checkpoints, which takes the longest")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    one, other = read_run(args.one), read_run(args.other)
    found = compare(one, other, tensors=not args.no_tensors)
    if args.json:
        first = None if found.first is None else asdict(found.first)
        print(json.dumps({"same": found.is_same, "first": first, "cause": cause(found), **asdict(found)}))
    else:
        print("\n".join(lines(found, str(one.path), str(other.path))))
    return 0 if found.is_same else 1

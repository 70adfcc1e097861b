"""What other objectives would do with a run's recorded rollouts: gradients, clips, dropped responses. No server.

    gspo-mega compare runs/my_run --algorithms gspo,grpo,cispo
    gspo-mega compare runs/my_run --algorithms gspo,sapo --step 12 --weights start
    gspo-mega compare runs/my_run --algorithms gspo,minirl --old start --json

Takes every algorithm's gradient over one whole rollout batch, at the same weights (--weights; by default the newest
checkpoint) and with the same old log-probs (--old; by default those that the servers recorded). The run's own algorithm
keeps the run's objective and advantages, and so does its other form (gspo, gspo_token); every other algorithm has those
of its paper. The table names the clip ranges. Exit code 0: compared.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from gspo_mega.cli.screen import Screen


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="the folder of a run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a key, for example of `parallel`")
    parser.add_argument(
        "--algorithms", required=True, metavar="A,B,...", help="names of `algorithm`, separated by commas"
    )
    parser.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="use the rollouts of this step, counted from 1; by default the last that the weights were trained on",
    )
    parser.add_argument(
        "--weights",
        default="latest",
        metavar="WHICH",
        help="latest (the newest checkpoint, the default), start (the run's first), or a folder: a checkpoint's or"
        " Hugging Face's",
    )
    parser.add_argument(
        "--old",
        default="recorded",
        metavar="WHICH",
        help="the old log-probs: recorded (by the servers, the default), or the trainer's with weights as above",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    from gspo_mega.verify.compare.run import Request, compare, render  # needs numpy, which `--help` does not

    names = [name.strip() for name in args.algorithms.split(",") if name.strip()]
    request = Request(args.run, names, args.weights, args.old, args.step, args.overrides)
    with Screen() as say:
        code, found = compare(request, (lambda line: None) if args.json else say)
        if found is not None:
            say(json.dumps(found) if args.json else "\n" + render(found))
    return code

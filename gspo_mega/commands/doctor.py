"""Check this machine for a run: versions, GPUs, Transformer Engine, disks, addresses.

Needs the standard library alone: a torch that is missing or broken is a line of the report. A Slurm job runs it on
every node before anything else, with an all-reduce between all of them. Exit code 0: nothing is wrong; 1: something is
wrong.
"""

from __future__ import annotations

import argparse
import socket
from pathlib import Path

from gspo_mega.doctor.answer_deadline import DEADLINE_SECONDS, AnswerDeadline
from gspo_mega.doctor.between_machines import Place, check_together
from gspo_mega.doctor.findings import render
from gspo_mega.doctor.machine_checks import check_machine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--role", choices=("trainer", "server"), action="append", help="what will run on this machine (default: both)"
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("runs"), metavar="DIR", help="where run folders are (default: runs)"
    )
    parser.add_argument(
        "--gpus",
        type=int,
        metavar="N",
        help="number of GPUs that must be usable (default: the number of /dev/nvidia devices)",
    )
    parser.add_argument("--fp8", action="store_true", help="the run uses FP8 layers")
    parser.add_argument(
        "--requests",
        type=int,
        default=1024,
        metavar="N",
        help="concurrent requests: servers x rollout.max_concurrent_requests (default: 1024)",
    )
    parser.add_argument("--address", metavar="A", help="this machine's own address, which ranks and servers bind")
    parser.add_argument(
        "--patience",
        type=float,
        default=DEADLINE_SECONDS,
        metavar="S",
        help="time limit of all checks together, in seconds (default: %(default)g)",
    )
    several = parser.add_argument_group("several machines, one doctor on each machine")
    several.add_argument("--machines", type=int, metavar="N", help="number of machines")
    several.add_argument("--index", type=int, metavar="I", help="index of this machine, from 0")
    several.add_argument(
        "--master", metavar="ADDRESS:PORT", help="address and port where the first machine listens for the others"
    )
    several.add_argument(
        "--meet", type=Path, metavar="DIR", help="a new folder on a file system that all machines share"
    )


def run(args: argparse.Namespace) -> int:
    gpus = len(list(Path("/dev").glob("nvidia[0-9]*"))) if args.gpus is None else args.gpus
    deadline = AnswerDeadline(args.patience)
    findings = list(
        check_machine(
            tuple(args.role or ("trainer", "server")),
            args.folder,
            gpus,
            args.fp8,
            args.address,
            deadline,
            args.requests,
        )
    )
    if args.machines is not None:
        address, _, port = args.master.rpartition(":")
        findings += check_together(
            Place(args.index, args.machines, (address.strip("[]"), int(port))), args.meet, gpus, deadline
        )
    print(render(findings, socket.gethostname()))
    return 1 if any(finding.level == "wrong" for finding in findings) else 0

"""What is wrong with this machine for a run: versions, GPUs, Transformer Engine, disks, addresses.

Starts on the standard library alone: a torch that is missing or broken is a line of the answer. A Slurm job runs it on
every node before anything else, with an all-reduce between all of them. Exit code 0: nothing is wrong; 1: something is.
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
        "--role", choices=("trainer", "server"), action="append", help="what will run here; both by default"
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("runs"), metavar="DIR", help="where run folders are (default: runs)"
    )
    parser.add_argument(
        "--gpus", type=int, metavar="N", help="GPUs that must be here; as many as there are devices by default"
    )
    parser.add_argument("--fp8", action="store_true", help="the run wants FP8 layers")
    parser.add_argument(
        "--requests",
        type=int,
        default=1024,
        metavar="N",
        help="requests open at once: servers x rollout.max_concurrent_requests (default: 1024)",
    )
    parser.add_argument("--address", metavar="A", help="this machine's own address, to bind")
    parser.add_argument(
        "--patience",
        type=float,
        default=DEADLINE_SECONDS,
        metavar="S",
        help="seconds that all of it may take (default: %(default)g)",
    )
    several = parser.add_argument_group("several machines, one doctor on each")
    several.add_argument("--machines", type=int, metavar="N", help="how many")
    several.add_argument("--index", type=int, metavar="I", help="which one this is, from 0")
    several.add_argument("--master", metavar="ADDRESS:PORT", help="where the first one listens for the others")
    several.add_argument("--meet", type=Path, metavar="DIR", help="a new folder that all see")


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

"""Check this machine for a run: versions, GPUs, Transformer Engine, disks, addresses.

    gspo-mega doctor                                          this machine, as a trainer and a server
    gspo-mega doctor --role server --gpus 4
    gspo-mega doctor --tokenizer path/to/hf                   a chat template

Needs only the standard library, so a torch that is missing or broken is a line of the report. A Slurm job runs the
doctor on every node before anything else, with an all-reduce between all of them. Exit code 0: nothing is wrong;
1: something is wrong.

With --tokenizer, the command checks a chat template for episodes of several turns, and nothing of the machine
(docs/templates.md).
"""

from __future__ import annotations

import argparse
import socket
from pathlib import Path

from gspo_mega.base import versions
from gspo_mega.base.versions import Finding, render
from gspo_mega.launcher.doctor import (
    DEADLINE_SECONDS,
    AnswerDeadline,
    MachinePlace,
    check_machine,
    check_together,
)
from gspo_mega.launcher.server_python import server_python_variable


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
    parser.add_argument(
        "--server-python",
        metavar="PYTHON",
        help="the servers' Python, if it is another one: check what is in it and whether it fits this one (default: the"
        " value of GSPO_SERVER_PYTHON)",
    )
    parser.add_argument(
        "--publish",
        choices=("distributed", "disk"),
        default="distributed",
        help="publish.method of the run: disk does not need the same PyTorch and NCCL on both sides (default:"
        " distributed)",
    )
    parser.add_argument("--address", metavar="A", help="this machine's own address, which ranks and servers bind")
    parser.add_argument(
        "--patience",
        type=float,
        default=DEADLINE_SECONDS,
        metavar="S",
        help="time limit of all checks together, in seconds (default: %(default)g)",
    )
    template = parser.add_argument_group("a chat template for episodes of several turns, instead of the machine")
    template.add_argument(
        "--tokenizer",
        type=Path,
        metavar="HF_DIR",
        help="folder of a Hugging Face tokenizer, with config.json or generation_config.json for its end tokens",
    )
    template.add_argument(
        "--tool-format",
        choices=("auto", "hermes", "brackets", "none"),
        default="auto",
        help="episodes.tool_format of the run (default: auto)",
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
    several.add_argument(
        "--versions",
        type=Path,
        metavar="DIR",
        help="write the versions of each role's Python into DIR, for a comparison of all machines, and"
        " compare none here",
    )


def run(args: argparse.Namespace) -> int:
    if args.tokenizer is not None:
        return _check_tokenizer(args.tokenizer, args.tool_format)
    gpus = len(list(Path("/dev").glob("nvidia[0-9]*"))) if args.gpus is None else args.gpus
    deadline = AnswerDeadline(args.patience)
    roles = tuple(args.role or ("trainer", "server"))
    # In a Slurm job each step already runs in its role's Python.
    chosen = args.server_python or (server_python_variable() if args.versions is None else None)
    software, findings = _software(roles, chosen, deadline)
    if args.versions is not None:
        for role, found in software.items():
            versions.record_versions(args.versions, args.index or 0, role, found)
    elif set(software) == {"trainer", "server"} and software["server"] is not software["trainer"]:
        by_nccl = args.publish == "distributed" and gpus > 0
        findings += versions.compare(software["trainer"], software["server"], by_nccl)
    if gpus:
        problems = dict.fromkeys(versions.driver_problem(found) for found in software.values())
        findings += [Finding("wrong", "driver", problem) for problem in problems if problem is not None]
    findings += check_machine(
        tuple(software), args.folder, gpus, args.fp8, args.address, deadline, args.requests, software
    )
    if args.machines is not None:
        address, _, port = args.master.rpartition(":")
        findings += check_together(
            MachinePlace(args.index, args.machines, (address.strip("[]"), int(port))), args.meet, gpus, deadline
        )
    print(render(findings, socket.gethostname()))
    return 1 if any(finding.level == "wrong" for finding in findings) else 0


def _software(
    roles: tuple[str, ...], server_python: str | None, deadline: AnswerDeadline
) -> tuple[dict[str, versions.Versions], list[Finding]]:
    """The versions in each role's Python. A role whose Python does not answer is left out and becomes a finding."""
    own = versions.own_versions()
    software = dict.fromkeys(roles, own)
    if server_python is not None and "server" in roles and not versions.is_this_python(server_python):
        try:
            software["server"] = versions.versions_of(server_python, deadline.left)
        except ValueError as error:
            del software["server"]
            return software, [Finding("wrong", "pythons", f"the servers' Python: {error}")]
    return software, []


def _check_tokenizer(folder: Path, tool_format: str) -> int:
    # Imported here: the rest of the doctor works without these packages.
    from gspo_mega.agents.template_certificate import certify_template, summary
    from gspo_mega.data.chat import PromptEncoder, load_tokenizer
    from gspo_mega.data.templates import SuffixRule, run_end_tokens
    from gspo_mega.models.huggingface import read_end_tokens

    configured = read_end_tokens(folder)
    tokenizer = load_tokenizer(str(folder))
    encoder = PromptEncoder(tokenizer, chat_template=True)
    ends = run_end_tokens(encoder, tokenizer, configured, None, calls=True)
    rule = SuffixRule(encoder, ends.ids)
    certificate = certify_template(tokenizer, encoder, rule.with_tools, tool_format)
    findings = [Finding("note", "ends", text) for text in ends.notices]
    findings += [Finding(one.level, one.what, f"{one.text} [{one.kind}]") for one in summary(certificate)]
    print(render(findings))
    if certificate.is_exact:
        print(f"{folder}: certified")
        return 0
    print(f"{folder}: not certified; the tokens of episodes of several turns would not be what this template writes")
    return 1

"""Check what several machines share: a folder that all see, and an all-reduce between them. Standard library alone.

One numbered process per machine. They meet in the folder and, for the all-reduce, at the first machine's address.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from gspo_mega.base.findings import Finding
from gspo_mega.launcher.answer_deadline import AnswerDeadline


@dataclass(frozen=True)
class Place:
    """This machine among `num_machines`. `master`: address and free port of the first machine."""

    index: int
    num_machines: int
    master: tuple[str, int]


def check_together(place: Place, folder: Path, gpus: int, deadline: AnswerDeadline) -> list[Finding]:
    """`folder`: a new folder of this check, on the shared file system. `deadline`: the checks of this machine have used
    part of it, and those of another machine may take longer.
    """
    shared = _shared_folder(place, folder, deadline)
    # With a machine missing, an all-reduce would only wait for it.
    return [shared] if shared.level == "wrong" else [shared, _all_reduce(place, gpus, deadline)]


def _shared_folder(place: Place, folder: Path, deadline: AnswerDeadline) -> Finding:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"machine-{place.index}").touch()
    until = time.monotonic() + deadline.left
    missing = set(range(place.num_machines))
    while missing and time.monotonic() < until:
        missing -= {index for index in missing if (folder / f"machine-{index}").exists()}
        time.sleep(0.1)
    if missing:
        return Finding(
            "wrong",
            "shared",
            f"{folder} does not show the files of machine {', '.join(map(str, sorted(missing)))} of"
            f" {place.num_machines}",
        )
    return Finding("ok", "shared", f"all {place.num_machines} machines see {folder.parent}")


def _all_reduce(place: Place, gpus: int, deadline: AnswerDeadline) -> Finding:
    address, port = place.master
    seconds = deadline.left
    command = [
        sys.executable,
        "-m",
        "gspo_mega.launcher.all_reduce_probe",
        "--rank",
        str(place.index),
        "--world",
        str(place.num_machines),
        "--address",
        address,
        "--port",
        str(port),
        "--seconds",
        str(seconds),
        *(["--gpu"] if gpus else []),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return Finding(
            "wrong",
            "network",
            f"an all-reduce with {place.num_machines} machines at {address}:{port} did not end within {seconds:.0f} s",
        )
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        return Finding("wrong", "network", f"all-reduce: {lines[-1] if lines else f'ended with {done.returncode}'}")
    return Finding("ok", "network", done.stdout.strip().splitlines()[-1])

"""The doctor on every node of a job, before anything else is started there.

Owns waiting for the steps and what is said of them; what a doctor looks at is `gspo_mega/doctor`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from gspo_mega.errors import RankError
from gspo_mega.launcher.children import ChildSpec
from gspo_mega.launcher.slurm.controller_outage import Answers
from gspo_mega.launcher.slurm.scontrol import Node, job_runs
from gspo_mega.launcher.slurm.step_starts import Starts

# What srun and a Python take to start and end, beyond the doctor's own time.
MARGIN_SECONDS = 120.0
_POLL_SECONDS = 0.2


def preflight(
    starts: Starts,
    answers: Answers,
    job_id: str,
    doctors: Sequence[tuple[Node, ChildSpec]],
    patience_seconds: float,
    say: Callable[[str], None],
) -> None:
    """Start all `doctors` and wait; `patience_seconds`: what each gives its checks. Raises RankError, one line, when
    something is wrong; what, and where, is said before.
    """
    children = [(node, starts.start(spec)) for node, spec in doctors]
    deadline = time.monotonic() + patience_seconds + MARGIN_SECONDS
    over: set[int] = set()
    while time.monotonic() < deadline and len(over) < len(children):
        for index, (node, child) in enumerate(children):
            if child.exit_code is None or index in over:
                continue
            if starts.never_began(child):
                answers.demand(lambda: job_runs(job_id))  # a silent Slurm starts nothing
                if (again := starts.again(child)) is not None:
                    children[index] = (node, again)
                    continue
            over.add(index)
        time.sleep(_POLL_SECONDS)
    bad = []
    for node, child in children:
        said = child.spec.log.read_text(encoding="utf-8", errors="replace").splitlines()
        for line in said:
            if line.split(": ", 1)[-1].startswith(("wrong", "note")):
                say(f"doctor   {line}")
        if child.exit_code != 0:
            bad.append(node.name)
            if not any(": wrong" in line for line in said):
                what = (
                    f"did not end within {patience_seconds + MARGIN_SECONDS:.0f} s"
                    if child.exit_code is None
                    else child.end_described
                )
                say(f"doctor   {node.name}: {what}: {said[-1] if said else 'without a word'}")
    if bad:
        raise RankError(
            f"error: something is wrong on {', '.join(bad)}: see the doctor's lines above (all of them:"
            f" {children[0][1].spec.log.parent}/doctor_*.log)"
        )
    say(f"doctor   nothing is wrong on {len(children)} nodes")

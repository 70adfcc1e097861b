"""Run the doctor on every node of a job before anything else starts there.

Owns the wait for these steps and the report on them. The checks are in `gspo_mega/launcher`, and so is the comparison
of the versions that they found in the trainer's Python and in the servers'.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from gspo_mega.base.errors import RankError
from gspo_mega.base.findings import Finding, render
from gspo_mega.launcher.children import ChildSpec
from gspo_mega.launcher.slurm.controller_outage import Answers
from gspo_mega.launcher.slurm.scontrol import Node, job_runs
from gspo_mega.launcher.slurm.step_starts import Starts

# Time for srun and Python to start and end, beyond the doctor's own time limit.
MARGIN_SECONDS = 120.0
_POLL_SECONDS = 0.2


def preflight(
    starts: Starts,
    answers: Answers,
    job_id: str,
    doctors: Sequence[tuple[Node, ChildSpec]],
    patience_seconds: float,
    say: Callable[[str], None],
    compare: Callable[[], Iterable[Finding]] = tuple,
) -> None:
    """Start all `doctors` and wait for them; `patience_seconds`: the time limit of each one's checks. `compare`: what
    the versions say that they recorded. Shows their findings, then raises a RankError of one line when something is
    wrong.
    """
    children = [(node, starts.start(spec)) for node, spec in doctors]
    deadline = time.monotonic() + patience_seconds + MARGIN_SECONDS
    over: set[int] = set()
    while time.monotonic() < deadline and len(over) < len(children):
        for index, (node, child) in enumerate(children):
            if child.exit_code is None or index in over:
                continue
            if starts.never_began(child):
                answers.demand(lambda: job_runs(job_id))  # while Slurm is silent, no step starts
                if (again := starts.again(child)) is not None:
                    children[index] = (node, again)
                    continue
            over.add(index)
        time.sleep(_POLL_SECONDS)
    bad = []
    for node, child in children:
        output = child.spec.log.read_text(encoding="utf-8", errors="replace").splitlines()
        for line in output:
            if line.split(": ", 1)[-1].startswith(("wrong", "note")):
                say(f"doctor   {line}")
        if child.exit_code != 0:
            bad.append(node.name)
            if not any(": wrong" in line for line in output):
                what = (
                    f"did not end within {patience_seconds + MARGIN_SECONDS:.0f} s"
                    if child.exit_code is None
                    else child.end_described
                )
                say(f"doctor   {node.name}: {what}: {output[-1] if output else 'no output'}")
    if bad:
        raise RankError(
            f"error: something is wrong on {', '.join(bad)}. See the doctor's lines above (full reports:"
            f" {children[0][1].spec.log.parent}/doctor_*.log)"
        )
    found = [finding for finding in compare() if finding.level != "ok"]
    for line in render(found).splitlines():
        say(f"doctor   {line}")
    if any(finding.level == "wrong" for finding in found):
        raise RankError("error: the servers' Python does not fit the trainer's. See the doctor's lines above")
    say(f"doctor   nothing is wrong on {len({node.name for node, _ in children})} nodes")

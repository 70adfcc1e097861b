"""Start the steps of a job, and start again those that srun could not start.

Owns the question whether a step ever ran: a failed call of Slurm is not the failure of a rank or server. Those failures
are handled by `job_supervisor.py` and `server_steps.py`.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from gspo_mega.base.run_folder import Attempt
from gspo_mega.launcher.children import Child, ChildSpec, Family
from gspo_mega.launcher.slurm.controller_outage import ASK_AGAIN_SECONDS

# Consecutive starts of one step while Slurm answers. An option that srun never accepts is reported soon.
_MOST_STARTS = 3
# srun's lines about a task or its node: the step had begun.
_OF_A_TASK = re.compile(r"^srun: error: (\S+: tasks? \d|Node failure)", re.MULTILINE)


class Starts:
    """`family`: the processes of the attempt. `say` shows a line in the job's log."""

    def __init__(self, family: Family, attempt: Attempt, say: Callable[[str], None]) -> None:
        self._family, self._attempt, self._say = family, attempt, say
        self._failed: Counter[Path] = Counter()

    def start(self, spec: ChildSpec) -> Child:
        return self._family.start(spec)

    def again(self, child: Child) -> Child | None:
        """Start the step again after a pause. None where it had begun, or failed to start too often."""
        if not self.never_began(child):
            return None
        key = child.spec.log  # each step has one of its own
        self._failed[key] += 1
        if self._failed[key] >= _MOST_STARTS:
            return None
        self._say(f"warning  srun could not start {child.name}; trying again: {_last_line(child)}")
        time.sleep(ASK_AGAIN_SECONDS)
        return self.start(child.spec)

    def never_began(self, child: Child) -> bool:
        """Whether srun failed before the step had a task: no task left a log, and srun mentions none."""
        if not child.exit_code or (child.spec.kind == "ranks" and any(self._attempt.logs_dir.glob("rank_*.log"))):
            return False
        output = _output(child)
        return (
            all(line.startswith("srun:") for line in output.splitlines() if line.strip())
            and _OF_A_TASK.search(output) is None
        )


def _output(child: Child) -> str:
    try:
        return child.spec.log.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""


def _last_line(child: Child) -> str:
    lines = _output(child).split("\n")
    return next((line for line in reversed(lines) if line.strip()), child.end_described)

"""Starting a job's steps, and starting again those that srun could not start.

Owns the question whether a step ever ran: a call of Slurm that failed is no failure of a rank or a server. What a
failed rank or server means is `job_supervisor.py`'s and `server_steps.py`'s.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable

from gspo_mega.launcher.children import Child, ChildSpec, Family
from gspo_mega.launcher.slurm.controller_outage import ASK_AGAIN_SECONDS
from gspo_mega.run_folder import Attempt

# Starts of one step in a row while Slurm answers: what srun refuses every time, as an option it does not know, is told
# soon.
_MOST_STARTS = 3
# What srun says of a task, or of the node under it: there was one.
_OF_A_TASK = re.compile(r"^srun: error: (\S+: tasks? \d|Node failure)", re.MULTILINE)


class Starts:
    """`family`: of the attempt. `say` shows a line in the job's log."""

    def __init__(self, family: Family, attempt: Attempt, say: Callable[[str], None]) -> None:
        self._family, self._attempt, self._say = family, attempt, say
        self._failed: Counter[tuple[str, int]] = Counter()

    def start(self, spec: ChildSpec) -> Child:
        return self._family.start(spec)

    def again(self, child: Child) -> Child | None:
        """The step's next start, after a pause; None where it ran, or has failed to start too often."""
        if not self.never_began(child):
            return None
        key = (child.spec.kind, child.spec.index)
        self._failed[key] += 1
        if self._failed[key] >= _MOST_STARTS:
            return None
        self._say(f"warning  srun could not start {child.name}, which is tried again: {_last_line(child)}")
        time.sleep(ASK_AGAIN_SECONDS)
        return self.start(child.spec)

    def never_began(self, child: Child) -> bool:
        """Whether srun ended with an error before the step had a task: none left a trace, and srun speaks of none."""
        if not child.exit_code or (child.spec.kind == "ranks" and any(self._attempt.logs_dir.glob("rank_*.log"))):
            return False
        said = _said(child)
        return (
            all(line.startswith("srun:") for line in said.splitlines() if line.strip())
            and _OF_A_TASK.search(said) is None
        )


def _said(child: Child) -> str:
    try:
        return child.spec.log.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""


def _last_line(child: Child) -> str:
    lines = _said(child).split("\n")
    return next((line for line in reversed(lines) if line.strip()), child.end_described)

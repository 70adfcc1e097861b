"""Watches over the batch node from another node of the job: `python -I slurm_watch.py JOB BATCH_NODE STATE_FILE LOG`.

A job that may go on without a node (--no-kill) also goes on without the one its batch script ran on, with nobody left to
do anything about it. This process then has Slurm queue the job again. Standard library alone: it is run as a file.
"""

import os
import re
import subprocess
import sys
import time

_LOOK_SECONDS = 2.0
# The supervisor writes its file every few seconds; a shared folder may show that late.
_SILENCE_SECONDS = 20.0


def main() -> None:
    job, batch_node, state_file, log = sys.argv[1:]
    seen, since = None, time.monotonic()
    while True:
        time.sleep(_LOOK_SECONDS)
        now = _changed(state_file)
        if now != seen:
            seen, since = now, time.monotonic()
        elif time.monotonic() - since > _SILENCE_SECONDS:
            # Slurm is asked only in silence, and its word counts: a slow folder is no lost node.
            if batch_node not in _nodes_of(job):
                # Not to its output, which srun on that very node would write.
                with open(log, "a", encoding="utf-8") as file:
                    file.write(f"{batch_node}, where the supervisor ran, is lost: job {job} is queued again\n")
                subprocess.run(["scontrol", "requeue", job], check=True)
                return
            since = time.monotonic()


def _changed(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0


def _nodes_of(job: str) -> set[str]:
    shown = _output("scontrol", "show", "job", "-o", job)
    lists = re.findall(r"(?<!\w)NodeList=(\S+)", shown)
    return {name for nodes in lists if nodes != "(null)" for name in _output("scontrol", "show", "hostnames", nodes).split()}


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


if __name__ == "__main__":
    main()
